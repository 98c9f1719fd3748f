"""``run``: a batch of prompts end to end."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Optional

import click
import requests

from ..launcher import MultinodeClient
from ..prompts import BadLine, Survey, read_requests, survey
from ..results import Output, OutputBusyError, OutputError, WriteError
from ..sending import Sender, Server
from . import common
from .main import cli
from .progress import RunProgress
from .run_job import (
    Job,
    JobLost,
    api_keys,
    directory_of,
    stopped_at_the_end,
)
from .signals import interruptible


class Run:
    """One run: the input, its output and the job.

    Parameters
    ----------
    model : str
        Name of the model.
    source : Path
        The input.
    destination : Path
        The output.
    """

    def __init__(self, model: str, source: Path, destination: Path):
        self.started = time.monotonic()
        self.model, self.source = model, source
        found = self._survey()
        self.total = found.count
        self.output = Output(destination, found.sha256, model)
        self.job = Job(MultinodeClient(), model, self.output, common.say)
        self.again = "the same command goes on from there"

    def _survey(self) -> Survey:
        """Look at the whole input before anything is launched."""
        if not self.source.is_file():
            raise common.CommandError(
                f"{self.source} is not a file; it is read more than once.",
                common.BAD_INPUT,
            )
        with self.source.open("rb") as lines:
            found = survey(lines, self.model)
        if found.bad:
            shown = [
                f"{found.bad} bad line(s); nothing was launched.",
                *found.first_bad,
            ]
            if found.bad > len(found.first_bad):
                shown.append(f"and {found.bad - len(found.first_bad)} more")
            text = f"{self.source}: " + "\n  ".join(shown)
            raise common.CommandError(text, common.BAD_INPUT, bad_lines=found.bad)
        if not found.count:
            text = f"{self.source} holds no request."
            raise common.CommandError(text, common.BAD_INPUT)
        return found

    def serve(
        self, job_id: Optional[int], launch: dict[str, Any], **patience: Any
    ) -> Server:
        """Get the job to serve.

        Parameters
        ----------
        job_id : int, optional
            A job that runs already.
        launch : dict
            Options for one to be launched otherwise.
        **patience
            For the `Server`.
        """
        if job_id:
            self.again = "with another job the same command goes on from there"
            self.job.use(str(job_id))
        elif not self.job.take_back():
            self.job.launch(launch)
        status = self.job.wait()
        for key in api_keys(directory_of(status)):
            server = Server(lambda: self.job.root, key, **patience)
            if self._is_let_in(server):
                common.say(f"Job {self.job.id} serves at {status.base_url}")
                return server
        raise common.CommandError(
            f"Job {self.job.id} refuses the API key. It is VLLM_API_KEY of the job's "
            "own env; without one there, VLLM_API_KEY or OPENAI_API_KEY of this shell.",
            common.BAD_INPUT,
        )

    def _is_let_in(self, server: Server) -> bool:
        """Whether the key is good: one request instead of an error for each.

        Raises
        ------
        CommandError
            If it serves another model.
        """
        try:
            answer = server.models()
            served = [one["id"] for one in answer.json()["data"]] if answer.ok else []
        except (requests.RequestException, ValueError, KeyError, TypeError):
            return True  # the requests themselves will tell
        if served and self.model not in served:
            raise common.CommandError(
                f"Job {self.job.id} serves {', '.join(served)}, not {self.model!r}.",
                common.BAD_INPUT,
            )
        return answer.status_code not in (401, 403)

    def send(self, server: Server, concurrency: int) -> None:
        """Send what has no result yet, and write each result as it comes."""
        done = self.output.done
        with self.source.open("rb") as lines:
            requests_left = read_requests(lines, self.model)
            pending = (r for r in requests_left if r.custom_id not in done)
            sender = Sender(server, pending, concurrency, self.job.was_away)
            progress = RunProgress(common.notes, self.total, self.output.tally)
            with progress:
                try:
                    for result in sender:
                        self.output.write(result)
                        progress.update()
                finally:
                    for result in sender.stop():
                        self.output.write(result)

    def finish(self) -> None:
        """Make the results safe."""
        with self.source.open("rb") as lines:
            self.output.finish(r.custom_id for r in read_requests(lines, self.model))

    def summary(self) -> dict[str, Any]:
        """What came of it."""
        return {
            "job_id": self.job.id,
            "output": str(self.output.path),
            "requests": self.total,
            **asdict(self.output.tally),
            "seconds": round(time.monotonic() - self.started, 1),
        }

    @contextmanager
    def told_apart(self) -> Iterator[None]:
        """Make a message and an exit code of what ended the run before its end."""
        try:
            yield
        except KeyboardInterrupt:
            what, code = "Interrupted", common.INTERRUPTED
        except JobLost as lost:
            what, code = f"Job {self.job.id} is lost: {lost}", common.FAILED
        except WriteError as err:
            what, code = f"Cannot write: {err}", common.FAILED
        except BadLine as err:
            text = f"{self.source} was changed while it was read: {err}."
            raise common.CommandError(text, common.BAD_INPUT) from None
        except OutputError as err:
            raise common.CommandError(str(err), common.BAD_INPUT) from None
        except OutputBusyError as err:
            raise common.CommandError(str(err), common.REFUSED) from None
        else:
            return
        done = f"{self.output.tally.done} of {self.total} requests have a result"
        raise common.CommandError(
            f"{what}. {done} in {self.output.lines}; {self.again}.",
            code,
            **self.summary(),
        )


def run(
    model_name: str,
    source: Path,
    destination: Path,
    job_id: Optional[int],
    keep: bool,
    concurrency: int,
    json_mode: bool,
    request_timeout: float,
    retries: int,
    **launch: Any,
) -> None:
    """Send every prompt of a file to a model, and stop its job at the end.

    The input has one JSON object a line: OpenAI's batch form (custom_id, method, url,
    body), or plain {"prompt": ...} or {"messages": [...]} with further keys as in a
    request. The output has one result a line in OpenAI's batch form, as they come; if
    its name ends in .json, it is one array in the order of the input.

    Interrupted or killed, the same command goes on where it was, with the same job if
    that is still there.

    Exit status 0: every request has a result, which may be an error, and there is
    nothing left to do. 4: the server was lost; 130: interrupted; the same command goes
    on.

    \b
    Example:
      vec-inf-multinode run tiny-llama --input prompts.jsonl --output results.jsonl
    """
    options = {name: value for name, value in launch.items() if value is not None}
    if job_id and options:
        names = ", ".join("--" + name.replace("_", "-") for name in options)
        raise click.UsageError(f"--job-id uses a running job: leave out {names}.")
    this = Run(model_name, source, destination)
    with interruptible(), this.told_apart(), this.output:
        complete = this.output.is_complete(this.total)
        if not this.output.locked:
            common.say(
                "No locks on this file system: see that no other run writes there."
            )
        with stopped_at_the_end(this.job, keep=keep or bool(job_id)):
            if not complete:
                server = this.serve(
                    job_id, options, timeout=request_timeout, retries=retries
                )
                this.send(server, concurrency)
            else:
                # killed after the last result, before the job was stopped
                this.job.finish_off(keep=keep or bool(job_id))
        if keep and not job_id:
            this.output.record_job(None)
        this.finish()
    _report(this, complete, keep, json_mode)


def _report(this: Run, complete: bool, keep: bool, json_mode: bool) -> None:
    tally = this.output.tally
    if keep and this.job.id:
        common.say(f"Job {this.job.id} is kept; 'scancel {this.job.id}' ends it.")
    before = "Finished before, nothing was launched: " if complete else ""
    done = f"{tally.done} of {this.total} requests have a result"
    common.say(f"{before}{done} in {this.output.path}")
    if tally.failed:
        common.say(
            f"Warning: {tally.failed} of them failed; 'error' in their lines says why."
        )
    if json_mode:
        common.print_json(this.summary())


command = click.Command(
    "run",
    callback=run,
    help=run.__doc__,
    params=[
        *common.launch_options(),
        click.Option(
            ["--input", "source"],
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            required=True,
            help="The prompts, one JSON object a line",
        ),
        click.Option(
            ["--output", "destination"],
            type=click.Path(dir_okay=False, path_type=Path),
            required=True,
            help="Where the results go, one a line; NAME.json: one array at the end",
        ),
        click.Option(
            ["--job-id"],
            type=click.IntRange(min=1),
            help="Use this running job, and do not stop it",
        ),
        click.Option(
            ["--keep"], is_flag=True, help="Do not stop the job, whatever happens"
        ),
        click.Option(
            ["--concurrency"],
            type=click.IntRange(1, 1024),
            default=32,
            show_default=True,
            help="How many requests are under way at once",
        ),
        click.Option(
            ["--request-timeout"],
            type=click.FloatRange(min=1),
            default=1800,
            show_default=True,
            help="Seconds that one answer may take",
        ),
        click.Option(
            ["--retries"],
            type=click.IntRange(min=0),
            default=5,
            show_default=True,
            help="How often a request is sent again after no answer, HTTP 408, 429 or "
            "5xx",
        ),
    ],
)

cli.add_command(command)
