"""``vec-inf-multinode diagnose``: why a job is as it is."""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Optional

import click
from rich.text import Text

from ..diagnose import (
    FAILED,
    READY,
    Diagnosis,
    Line,
    of_directory,
    of_job,
)
from ..errors import JobDirectoryError
from ..jobdir import readable
from ..launcher import default_log_dir
from . import common
from .main import cli

_COLOURS = {READY: "bold green", FAILED: "bold red"}
_WITNESS = {
    "sacct": "sacct",
    "scontrol": "scontrol show step",
    "ranks": "the ranks that have shown up",
}


@cli.command(
    params=[common.json_option()],
    epilog="Exit status: 0 when the job is well or was stopped on request, 4 when it "
    "has failed.",
)
@click.argument("job", metavar="JOB_ID|DIRECTORY")
@click.option(
    "--log-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Path to slurm log directory, for a job that Slurm has forgotten",
)
def diagnose(job: str, log_dir: Optional[Path], json_mode: bool) -> int:
    """Say what became of a job: when, where, why, and what to do.

    Works while the job runs and long after it, and on a copy of its directory.

    \b
    Examples:
      vec-inf-multinode diagnose 4711
      vec-inf-multinode diagnose ~/.vec-inf-logs/Llama-3.1/Llama-3.1-405B.4711
    """
    try:
        if job.isdecimal() and not readable(Path(job)):
            found = of_job(job, log_dir.expanduser() if log_dir else default_log_dir())
        else:
            found = of_directory(Path(job).expanduser())
    except JobDirectoryError as err:
        raise common.CommandError(str(err), common.BAD_INPUT) from None
    if json_mode:
        common.print_json(found.as_dict())
    else:
        show(found)
    return common.FAILED if found.state == FAILED else common.DONE


def show(found: Diagnosis) -> None:
    """Print a diagnosis for a person; a log's own text is never markup."""
    _say(found.verdict, _COLOURS.get(found.state, "bold"), f"{found.state.upper()}  ")
    _say(f"job {found.job_id}, {found.model_name}, {found.directory}")
    _section("What to do", found.advice)
    _section("Warnings", found.warnings)
    if found.timeline:
        _heading("Timeline")
        for moment in found.timeline:
            local = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment.time))
            attempt = f"{moment.attempt or '':11}" if len(found.attempts) > 1 else ""
            _say(f"  {local}  {moment.seconds:>6} s  {attempt}{moment.text}")
    _section("Topology", _topology(found))
    if found.ranks:
        _heading("Ranks")
        for rank in found.ranks:
            on = f" on {rank.node}" if rank.node else ""
            _say(f"  rank {rank.rank}{on}: {rank.end}")
            _lines(rank.lines)
    _section("Transport", _transports(found))
    if found.lines:
        _heading("The job")
        _lines(found.lines)


def _topology(found: Diagnosis) -> Iterable[str]:
    words = dict(found.topology)
    interfaces = words.pop("interfaces", {})
    sizes = words.pop("sizes", None)
    if words:
        yield "  ".join(f"{name}={value}" for name, value in words.items())
    if sizes:
        yield f"sizes: {sizes}"
    for name, address in interfaces.items():
        yield f"{name} {address} (first node)"
    if found.step:
        all_of_them = {True: "all nodes", False: "NOT all nodes", None: "of the job"}
        yield (
            f"step: {found.step.nodes} node(s), {all_of_them[found.step.spans_all]}"
            f" ({_WITNESS.get(found.step.source, found.step.source)})"
        )


def _transports(found: Diagnosis) -> Iterable[str]:
    """One line for each choice on each host."""
    count: dict[tuple[str, str], int] = {}
    for one in found.transports:
        key = (one.host, one.words)
        count[key] = count.get(key, 0) + 1
    for (host, words), number in count.items():
        yield f"{host}: {words} ({number} process{'es' if number > 1 else ''})"


def _section(title: str, lines: Iterable[str]) -> None:
    lines = list(lines)
    if lines:
        _heading(title)
        for line in lines:
            _say(f"  {line}")


def _heading(title: str) -> None:
    common.out.print(Text(f"\n{title}", style="bold"))


def _lines(lines: Iterable[Line]) -> None:
    for line in lines:
        _say(f"    | {line.text}", "dim")
        if line.verdict:
            _say(f"      {line.verdict}")


def _say(text: str, style: str = "", word: str = "") -> None:
    # not wrapped: a line of a log is to be found again with grep
    line = Text.assemble((word, style), (common.clean_text(text), style))
    common.out.print(line, soft_wrap=True)
