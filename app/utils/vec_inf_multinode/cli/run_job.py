"""The job of a ``run``: given, left by an earlier try, or launched."""

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Optional

from .. import slurm
from ..errors import SlurmJobError, SubmitError
from ..jobdir import JobDirectory
from ..launcher import release
from ..results import Output
from . import common, signals

POLL = 2.0
# How long Slurm may not answer, and a server that was ready may not be healthy, before
# the job is given up.
SLURM_PATIENCE, SERVER_PATIENCE = 300.0, 60.0
# Slurm's words for a job that it has forgotten, and one that has ended already.
GONE = ("Invalid job id", "already completing or completed")

Say = Callable[[str], None]


class JobLost(Exception):
    """The job will not serve any more; the text says why."""


def _is_gone(err: Exception) -> bool:
    return any(words in str(err) for words in GONE)


def look(client: Any, job_id: str) -> Any:
    """Status of a job; a Slurm that does not answer is asked again for a while."""
    deadline = time.monotonic() + SLURM_PATIENCE
    while True:
        try:
            return client.get_status(job_id)
        except SlurmJobError as err:
            if _is_gone(err):
                raise JobLost("Slurm does not know it (any more)") from None
            if time.monotonic() > deadline:
                raise
        time.sleep(POLL)


def directory_of(status: Any) -> JobDirectory:
    """The directory of the job that a status is about."""
    return JobDirectory(Path(status.log_dir))


def root_of(status: Any) -> str:
    """Address of a server that is ready, without ``/v1``."""
    return str(status.base_url).rstrip("/").removesuffix("/v1")


def end_of(status: Any) -> Optional[str]:
    """Why a job is over or ending, None while it is not."""
    state, reason = str(status.job_state), status.failed_reason
    if state in slurm.ENDED:  # COMPLETING may be a requeue
        return str(reason or f"Slurm says {state}")
    if status.server_status == "FAILED" and directory_of(status).failure():
        return str(reason)
    return None


def _is_loading(directory: JobDirectory) -> bool:
    """Whether the engine is being started, for the second time perhaps."""
    attempts = directory.attempts()
    if not attempts:
        return False
    texts = [event.text for event in directory.timeline(attempts[-1])]
    return "ready" not in texts or any(text.startswith("restart") for text in texts)


def _stage(status: Any) -> str:
    if status.server_status == "PENDING":
        # Slurm says "None" until it has looked at the job
        reason = str(status.pending_reason).replace("None", "")
        return "is queued" + (f" ({reason})" if reason else "")
    if status.server_status == "FAILED":
        return f"does not answer ({status.failed_reason})"
    return "is starting"


def wait_ready(client: Any, job_id: str, say: Say) -> Any:
    """Wait until a job serves, in the queue without limit.

    Parameters
    ----------
    client : MultinodeClient
        Asked for the status.
    job_id : str
        Slurm's id.
    say : callable
        Told in what state the job is, at each change.

    Returns
    -------
    StatusResponse
        The status that said READY.

    Raises
    ------
    JobLost
        If it will not.
    """
    said, unhealthy_since = "", None
    while True:
        status = look(client, job_id)
        if status.server_status == "READY":
            return status
        reason = end_of(status)
        if reason:
            raise JobLost(reason)
        if status.server_status != "FAILED" or _is_loading(directory_of(status)):
            unhealthy_since = None
        else:
            unhealthy_since = unhealthy_since or time.monotonic()
            if time.monotonic() - unhealthy_since > SERVER_PATIENCE:
                raise JobLost(f"it does not answer: {status.failed_reason}")
        if _stage(status) != said:
            said = _stage(status)
            say(f"Job {job_id} {said}")
        time.sleep(POLL)


def api_keys(directory: JobDirectory) -> list[Optional[str]]:
    """Keys to try: the one in the job's own env, or none and then this shell's.

    A key of the shell is shown only to a server that wants one.
    """
    value = (directory.facts().get("env") or {}).get("VLLM_API_KEY")
    if value:
        return [expanded(str(value))]
    shells = (os.environ.get(name) for name in ("VLLM_API_KEY", "OPENAI_API_KEY"))
    return [None, *filter(None, shells)]


def expanded(value: str) -> str:
    """A value of env as the ranks have it: their environment came from a shell."""
    return re.sub(
        r"\$(?:\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*))",
        lambda found: os.environ.get(found[1] or found[2], ""),
        value,
    )


