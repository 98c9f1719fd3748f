"""``run`` as a user has it: the real program on a machine with stand-ins for Slurm."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Optional

import support
from endpoint import Endpoint
from vec_inf.client._client_vars import MODEL_READY_SIGNATURE

MODEL = "two-nodes"
PROGRAM = "app.utils.vec_inf_multinode.cli"
LIMIT = 60


class Cluster:
    """A job that starts when it is released and ends when it is cancelled.

    Parameters
    ----------
    root : Path
        Directory to make everything in.
    endpoint : Endpoint
        What the job serves.
    """

    def __init__(self, root: Path, endpoint: Endpoint):
        self.root, self.endpoint = root, endpoint
        self.login = support.Login(root / "login")
        support.make_weights(self.login.weights, support.MODELS)
        self.source, self.output = root / "prompts.jsonl", root / "results.jsonl"
        self.starts = True
        self._lock = threading.Lock()
        self.next_job("42")
        self._seen = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Nothing more happens."""
        self._over.set()
        self._thread.join()

    # ---- Slurm's side

    def next_job(self, job_id: str) -> None:
        """The id that sbatch gives next, to a job that is held."""
        self.login.answer("sbatch.then", self._line(job_id, "PENDING", "JobHeldUser"))
        self.login.answer("sbatch.out", f"Submitted batch job {job_id}")

    def directory(self, job_id: str) -> Path:
        """The job's directory."""
        return self.login.logs / "family" / f"{MODEL}.{job_id}"

    def show(self, job_id: str, state: str, reason: str = "None", **other: str) -> None:
        """What scontrol says of the job from now on."""
        with self._lock:
            line = self._line(job_id, state, reason, **other)
            self.login.answer("scontrol.out", line)

    def _line(self, job_id: str, state: str, reason: str, **other: str) -> str:
        fields = {
            "JobId": job_id,
            "JobName": f"{MODEL}-vec-inf",
            "UserId": f"somebody({os.getuid()})",
            "JobState": state,
            "Reason": reason,
            "StdOut": f"{self.directory(job_id)}/{MODEL}.{job_id}.out",
            **other,
        }
        return " ".join(f"{name}={value}" for name, value in fields.items())

    def start(self, job_id: str) -> None:
        """Let the job run and serve."""
        directory = self.directory(job_id)
        json_file = directory / f"{MODEL}.{job_id}.json"
        facts = json.loads(json_file.read_text() or "{}") if json_file.exists() else {}
        directory.mkdir(parents=True, exist_ok=True)
        facts["server_address"] = f"{self.endpoint.root}/v1"
        json_file.write_text(json.dumps(facts))
        directory.joinpath(f"{MODEL}.{job_id}.err").write_text(MODEL_READY_SIGNATURE)
        self.show(job_id, "RUNNING")

    def fail(self, job_id: str, message: str) -> None:
        """Let the job have failed."""
        failure = {"message": message}
        self.directory(job_id).joinpath("failure.json").write_text(json.dumps(failure))
        self.show(job_id, "FAILED")

    def change(self, name: str, old: str, new: str) -> None:
        """Change the text of a stand-in."""
        place = self.login.path / name
        text = place.resolve().read_text()
        assert old in text
        place.unlink()
        place.write_text(text.replace(old, new, 1))
        place.chmod(0o755)

    def calls(self, *words: str) -> int:
        """How often Slurm was called in this way."""
        return sum(call[: len(words)] == list(words) for call in self.login.calls())

    def settle(self) -> None:
        """Wait until all that Slurm was told is done."""
        wait_for(lambda: self._seen == len(self.login.calls()))

    def _watch(self) -> None:
        while not self._over.wait(0.01):
            calls = self.login.calls()
            for call in calls[self._seen :]:
                if call[:2] == ["scontrol", "release"] and self.starts:
                    self.start(call[2])
                elif call[0] == "scancel":
                    self.show(call[1], "CANCELLED")
            self._seen = len(calls)

    # ---- the user's side

    def prompts(self, count: int) -> list[str]:
        """Write an input of plain prompts; their ids."""
        lines = [json.dumps({"prompt": f"p{n}"}) for n in range(1, count + 1)]
        self.source.write_text("\n".join(lines) + "\n")
        return [f"line-{n}" for n in range(1, count + 1)]

    def start_program(
        self,
        *options: str,
        job: Optional[str] = None,
        wrap: str = 'exec "$@"',
        **environ: str,
    ) -> subprocess.Popen[str]:
        """Start the program from a shell, in a process group of its own."""
        places = self.login.request()
        launch = [f"--{k.replace('_', '-')}={v}" for k, v in places.items()]
        words = [f"--job-id={job}"] if job else launch
        return subprocess.Popen(
            [
                *("/bin/bash", "-c", wrap, "bash"),
                *(sys.executable, "-m", PROGRAM, "run", MODEL),
                *("--input", str(self.source), "--output", str(self.output)),
                *("--concurrency=4", *words, *options),
            ],
            env={
                **self.login.environ,
                "VEC_INF_CONFIG_DIR": os.environ["VEC_INF_CONFIG_DIR"],
                "PYTHONPATH": str(support.TREE),
                "PYTHONWARNINGS": "ignore",
                "COLUMNS": "200",
                **environ,
            },
            cwd=self.root,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def run(self, *options: str, **more: Any) -> subprocess.CompletedProcess[str]:
        """Run the program to its end."""
        process = self.start_program(*options, **more)
        return self.ended(process)

    def ended(self, process: Any) -> subprocess.CompletedProcess[str]:
        """What a started program came to."""
        try:
            out, err = process.communicate(timeout=LIMIT)
        finally:
            kill(process)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def results(self) -> list[dict[str, Any]]:
        """The lines of the output."""
        return [json.loads(line) for line in self.output.read_text().splitlines()]

    def state(self) -> dict[str, Any]:
        """The state file."""
        return json.loads(self.state_file.read_text())

    @property
    def state_file(self) -> Path:
        """Where the state is."""
        return self.output.with_name(self.output.name + ".run.json")


def kill(process: Any) -> None:
    """End a program and what it started, at once."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def wait_for(condition: Any, limit: float = LIMIT) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.01)


@contextmanager
def a_cluster(root: Path) -> Iterator[Cluster]:
    """A cluster whose jobs serve `MODEL`."""
    endpoint = Endpoint(MODEL)
    cluster = Cluster(root, endpoint)
    try:
        yield cluster
    finally:
        cluster.close()
        endpoint.close()
