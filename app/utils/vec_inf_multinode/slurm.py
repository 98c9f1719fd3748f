"""What Slurm says of a job. A command that is missing or fails is "unknown"."""

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field

TIME_LIMIT = 15

# KEY=VALUE, where a value may hold spaces: a path, a reason
_FIELD = re.compile(r"(?:^|\s)([A-Z][A-Za-z:/]*)=(.*?)(?=\s[A-Z][A-Za-z:/]*=|\s*$)")


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


def show_job(job_id: str) -> dict[str, str]:
    """Fields of ``scontrol show job``, empty when Slurm does not know the job."""
    lines = run(["scontrol", "show", "job", job_id, "--oneliner"]).splitlines()
    return _fields(lines[0]) if lines else {}


def _show_step(step_id: str) -> dict[str, str]:
    """Fields of a step, which scontrol knows as long as it runs."""
    lines = run(["scontrol", "show", "step", step_id, "--oneliner"]).splitlines()
    fields = _fields(lines[0]) if lines else {}
    return fields if fields.get("StepId") == step_id else {}


def _account_step(step_id: str) -> dict[str, str]:
    """The same from the accounts, where Slurm keeps some."""
    job_id = step_id.partition(".")[0]
    form = "--format=JobID,NNodes,NTasks,NodeList"
    for line in run(["sacct", "-n", "-P", "-j", job_id, form]).splitlines():
        name, nodes, tasks, node_list = (line.split("|") + ["", "", ""])[:4]
        if name == step_id:
            return {"Nodes": nodes, "Tasks": tasks, "NodeList": node_list}
    return {}


def run(argv: list[str]) -> str:
    """Output of a command, empty when it is missing, slow or fails."""
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIME_LIMIT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace") if done.returncode == 0 else ""


def _fields(text: str) -> dict[str, str]:
    return dict(_FIELD.findall(text))