class Job:
    """The job that serves a run.

    Parameters
    ----------
    client : MultinodeClient
        vec-inf's client.
    model : str
        Name of the model.
    output : Output
        Remembers the job, so that a killed run does not pay for a second one.
    say : callable
        Told what happens.

    Attributes
    ----------
    id : str or None
        Slurm's id, once there is one.
    root : str
        Address of its server, without ``/v1``.
    """

    def __init__(self, client: Any, model: str, output: Output, say: Say):
        self.client, self.model, self.output, self.say = client, model, output, say
        self.id: Optional[str] = None
        self.root = ""
        self._lock = threading.Lock()
        self._back_since = float("-inf")

    def use(self, job_id: str) -> None:
        """Use a job that somebody launched."""
        self.id = job_id
        try:
            name = look(self.client, job_id).model_name
        except JobLost as lost:
            raise common.CommandError(
                f"Job {job_id}: {lost}.", common.BAD_INPUT
            ) from None
        if name != self.model:
            raise common.CommandError(
                f"Job {job_id} is {name!r}, not {self.model!r}.", common.BAD_INPUT
            )
        if self.output.job_id != job_id:
            self._leave_alone()

    def _leave_alone(self) -> None:
        job_id = self.output.job_id
        if job_id:
            self.say(
                f"Job {job_id} was launched for this output before and is left alone; "
                f"'scancel {job_id}' ends it."
            )

    def finish_off(self, keep: bool) -> None:
        """See to the job that an earlier try launched and did not stop."""
        if keep:
            self._leave_alone()
        else:
            self.take_back()

    def take_back(self) -> bool:
        """Use the job that an earlier try launched, if it is still good."""
        job_id = self.output.job_id
        if not job_id or not self._is_good(job_id):
            return False
        self.id = job_id
        self.say(f"Job {job_id}, launched before, goes on")
        return True

    def launch(self, options: dict[str, Any]) -> None:
        """Launch one."""
        # Killed after sbatch and before the record, a multi-node job stays held in the
        # queue: it never starts and costs nothing. Killed after the record, the next
        # try releases it. (vec-inf does not hold a single-node job: for the moment
        # between sbatch's answer and the record it could be left running.)
        with signals.held():
            response = self.client.launch_model(
                self.model,
                common.LaunchOptions(**options),
                on_submitted=self.output.record_job,
            )
            self.id = response.slurm_job_id
        self.say(f"Launched job {self.id}")

    def wait(self) -> Any:
        """Wait until it serves; the status that said so."""
        status = wait_ready(self.client, str(self.id), self.say)
        self.root = root_of(status)
        return status

    def was_away(self, since: float) -> bool:
        """Whether the server was away since a time; waits until it is back.

        Parameters
        ----------
        since : float
            By `time.monotonic`.

        Raises
        ------
        JobLost
            If it does not come back.
        """
        with self._lock:
            if self._back_since > since:
                return True
            status = look(self.client, str(self.id))
            if status.server_status == "READY" and root_of(status) == self.root:
                return False
            self.wait()
            self._back_since = time.monotonic()
            return True

    def stop(self) -> None:
        """Cancel it, whatever has become of it: a failed one may be requeued."""
        # its status is not asked for: a server that hangs would hang that too
        try:
            self.client.shutdown_model(self.id)
            self.say(f"Stopped job {self.id}")
        except SlurmJobError as err:
            if not _is_gone(err):
                text = f"Could not stop job {self.id}: {str(err).strip()}"
                self.say(f"{text}. 'scancel {self.id}' ends it.")
                return
        self.output.record_job(None)

    def _is_good(self, job_id: str) -> bool:
        try:
            status = self._settled(job_id)
        except (JobLost, FileNotFoundError):
            return False
        fields = dict(f.split("=", 1) for f in status.raw_output.split() if "=" in f)
        mine = fields.get("UserId", "").endswith(f"({os.getuid()})")
        if not mine or status.model_name != self.model or end_of(status):
            return False
        if status.pending_reason == "JobHeldUser":
            try:
                release(job_id)
            except SubmitError:
                self.client.shutdown_model(job_id)
                return False
        return True

    def _settled(self, job_id: str) -> Any:
        """Status of a job that is not just ending: a requeued one comes again."""
        deadline = time.monotonic() + SERVER_PATIENCE
        while True:
            status = look(self.client, job_id)
            if status.job_state != "COMPLETING" or end_of(status):
                return status
            if time.monotonic() > deadline:
                raise JobLost("it has been ending for a while")
            time.sleep(POLL)


@contextmanager
def stopped_at_the_end(job: Job, keep: bool) -> Iterator[None]:
    """Leave no GPUs billed while idle, however the block is left."""
    try:
        yield
    finally:
        if job.id and not keep:
            signals.ignore()
            job.stop()
