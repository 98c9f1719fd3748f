"""Slurm, asked: no shell, a time limit, and nothing where it does not answer."""

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Optional

LIMIT = 30

# States without nodes, yet or again after a requeue.
WAITING = frozenset(
    {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"}
)
# States that a job does not leave by itself; no process of it is left.
ENDED = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    }
)

# a value may hold spaces: it ends where the next name starts
_FIELD = re.compile(r"(?:^|\s)([A-Za-z][\w/:]*)=")
_NO_SUCH_JOB = "Invalid job id"


def _run(argv: Sequence[str]) -> Optional[subprocess.CompletedProcess]:
    """Run a command; None if it is missing or does not answer in time."""
    try:
        return subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


def _ask_for_job(job_id: str) -> Optional[subprocess.CompletedProcess]:
    return _run(["scontrol", "show", "job", job_id, "--oneliner"])


def is_installed() -> bool:
    """Whether Slurm's commands are here at all."""
    return shutil.which("scontrol") is not None


def show_job(job_id: str) -> dict[str, str]:
    """Fields of ``scontrol show job``, empty if Slurm does not know or say."""
    shown = _ask_for_job(job_id)
    return parse_job(shown.stdout) if shown and shown.returncode == 0 else {}


def parse_job(line: str) -> dict[str, str]:
    """Fields of one line of ``scontrol show job --oneliner``."""
    parts = _FIELD.split(line.strip())
    fields: dict[str, str] = {}
    for name, value in zip(parts[1::2], parts[2::2]):
        # of two, the later one may be text that a user chose
        fields.setdefault(name, value.strip())
    return fields


def is_over(job_id: str) -> Optional[bool]:
    """Whether a job has ended on every node; None if Slurm does not say."""
    shown = _ask_for_job(job_id)
    if shown is None:
        return None
    if shown.returncode != 0:
        return True if no_such_job(shown.stderr) else None
    return parse_job(shown.stdout).get("JobState") in ENDED


def no_such_job(words: str) -> bool:
    """Whether a command's words say that Slurm does not know the job."""
    return _NO_SUCH_JOB in words


def moment(text: Optional[str]) -> Optional[float]:
    """Seconds since the epoch of one of Slurm's times, None for ``Unknown``."""
    try:
        return datetime.fromisoformat(text or "").timestamp()
    except (ValueError, OverflowError):
        return None


def seconds_left(fields: Mapping[str, str], now: float) -> Optional[float]:
    """Seconds to the end of the walltime; None without one, or if it is not known."""
    if fields.get("TimeLimit") == "UNLIMITED":
        return None
    end = moment(fields.get("EndTime"))
    return None if end is None else max(0.0, end - now)
