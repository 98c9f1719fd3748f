"""``serve``: a model for as long as this command runs."""

import math
import time
from datetime import timedelta
from typing import Any, Optional

import click

from .. import slurm, watch
from ..errors import SlurmJobError
from ..jobdir import JobDirectory
from ..launcher import MultinodeClient
from . import connect, load, signals
from .common import (
    INTERRUPTED,
    CommandError,
    LaunchOptions,
    launch_options,
    print_json,
    say,
)
from .launch import cancel, failed, goes_on, job_directory, show_job, wait_shown
from .main import cli
from .stages import LiveLine

POLL = 5
# Where there is no terminal: seconds between two lines that say how busy it is.
PLAIN_EVERY = 60
# Seconds for Slurm to end a job, and between two requests for it.
STOP_LIMIT = 180
STOP_AGAIN = 30


@cli.command(
    "serve",
    params=[
        *launch_options(),
        click.Option(
            ["--keep"], is_flag=True, help="Leave the job when this command ends"
        ),
    ],
)
def serve(model_name: str, json_mode: bool, keep: bool, **given: Any) -> None:
    """Launch a model, wait, show how to reach it, and stay; Ctrl-C stops the job.

    A lost connection stops it too. With --json-mode one document is printed when the
    model is ready, and one when it has ended.

    \b
    Example:
      vec-inf-multinode serve tiny-llama --num-nodes 2 --time 02:00:00
    """
    client = MultinodeClient()
    with signals.interruptible(), signals.held() as release:
        response = client.launch_model(model_name, LaunchOptions(**given))
        job_id = response.slurm_job_id
        try:
            # what came meanwhile is raised here, with the job known
            release()
            attend(client, response, json_mode)
        except KeyboardInterrupt:
            if keep:
                raise goes_on(job_id) from None
            stop(client, job_id)
            raise CommandError(
                f"Interrupted; job {job_id} is stopped.",
                INTERRUPTED,
                slurm_job_id=job_id,
            ) from None
        except BaseException:
            # vec-inf may call a job FAILED that Slurm lets run to its walltime
            if not keep and not slurm.is_over(job_id):
                stop(client, job_id)
            raise


def attend(client: MultinodeClient, response: Any, json_mode: bool) -> None:
    """Wait, say how to reach the model, and show how busy it is until the job ends.

    Raises
    ------
    CommandError
        When the job has ended.
    """
    directory = job_directory(response)
    job_id = response.slurm_job_id
    if not json_mode:
        show_job(response, directory)
    status, _ = wait_shown(client, job_id, directory)
    endpoint = connect.endpoint_of(status, job_id)
    if json_mode:
        print_json(connect.as_json(endpoint, show_secrets=False))
    else:
        click.echo("\n" + connect.text(endpoint) + "\n")
    watch_load(client, job_id, directory)


def watch_load(client: MultinodeClient, job_id: str, directory: JobDirectory) -> None:
    """Show how busy a server is until its job ends; then say why."""
    before: Optional[load.Load] = None
    progress: Optional[watch.Progress] = None
    said_at = -float(PLAIN_EVERY)
    with LiveLine() as live:
        try:
            for status, progress in client.follow(job_id, POLL, math.inf):
                now = None
                if progress.stage == watch.READY:
                    now = load.fetch(status.base_url)
                text = line(progress, before, now, slurm.parse_job(status.raw_output))
                before = now
                live.update(text)
                if not live.console.is_terminal and (
                    time.monotonic() - said_at >= PLAIN_EVERY
                ):
                    said_at = time.monotonic()
                    live.line(text)
        except SlurmJobError as err:
            raise failed(job_id, directory, None, str(err)) from None
    raise failed(job_id, directory, progress)


def line(
    progress: watch.Progress,
    before: Optional[load.Load],
    now: Optional[load.Load],
    fields: dict[str, str],
) -> str:
    """How busy a server is, and how long it may go on."""
    parts = [progress.stage]
    if progress.stage == watch.READY:
        parts = [load.describe(before, now)]
    elif progress.detail:
        parts = [f"{progress.stage}: {progress.detail}"]
    left = slurm.seconds_left(fields, time.time())
    if left is not None:
        parts.append(f"{timedelta(seconds=int(left))} left")
    return ", ".join(parts)


def stop(client: MultinodeClient, job_id: str) -> None:
    """Stop a job, and return when Slurm says that it has ended on every node.

    Raises
    ------
    CommandError
        If it cannot be stopped, or not in time.
    """
    started = asked = time.monotonic()
    problem = cancel(client, job_id)
    signals.allow_another()
    say(f"Stopping job {job_id}; Ctrl-C to leave before it has ended.")
    while not slurm.is_over(job_id):
        if time.monotonic() - started > STOP_LIMIT:
            raise CommandError(
                f"Job {job_id} may still run: Slurm has not ended it within "
                f"{STOP_LIMIT}s{problem and f' ({problem})'}. To stop it: scancel "
                f"{job_id}",
                slurm_job_id=job_id,
            )
        if problem or time.monotonic() - asked > STOP_AGAIN:
            asked = time.monotonic()
            problem = cancel(client, job_id)
        time.sleep(1)
