"""What a job is doing: its stage, told from Slurm's fields and the job's own files.

Works for vec-inf's own jobs too, which leave fewer marks.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import slurm
from .jobdir import Event, JobDirectory, clean_line

QUEUED = "queued"
STARTING = "starting"
LOADING = "loading"
READY = "ready"
FAILED = "failed"
STOPPED = "stopped"
OVER = (FAILED, STOPPED)
_IN_ORDER = (QUEUED, STARTING, LOADING, READY)

# What ends a job without a failure of its own.
_STOPPED_BY = {
    "CANCELLED": "the job was cancelled",
    "TIMEOUT": "the walltime is over",
    "DEADLINE": "the job's deadline has passed",
    "PREEMPTED": "the job was preempted",
    "REVOKED": "the job was revoked",
    "COMPLETED": "the job ended by itself",
}

_TAIL_BYTES = 4096
# Seconds between Slurm's start of a job and the first mark of its attempt.
_SAME_START = 60


@dataclass(frozen=True)
class Progress:
    """What a job is doing now.

    Parameters
    ----------
    stage : str
        ``queued``, ``starting``, ``loading``, ``ready``, ``failed`` or ``stopped``.
    detail : str
        Slurm's reason, the ranks that are up, the last line of rank 0's log, the
        address, or the cause; one line without control characters.
    stage_seconds : float
        Seconds in this stage.
    seconds : float
        Seconds from the submission until now, or until the end.
    passed : tuple of (str, float)
        The stages before this one, each with its seconds.
    """

    stage: str
    detail: str
    stage_seconds: float
    seconds: float
    passed: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class _Attempt:
    """The last attempt of a job; of one that is vec-inf's own, nothing."""

    ranks: int = 0
    events: tuple[Event, ...] = ()

    @property
    def up(self) -> list[int]:
        """When each rank was up."""
        return [e.time for e in self.events if e.text.startswith("rank ")]

    @property
    def ready(self) -> list[int]:
        """When the server was ready."""
        return [e.time for e in self.events if e.text == "ready"]


def progress(
    status: Any,
    job_dir: JobDirectory,
    fields: Mapping[str, str],
    now: float,
    ready_signature: str,
) -> Progress:
    """Tell what a job is doing.

    Parameters
    ----------
    status : StatusResponse
        vec-inf's status of the job.
    job_dir : JobDirectory
        Its directory.
    fields : mapping
        Slurm's fields of the job.
    now : float
        Seconds since the epoch.
    ready_signature : str
        The line of ``.err`` that vec-inf takes for ready.
    """
    attempt = _attempt(job_dir)
    stage, detail = _stage(status, job_dir, fields, attempt, ready_signature)
    begun = _begun(fields, attempt, now)
    end = _end(job_dir, fields, now) if stage in OVER else now
    reached = [name for name, _ in begun]
    if stage in _IN_ORDER:
        reached = [n for n in reached if _IN_ORDER.index(n) < _IN_ORDER.index(stage)]
    ends = [at for _, at in begun[1:]] + [end]
    since = end if stage in OVER else dict(begun).get(stage, now)
    submitted = slurm.moment(fields.get("SubmitTime"))
    return Progress(
        stage=stage,
        detail=clean_line(detail).strip(),
        stage_seconds=max(0.0, now - since),
        seconds=max(0.0, end - (submitted or begun[0][1])),
        passed=tuple(
            # clocks differ
            (name, max(0.0, until - at))
            for (name, at), until in zip(begun, ends)
            if name in reached
        ),
    )


def _attempt(job_dir: JobDirectory) -> _Attempt:
    attempts = job_dir.attempts()
    if not attempts and "llmhub_serve" not in job_dir.text("sbatch"):
        return _Attempt()
    events = job_dir.timeline(attempts[-1]) if attempts else []
    try:
        ranks = int(job_dir.facts().get("num_nodes", 0))
    except ValueError:
        ranks = 0
    return _Attempt(ranks, tuple(events))


