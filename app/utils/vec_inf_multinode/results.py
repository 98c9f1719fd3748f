"""The output of a run: one line a result, and how a run goes on where it was.

Beside ``results.jsonl`` lies ``results.jsonl.run.json``: which input and model it
belongs to, and the job that was launched for it. An output ``results.json`` grows as
``results.json.partial.jsonl`` and becomes one array at the end.

Every step leaves files from which the same run can go on: a process may be killed
between any two of them.
"""

import errno
import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Optional

# A file system without locks, Lustre mounted without "flock" for instance.
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


class OutputError(ValueError):
    """The output is not this run's; the text says what to do."""


class OutputBusyError(OSError):
    """Another run writes to the output."""


class WriteError(Exception):
    """A result could not be written; those before it are safe."""


@dataclass
class Tally:
    """What the results come to.

    Parameters
    ----------
    done : int
        Results, those with an error included.
    failed : int
        Results with an error.
    prompt_tokens, completion_tokens : int
        Sums of the results' ``usage``.
    """

    done: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, result: dict[str, Any]) -> None:
        """Count one result."""
        self.done += 1
        self.failed += result["error"] is not None
        body = (result["response"] or {}).get("body")
        usage = body.get("usage") if isinstance(body, dict) else None
        if isinstance(usage, dict):
            self.prompt_tokens += _tokens(usage, "prompt_tokens", "input_tokens")
            self.completion_tokens += _tokens(
                usage, "completion_tokens", "output_tokens"
            )


def _tokens(usage: dict[str, Any], *names: str) -> int:
    return next((usage[n] for n in names if isinstance(usage.get(n), int)), 0)


@dataclass(frozen=True)
class State:
    """What ``.run.json`` holds; nothing secret.

    Parameters
    ----------
    input_sha256, model : str
        What the output belongs to.
    job_id : str, optional
        The job that was launched for it, until it is stopped.
    finished : dict, optional
        The final tally, once an array has been written.
    """

    input_sha256: str
    model: str
    job_id: Optional[str] = None
    finished: Optional[dict[str, int]] = None


