"""A job's directory, read: the one place that knows the files in it.

Nothing is written and nothing is asked of Slurm: it works long after the job is gone,
and on a copy of the directory.
"""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

_RANK_LOG = re.compile(r"rank-(?P<rank>\d{1,6})\.(?P<node>.+)\.err")
_ATTEMPT = re.compile(r"attempt-(\d+)")
# What a rank says at its end, and what srun says of it; srun puts "K: " in front
_END = re.compile(
    r"LLMHUB-END rank=(?P<rank>\d{1,6}) node=(?P<node>\S+) status=(?P<status>\d{1,3}) "
    r"seconds=(?P<seconds>\d+) at=(?P<at>[\d.]+) stopping=(?P<stopping>[01])"
)
_REFUSED = re.compile(
    r"LLMHUB-REFUSED rank=(?P<rank>\d{1,6}) node=(?P<node>\S+): (?P<words>.+)"
)
_TASK = re.compile(
    r"^srun: error: (?P<node>\S+): task (?P<rank>\d{1,6}): (?P<words>.+)"
)
# Of a log that may be huge, this much is read at either end.
EDGE = 1024 * 1024
_ESCAPE = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])"
)


@dataclass(frozen=True)
class RankLog:
    """Where all that one rank printed is.

    Parameters
    ----------
    rank : int
        The rank.
    node : str
        Node that it ran on.
    out, err : Path
        Its stdout and stderr; `out` may not exist.
    """

    rank: int
    node: str
    out: Path
    err: Path


@dataclass(frozen=True)
class Event:
    """One line of an attempt's ``timeline``.

    Parameters
    ----------
    time : int
        Seconds since the epoch, by the clock of the first node.
    text : str
        ``started on NODES``, ``rank K up on NODE``, ``ready``, ``restart REASON`` or
        ``stopped``.
    """

    time: int
    text: str


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended, by its own report or by srun's.

    Parameters
    ----------
    rank : int
        The rank.
    node : str
        Its node.
    words : str
        How, in words.
    status : int, optional
        Exit status of its container, where the rank has reported it.
    stopping : bool
        It had been told to stop.
    """

    rank: int
    node: str
    words: str
    status: Optional[int] = None
    stopping: bool = False

    @property
    def failed(self) -> bool:
        """Whether it ended without having been told to."""
        return not self.stopping


@dataclass(frozen=True)
class JobDirectory:
    """The directory ``LOG_DIR/FAMILY/MODEL.JOB`` of one job.

    Parameters
    ----------
    path : Path
        The directory.
    """

    path: Path

    @property
    def model_name(self) -> str:
        """Name of the model."""
        return self.path.name.rpartition(".")[0]

    @property
    def job_id(self) -> str:
        """Slurm's id of the job."""
        return self.path.name.rpartition(".")[2]

    def file(self, kind: str) -> Path:
        """One of the job's own files: ``out``, ``err``, ``json`` or ``sbatch``."""
        return self.path / f"{self.path.name}.{kind}"

    def text(self, kind: str) -> str:
        """Text of one of those files, empty if it cannot be read."""
        return read(self.file(kind))

    def facts(self) -> dict[str, Any]:
        """vec-inf's JSON of the job: its params and, once known, its address."""
        return _json_object(self.file("json"))

    def failure(self) -> Optional[dict[str, Any]]:
        """The job's own record of its failure, None if it has none."""
        return _json_object(self.path / "failure.json") or None

    @property
    def ours(self) -> bool:
        """Whether this package made the job; vec-inf's own have the same names."""
        return bool(self.attempts()) or "\nllmhub_serve\n" in self.text("sbatch")

    def said(self, word: str) -> list[str]:
        """What the job said with a prefix, ``STAGE-A`` for instance, in order."""
        prefix = f"LLMHUB-{word}: "
        return [
            line.removeprefix(prefix)
            for line in self.text("out").splitlines()
            if line.startswith(prefix)
        ]

    def attempts(self) -> list[Path]:
        """Directories of the attempts, the last one last."""
        found = [p for p in self.path.glob("attempt-*") if _ATTEMPT.fullmatch(p.name)]
        return sorted(found, key=lambda p: int(p.name.rpartition("-")[2]))

    def timeline(self, attempt: Path) -> list[Event]:
        """What happened in an attempt, in order."""
        events = []
        for line in read(attempt / "timeline").splitlines():
            time, _, text = line.partition(" ")
            # seconds of this century: what is longer is no time
            if re.fullmatch(r"[0-9]{1,10}", time):
                events.append(Event(int(time), text))
        return events

    def step_log(self, attempt: Path) -> str:
        """What ``srun`` and the ranks' own reports said in an attempt."""
        return read(attempt / "step.log")

    def ends(self, attempt: Path) -> list[RankEnd]:
        """How the ranks of an attempt ended, each by its most telling report."""
        found: dict[int, RankEnd] = {}
        reports: tuple[list[RankEnd], ...] = ([], [], [])
        for line in self.step_log(attempt).splitlines():
            for kind, read_end in enumerate((_refused, _ended, _task)):
                end = read_end(line)
                if end is not None:
                    reports[kind].append(end)
        for kind in reports:
            for end in kind:
                found.setdefault(end.rank, end)
        return [found[rank] for rank in sorted(found)]

    def ranks(self) -> list[RankLog]:
        """Logs of the last attempt's ranks, by rank."""
        return sorted(self._ranks(), key=lambda log: (log.rank, log.node))

    def _ranks(self) -> Iterator[RankLog]:
        for err in self.path.glob("ranks/rank-*.err"):
            found = _RANK_LOG.fullmatch(err.name)
            if found:
                out = err.with_suffix(".out")
                yield RankLog(int(found["rank"]), found["node"], out, err)

    def nccl_logs(self) -> list[Path]:
        """NCCL's own logs, one per process."""
        return sorted(self.path.glob("nccl-debug/*"))


