"""``launch``: submit a job and, if asked to, wait until it serves."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any, Optional

import click
from rich.text import Text

from .. import slurm, watch
from ..errors import SlurmJobError
from ..jobdir import JobDirectory
from ..launcher import MultinodeClient
from ..preview import masked
from . import signals
from .common import (
    INTERRUPTED,
    CommandError,
    LaunchOptions,
    ServerError,
    clean_text,
    launch_options,
    out,
    print_json,
    say,
)
from .main import PROGRAM, cli
from .stages import LiveLine, Stages

# Seconds between two looks at a job; the times shown are the job's own marks.
POLL = 2


@cli.command(
    "launch",
    params=[
        *launch_options(),
        click.Option(["--wait"], is_flag=True, help="Wait until the model is ready"),
    ],
)
def launch(model_name: str, json_mode: bool, wait: bool, **given: Any) -> None:
    """Launch a model on the cluster; --wait shows its stages until it is ready.

    \b
    Example:
      vec-inf-multinode launch tiny-llama --num-nodes 2 --time 01:00:00 --wait
    """
    client = MultinodeClient()
    response = submit(client, model_name, LaunchOptions(**given))
    directory = job_directory(response)
    document = masked(response.config)
    if not json_mode:
        show_job(response, directory)
    if wait:
        try:
            status, progress = wait_shown(client, response.slurm_job_id, directory)
        except KeyboardInterrupt:
            raise goes_on(response.slurm_job_id) from None
        document["status"] = {"base_url": status.base_url, **asdict(progress)}
        if not json_mode:
            say(f"To reach it: {PROGRAM} connect {response.slurm_job_id}")
    if json_mode:
        print_json(document)


def submit(client: MultinodeClient, model_name: str, options: Any) -> Any:
    """Launch a model; interrupted meanwhile, leave nothing in the queue."""
    with signals.interruptible(), signals.held() as release:
        response = client.launch_model(model_name, options)
        try:
            release()
        except KeyboardInterrupt:
            job_id = response.slurm_job_id
            problem = cancel(client, job_id)
            outcome = "was cancelled."
            if problem:
                outcome = f"was not cancelled: {problem}. To stop it: scancel {job_id}"
            raise CommandError(
                f"Interrupted; job {job_id} {outcome}",
                INTERRUPTED,
                slurm_job_id=job_id,
            ) from None
    return response


def cancel(client: MultinodeClient, job_id: str) -> str:
    """Ask Slurm to end a job; what it says if it does not."""
    with signals.held():
        try:
            client.shutdown_model(job_id)
        except SlurmJobError as err:
            return str(err).strip()
    return ""


def job_directory(response: Any) -> JobDirectory:
    """Directory of a job that was launched."""
    name = f"{response.model_name}.{response.slurm_job_id}"
    return JobDirectory(Path(response.config["log_dir"], name))


def show_job(response: Any, directory: JobDirectory) -> None:
    """Print the job's id and directory."""
    for name, value in (("Job", response.slurm_job_id), ("Directory", directory.path)):
        out.print(Text(clean_text(f"{name:<12}{value}")), soft_wrap=True)


def wait_shown(
    client: MultinodeClient, job_id: str, directory: JobDirectory
) -> tuple[Any, watch.Progress]:
    """Wait until a job is ready and show its stages on stderr.

    Raises
    ------
    CommandError
        If it fails or ends, with the cause.
    """
    last: Optional[watch.Progress] = None
    with LiveLine() as live:
        stages = Stages(live)

        def look(progress: watch.Progress) -> None:
            nonlocal last
            last = progress
            stages(progress)

        try:
            status = client.wait_until_ready(job_id, math.inf, POLL, on_progress=look)
        except (ServerError, SlurmJobError) as err:
            raise failed(job_id, directory, last, str(err)) from None
    assert last
    return status, last


def failed(
    job_id: str,
    directory: JobDirectory,
    progress: Optional[watch.Progress],
    fallback: str = "",
) -> CommandError:
    """Say how a job ended: rank, node, cause, and where to look."""
    record = directory.failure() or {}
    over = progress is not None and progress.stage in watch.OVER
    stage = progress.stage if over and progress else "lost"
    cause = progress.detail if over and progress else fallback
    place = [
        f"{name}  {record[key]}"
        for name, key in (("rank", "rank"), ("node", "node"), ("log ", "log"))
        if record.get(key) is not None
    ]
    lines = [f"Job {job_id} {stage}: {cause}", *place]
    if stage != watch.STOPPED:
        lines.append(f"More: {PROGRAM} diagnose {job_id}")
    if slurm.is_over(job_id) is False:
        lines.append(f"Slurm has it still; should it not end: scancel {job_id}")
    return CommandError(
        "\n".join(lines),
        slurm_job_id=job_id,
        stage=stage,
        cause=clean_text(cause),
        rank=record.get("rank"),
        node=record.get("node"),
        directory=str(directory.path),
    )


def goes_on(job_id: str) -> CommandError:
    """Say that a job is not stopped by the end of this command."""
    return CommandError(
        f"Interrupted; job {job_id} goes on. To stop it: scancel {job_id}",
        INTERRUPTED,
        slurm_job_id=job_id,
    )
