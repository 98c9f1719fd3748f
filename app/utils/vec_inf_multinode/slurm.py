"""Slurm, asked: no shell, a time limit, and nothing where it does not answer."""

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class SlurmFacts:
    """What Slurm knows of a job; whatever it does not know is empty.

    Parameters
    ----------
    job : mapping
        Fields of ``scontrol show job``.
    step : mapping
        ``Nodes``, ``Tasks`` and ``NodeList`` of its step.
    step_source : str
        The command that told of the step.
    """

    job: Mapping[str, str] = field(default_factory=dict)
    step: Mapping[str, str] = field(default_factory=dict)
    step_source: str = ""


def facts(job_id: str, step: int = 0) -> SlurmFacts:
    """Ask Slurm for a job and one of its steps."""
    job = show_job(job_id)
    for source, ask in (("sacct", _account_step), ("scontrol", _show_step)):
        found = ask(f"{job_id}.{step}")
        if found:
            return SlurmFacts(job, found, source)
    return SlurmFacts(job)


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


def _output(argv: Sequence[str]) -> str:
    """Output of a command, empty when it is missing, slow or fails."""
    done = _run(argv)
    return done.stdout if done and done.returncode == 0 else ""


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
    """Fields of one line of ``scontrol show job`` or ``step``."""
    parts = _FIELD.split(line.strip())
    fields: dict[str, str] = {}
    for name, value in zip(parts[1::2], parts[2::2]):
        # of two, the later one may be text that a user chose
        fields.setdefault(name, value.strip())
    return fields


def _show_step(step_id: str) -> dict[str, str]:
    """Fields of a step, which scontrol knows as long as it runs."""
    lines = _output(["scontrol", "show", "step", step_id, "--oneliner"]).splitlines()
    fields = parse_job(lines[0]) if lines else {}
    return fields if fields.get("StepId") == step_id else {}


def _account_step(step_id: str) -> dict[str, str]:
    """The same from the accounts, where Slurm keeps some."""
    job_id = step_id.partition(".")[0]
    form = "--format=JobID,NNodes,NTasks,NodeList"
    for line in _output(["sacct", "-n", "-P", "-j", job_id, form]).splitlines():
        name, nodes, tasks, node_list = (line.split("|") + ["", "", ""])[:4]
        if name == step_id:
            return {"Nodes": nodes, "Tasks": tasks, "NodeList": node_list}
    return {}


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