def find(root: Path, job_id: str) -> Optional[JobDirectory]:
    """Find the directory of a job below a log directory, None if there is none.

    Parameters
    ----------
    root : Path
        vec-inf's ``log_dir``.
    job_id : str
        Slurm's id.
    """
    named = root.glob(f"*/*.{int(job_id)}") if readable(root) else ()
    found = [path for path in named if readable(path)]
    # Slurm counts from the start again some day
    return JobDirectory(max(found, key=lambda p: p.stat().st_mtime)) if found else None


def readable(path: Path) -> bool:
    """Whether a directory is there and this user may look into it."""
    access = os.R_OK | os.X_OK
    # unlike Path's, os.path's isdir says no where a parent is closed
    return os.path.isdir(path) and os.access(path, access, effective_ids=True)


def _refused(line: str) -> Optional[RankEnd]:
    found = _REFUSED.search(line)
    if not found:
        return None
    words = f"refused: {found['words']}"
    return RankEnd(int(found["rank"]), found["node"], words, 1)


def _ended(line: str) -> Optional[RankEnd]:
    found = _END.search(line)
    if not found:
        return None
    status, stopping = int(found["status"]), found["stopping"] == "1"
    words = f"exited with status {status} after {found['seconds']}s"
    if stopping:
        words += ", told to stop"
    return RankEnd(int(found["rank"]), found["node"], words, status, stopping)


def _task(line: str) -> Optional[RankEnd]:
    found = _TASK.search(line)
    if not found:
        return None
    return RankEnd(int(found["rank"]), found["node"], found["words"])


def read(path: Path) -> str:
    """Text of a log, empty if it cannot be read; of a huge one, its two ends."""
    try:
        # a pipe or a device would block
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read(EDGE)
            if size > EDGE:
                file.seek(max(EDGE, size - EDGE))
                data += (b"\n" if size > 2 * EDGE else b"") + file.read(EDGE)
    except (OSError, ValueError):
        return ""
    return data.decode("utf-8", errors="replace")


def _json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(read(path))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def clean_line(text: str) -> str:
    """One line that a terminal can be given: no escape sequence, no control."""
    text = re.sub(r"\s", " ", _ESCAPE.sub("", text))
    return "".join(char for char in text if char.isprintable())
