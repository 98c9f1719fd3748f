"""The console script as real processes, and a job to look at."""

import functools
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, Optional

import support

PROGRAM = Path(sys.executable).with_name("vec-inf-multinode")
ENGINE = support.TESTS / "stubs" / "node" / "engine.py"
JOB = "42"
LIMIT = 40
READY_SIGNATURE = "INFO:     Application startup complete."
# a script of ours, for what looks whether it is one
OURS = "llmhub_serve\n"


def wait_until(condition: Callable[[], Any], what: str, limit: float = LIMIT) -> Any:
    """Wait for something to be true; what it was."""
    deadline = time.monotonic() + limit
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {limit} s for {what}"
        time.sleep(0.05)
    return found


class Running:
    """A process of the console script.

    Parameters
    ----------
    start : callable
        Starts it, given what `subprocess.Popen` takes for its streams.
    tty : bool
        Whether its stderr is a terminal.
    deaf : bool
        Whether nobody reads its stdout.
    """

    def __init__(
        self, start: Callable[..., Any], tty: bool = False, deaf: bool = False
    ):
        theirs: Any = subprocess.PIPE
        if tty:
            ours, theirs = pty.openpty()
        printed, into = os.pipe()
        if deaf:
            os.close(printed)
        self.process = start(
            stdin=subprocess.DEVNULL,
            stdout=into,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(into)
        if tty:
            os.close(theirs)
        self._said = bytearray()
        self._printed = bytearray()
        sources = [(ours if tty else self.process.stderr.fileno(), self._said)]
        sources += [] if deaf else [(printed, self._printed)]
        self._readers = [
            threading.Thread(target=self._read, args=source, daemon=True)
            for source in sources
        ]
        for reader in self._readers:
            reader.start()

    @staticmethod
    def _read(source: int, into: bytearray) -> None:
        try:
            while data := os.read(source, 65536):
                into += data
        except OSError:  # the other end of a terminal is gone
            pass

    @property
    def said(self) -> str:
        """Its stderr so far."""
        return self._said.decode()

    @property
    def printed(self) -> str:
        """Its stdout so far."""
        return self._printed.decode()

    def wait_for(self, text: str, limit: float = LIMIT) -> None:
        """Wait until it has said or printed something."""

        def there() -> bool:
            assert (
                self.process.poll() is None or text in self.said + self.printed
            ), f"it has ended with {self.process.returncode}\n{self}"
            return text in self.said + self.printed

        wait_until(there, f"{text!r} in\n{self}", limit)

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """Signal its process group, as a terminal does."""
        os.killpg(self.process.pid, number)

    def ended(self, limit: float = LIMIT) -> int:
        """Wait for its end; its exit status."""
        try:
            status = self.process.wait(limit)
        finally:
            self.close()
        for reader in self._readers:
            reader.join(5)
        return status

    def close(self) -> None:
        """End it if it runs."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def __str__(self) -> str:
        """What it has said and printed."""
        return f"--- stdout\n{self.printed}\n--- stderr\n{self.said}"


class Terminal:
    """Starts the console script.

    Parameters
    ----------
    login : Login
        The machine.
    """

    def __init__(self, login: support.Login):
        self.login = login
        self.started: list[Running] = []

    def start(
        self, *words: str, tty: bool = False, deaf: bool = False, **environ: str
    ) -> Running:
        """Start it, with these variables on top."""
        own = {
            **self.login.environ,
            "VEC_INF_CONFIG_DIR": os.environ["VEC_INF_CONFIG_DIR"],
            "PYTHONPATH": str(support.TREE),
            "PYTHONDONTWRITEBYTECODE": "1",
            "TERM": "xterm",
            "COLUMNS": "120",
            **environ,
        }
        argv = [sys.executable, str(PROGRAM), *words]
        start = functools.partial(subprocess.Popen, argv, env=own)
        self.started.append(Running(start, tty, deaf))
        return self.started[-1]

    def run(self, *words: str, **environ: str) -> Running:
        """Run it to its end."""
        running = self.start(*words, **environ)
        running.status = running.ended()
        return running

    def close(self) -> None:
        """End what runs."""
        for running in self.started:
            running.close()


def request_words(
    login: support.Login, model: str = "two-nodes", **more: str
) -> list[str]:
    """Words of a request that keeps every file on the machine."""
    options = login.request(**more)
    return [model, *(f"--{k.replace('_', '-')}={v}" for k, v in options.items())]


class StandinJob:
    """A job as Slurm and its own files tell of it; the tests are what happens to it.

    Parameters
    ----------
    login : Login
        The machine.
    model : str
        Name of the model.
    """

    def __init__(self, login: support.Login, model: str = "two-nodes"):
        self.login, self.model = login, model
        self.directory = login.logs / "family" / f"{model}.{JOB}"
        self.submitted = time.time()
        self._engine: Optional[subprocess.Popen] = None

    def file(self, kind: str) -> Path:
        """One of the job's own files."""
        return self.directory / f"{self.model}.{JOB}.{kind}"

    def slurm_line(self, state: str, **fields: Any) -> str:
        """What ``scontrol show job`` says."""

        def moment(at: float) -> str:
            return datetime.fromtimestamp(at).isoformat(timespec="seconds")

        known = {
            "JobId": JOB,
            "JobName": f"{self.model}-vec-inf",
            "JobState": state,
            "Reason": "None",
            "ExitCode": "0:0",
            "TimeLimit": "08:00:00",
            "SubmitTime": moment(self.submitted),
            "StartTime": moment(self.submitted),
            "EndTime": moment(self.submitted + 28800),
            "StdOut": self.file("out"),
            **fields,
        }
        return " ".join(f"{name}={value}" for name, value in known.items())

    def slurm(self, state: str, **fields: Any) -> None:
        """Let Slurm say this of the job."""
        self.login.answer("scontrol.out", self.slurm_line(state, **fields))

    def make(self, **facts: Any) -> "StandinJob":
        """Make what a launch makes."""
        self.directory.mkdir(parents=True, exist_ok=True)
        known = {"model_type": "LLM", "num_nodes": "2", "env": {}, "engine_args": {}}
        self.file("json").write_text(json.dumps({**known, **facts}))
        self.file("sbatch").write_text(OURS)
        self.slurm("RUNNING")
        return self

    def mark(self, *events: str, attempt: int = 0, at: Optional[float] = None) -> None:
        """Add marks to an attempt."""
        directory = self.directory / f"attempt-{attempt}"
        directory.mkdir(exist_ok=True)
        with directory.joinpath("timeline").open("a") as file:
            for event in events:
                file.write(f"{int(time.time() if at is None else at)} {event}\n")

    def rank_says(self, text: str, kind: str = "err", rank: int = 0) -> None:
        """Add to the log of a rank."""
        log = self.directory / "ranks" / f"rank-{rank}.nid00{rank + 1}.{kind}"
        log.parent.mkdir(exist_ok=True)
        with log.open("a") as file:
            file.write(text)

    def fail(self, message: str, **more: Any) -> None:
        """Let the job have recorded its failure."""
        record = {"message": message, "time": int(time.time()), **more}
        self.directory.joinpath("failure.json").write_text(json.dumps(record))

    def answers(self, **answers: Any) -> None:
        """Let its server answer so from now on."""
        fresh = self.login.root / "engine" / "http.new"
        fresh.write_text(json.dumps(answers))
        fresh.replace(fresh.with_name("http.json"))

    def serve(self, **answers: Any) -> str:
        """Let it be ready: a server that answers, and the job's files say so."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        etc = self.login.root / "engine"
        etc.mkdir(exist_ok=True)
        self.answers(**answers)
        environ = {"STUB_ETC": str(etc), "STUB_LOG": str(etc)}
        argv = [sys.executable, str(ENGINE), "--port", str(port)]
        self._engine = subprocess.Popen(argv, env=environ)

        def answers_now() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        wait_until(answers_now, "the stand-in engine")
        url = f"http://127.0.0.1:{port}/v1"
        facts = json.loads(self.file("json").read_text())
        fresh = self.directory / "json.new"
        fresh.write_text(json.dumps({**facts, "server_address": url}))
        fresh.replace(self.file("json"))
        if OURS in self.file("sbatch").read_text():
            self.mark("started on nid[001-002]", "rank 0 up on nid001")
            self.mark("rank 1 up on nid002", "ready")
        self.file("err").write_text(READY_SIGNATURE + "\n")
        return url

    def close(self) -> None:
        """End its server."""
        if self._engine:
            self._engine.kill()
            self._engine.wait()