@dataclass
class Output:
    """The output of a run, held by a lock while it is open.

    Parameters
    ----------
    path : Path
        What was asked for; ``.json`` makes an array of it.
    input_sha256, model : str
        What it must belong to.

    Attributes
    ----------
    done : set of str
        Ids that have a result.
    tally : Tally
        What all results come to, the ones written since included.
    locked : bool
        False where the file system has no locks.
    """

    path: Path
    input_sha256: str
    model: str
    done: set[str] = field(default_factory=set)
    tally: Tally = field(default_factory=Tally)
    locked: bool = True
    _state: State = field(init=False)
    _descriptor: int = -1

    def __post_init__(self) -> None:
        """Fix the places: an output may be a link to a file elsewhere."""
        self.path = self.path.resolve()
        self._state = State(self.input_sha256, self.model)

    @property
    def is_array(self) -> bool:
        """Whether it becomes one JSON array at the end."""
        return self.path.suffix == ".json"

    @property
    def lines(self) -> Path:
        """The file that each result is appended to."""
        return _beside(self.path, ".partial.jsonl") if self.is_array else self.path

    @property
    def state_file(self) -> Path:
        """The file that says what the output belongs to."""
        return _beside(self.path, ".run.json")

    @property
    def job_id(self) -> Optional[str]:
        """The job that was launched for this output and not stopped since."""
        return self._state.job_id

    def is_complete(self, count: int) -> bool:
        """Whether `count` requests have their results."""
        return bool(self._state.finished) or len(self.done) >= count

    def __enter__(self) -> "Output":
        """Take the lock, and find out what there is already.

        Raises
        ------
        OutputError
            If it belongs to another input or model, or to nobody that is known.
        OutputBusyError
            If another run has it open.
        """
        while True:
            # before anything is made, and again under the lock
            self._state = self._check_state()
            if self._state.finished:
                self.tally = Tally(**self._state.finished)
                self.lines.unlink(missing_ok=True)
                return self
            if self._lock():
                break
        try:
            self._state = self._check_state()
            self._save()
            self._read()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        """Let another run have it."""
        self.close()

    def close(self) -> None:
        """Let another run have it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def record_job(self, job_id: Optional[str]) -> None:
        """Remember the job that was launched, or that there is none any more."""
        self._state = replace(self._state, job_id=job_id)
        self._save()

    def write(self, result: dict[str, Any]) -> None:
        """Append one result.

        Raises
        ------
        WriteError
            If it could not be written whole, to a full disk for instance.
        """
        line = json.dumps(result).encode() + b"\n"
        end = os.fstat(self._descriptor).st_size
        try:
            # one write, so that a kill leaves the line or nothing of it
            if os.write(self._descriptor, line) < len(line):
                os.ftruncate(self._descriptor, end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as err:
            raise WriteError(err.strerror) from err
        self.tally.add(result)
        self.done.add(result["custom_id"])

    def finish(self, ids: Iterable[str]) -> None:
        """Make all results safe, as one array if that was asked for.

        Parameters
        ----------
        ids : iterable of str
            Every ``custom_id``, in the order of the input.
        """
        if self._state.finished:
            return
        os.fsync(self._descriptor)
        if not self.is_array:
            return
        new = _beside(self.path, ".partial.json")
        with new.open("wb") as file, self.lines.open("rb") as lines:
            file.write(b"[\n")
            file.writelines(_in_order(lines, ids))
            file.write(b"\n]\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, self.path)
        # from here on the array counts, and what is left of the lines does not
        self._state = replace(self._state, finished=asdict(self.tally))
        self._save()
        self.lines.unlink()

    def _check_state(self) -> State:
        """The state of this run, a fresh one if there is nothing at all."""
        if not self.path.parent.is_dir():
            raise OutputError(f"{self.path.parent} is no directory. Make it first.")
        for path in (self.path, self.lines):
            if path.exists() and not path.is_file():
                raise OutputError(f"{path} is not a file. Choose another --output.")
        state = self._load_state()
        if state is None:
            found = [
                p for p in {self.path, self.lines} if p.exists() and p.stat().st_size
            ]
            if found:
                raise OutputError(
                    f"{min(found)} exists and was not written by such a run "
                    f"({self.state_file.name} is not there), so nothing is appended "
                    "to it. Choose another --output, or move it away."
                )
            return State(self.input_sha256, self.model)
        if state.finished and not self.path.exists():
            # somebody took the array away: the run starts afresh
            state = replace(state, finished=None)
        for what, have, want in (
            ("input", state.input_sha256, self.input_sha256),
            ("model", state.model, self.model),
        ):
            if have != want:
                raise OutputError(
                    f"{self.path} holds results of another {what}: {have}, now it is "
                    f"{want} (from {self.state_file.name}). Choose another --output, "
                    f"or move both files away to start afresh.{self._job_note(state)}"
                )
        return state

    def _job_note(self, state: State) -> str:
        if not state.job_id:
            return ""
        return f" Job {state.job_id} was launched for them and may still run."

    def _load_state(self) -> Optional[State]:
        try:
            return State(**json.loads(self.state_file.read_bytes()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError):
            raise OutputError(
                f"{self.state_file} cannot be read. Move it and {self.path.name} away "
                "to start afresh."
            ) from None

    def _save(self) -> None:
        """Replace the state file in one step."""
        new = _beside(self.state_file, ".new")
        new.unlink(missing_ok=True)
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(asdict(self._state), file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, self.state_file)

    def _lock(self) -> bool:
        """Open the lines and lock them; false if they are not the same any more."""
        self._descriptor = os.open(
            self.lines, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666
        )
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as err:
            self.close()
            if isinstance(err, BlockingIOError):
                raise OutputBusyError(
                    f"Another run writes to {self.path} at this moment. Wait for it, "
                    "or end it first."
                ) from None
            if err.errno not in _NO_LOCKS:
                raise
            self.locked = False
            self._descriptor = os.open(self.lines, os.O_RDWR | os.O_APPEND)
        # a run that has just finished may have removed what was opened here
        if self.lines.exists() and os.path.samestat(
            os.fstat(self._descriptor), self.lines.stat()
        ):
            return True
        self.close()
        return False

    def _read(self) -> None:
        """Count the results so far, and cut off a torn last line."""
        whole = 0
        with self.lines.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    result = json.loads(line)
                    self.tally.add(result)
                    self.done.add(result["custom_id"])
                except (ValueError, KeyError, TypeError, AttributeError):
                    raise OutputError(
                        f"Line {number} of {self.lines} is no result, so the file was "
                        "changed by hand. Take that line out, or move the file away."
                    ) from None
                whole += len(line)
        os.ftruncate(self._descriptor, whole)


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def _in_order(lines: BinaryIO, ids: Iterable[str]) -> Iterator[bytes]:
    """Lines of results by the order of their ids, joined by commas.

    Only their places are kept in memory.
    """
    places: dict[str, int] = {}
    place = 0
    for line in lines:
        places[json.loads(line)["custom_id"]] = place
        place += len(line)
    comma = b""
    for custom_id in ids:
        if custom_id not in places:
            raise OutputError(
                f"{custom_id!r} has no result: the input has changed while it was "
                "read. The results so far are kept; run it on the input as it was."
            )
        lines.seek(places[custom_id])
        yield comma + lines.readline().rstrip(b"\n")
        comma = b",\n"