def _stage(
    status: Any,
    job_dir: JobDirectory,
    fields: Mapping[str, str],
    attempt: _Attempt,
    ready_signature: str,
) -> tuple[str, str]:
    state = fields.get("JobState", "")
    if state in slurm.WAITING:
        preparing = state == "CONFIGURING"
        reason = "Slurm is preparing the nodes" if preparing else fields.get("Reason")
        return QUEUED, reason if reason and reason != "None" else ""
    silent = _is_silent(status, job_dir, state, ready_signature)
    if status.server_status == "FAILED" and not silent:
        cause = str(status.failed_reason or "no reason given")
        return FAILED, cause.removeprefix("LLMHUB-ERROR: ")
    if state in _STOPPED_BY:
        return STOPPED, _STOPPED_BY[state]
    if state in slurm.ENDED:
        return FAILED, _ended_because(state, job_dir, fields)
    if status.server_status == "READY":
        return READY, str(status.base_url)
    starting = len(attempt.up) < attempt.ranks
    if state == "COMPLETING":
        return STARTING if starting else LOADING, "Slurm is ending the job"
    if starting:
        return STARTING, f"{len(attempt.up)} of {attempt.ranks} ranks up"
    if silent:
        return LOADING, f"the server does not answer: {status.failed_reason}"
    return LOADING, _last_words(job_dir)


def _is_silent(
    status: Any, job_dir: JobDirectory, state: str, ready_signature: str
) -> bool:
    """Whether vec-inf calls a job FAILED for one health check that was not answered.

    It may be busy, or its step may be started again; the job goes on.
    """
    return (
        status.server_status == "FAILED"
        and state == "RUNNING"
        and job_dir.failure() is None
        and ready_signature in job_dir.text("err")
    )


def _ended_because(state: str, job_dir: JobDirectory, fields: Mapping[str, str]) -> str:
    cause = f"Slurm says {state}, exit code {fields.get('ExitCode', 'unknown')}"
    said = last_line(job_dir.file("err"))
    return f"{cause}; the last line of its .err: {said}" if said else cause


def _begun(
    fields: Mapping[str, str], attempt: _Attempt, now: float
) -> list[tuple[str, float]]:
    """Each stage that the job has reached, with the time."""
    begun = [(QUEUED, slurm.moment(fields.get("SubmitTime")) or now)]
    started = slurm.moment(fields.get("StartTime"))
    # of a job that waits, it is Slurm's guess
    if started is None or fields.get("JobState", "") in slurm.WAITING:
        return begun
    if not attempt.ranks:
        return [*begun, (LOADING, started)]
    if attempt.events and attempt.events[0].time - started > _SAME_START:
        # the step was started again in the same allocation
        begun, started = [], float(attempt.events[0].time)
    begun.append((STARTING, started))
    if len(attempt.up) >= attempt.ranks:
        begun.append((LOADING, float(attempt.up[-1])))
        begun += [(READY, float(at)) for at in attempt.ready[-1:]]
    return begun


def _end(job_dir: JobDirectory, fields: Mapping[str, str], now: float) -> float:
    """When a job was over, as far as it is known."""
    noted = (job_dir.failure() or {}).get("time")
    if isinstance(noted, int):
        return min(float(noted), now)
    ended = fields.get("JobState") in slurm.ENDED
    return min(slurm.moment(fields.get("EndTime")) or now, now) if ended else now


def _last_words(job_dir: JobDirectory) -> str:
    """The last line of rank 0's log, of whichever of its streams spoke last."""
    logs = [path for rank in job_dir.ranks()[:1] for path in (rank.out, rank.err)]
    # on one node the engine writes to the job's own files
    logs = logs or [job_dir.file("out"), job_dir.file("err")]
    written = sorted(logs, key=_written_at, reverse=True)
    return next((line for path in written if (line := last_line(path))), "")


def _written_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def last_line(path: Path) -> str:
    """The last line of a log that holds a word, empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    # a progress bar goes back to the start of its line
    lines = (clean_line(line).strip() for line in reversed(re.split(r"[\r\n]+", text)))
    return next((line for line in lines if line), "")
