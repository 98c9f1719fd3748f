"""A hub on the lab: one Python process of the ordinary user that launches and asks.

It stays up between calls, so that a poll costs no new interpreter.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from lab import Lab
from vec_inf.client._utils import is_server_running

PROJECT = Path(__file__).resolve().parents[2]
MODEL = "tiny-llama"

# Runs as the ordinary user with the project's copy on its path.
_SERVER = r"""
import json, os, sys, warnings
import requests
from vec_inf.client import LaunchOptions, VecInfClient
from app.utils.vec_inf_multinode import MultinodeClient, launch_model

warnings.simplefilter("ignore")
plain, multinode = VecInfClient(), MultinodeClient()


def launch(model, options, environ, stock):
    before = dict(os.environ)
    os.environ.update(environ)
    options = LaunchOptions(**options)
    try:
        if stock:
            return plain.launch_model(model, options).slurm_job_id
        return launch_model(plain, model, options).slurm_job_id
    finally:
        os.environ.clear()
        os.environ.update(before)


def status(job, ours=False):
    found = (multinode if ours else plain).get_status(job)
    return {
        "server": str(getattr(found.server_status, "value", found.server_status)),
        "job": str(getattr(found.job_state, "value", found.job_state)),
        "reason": found.failed_reason and str(found.failed_reason),
        "url": found.base_url,
        "log_dir": found.log_dir,
    }


def shutdown(job):
    return plain.shutdown_model(job)


def request(method, url, **more):
    answer = requests.request(method, url, **more)
    try:
        return [answer.status_code, answer.json()]
    except ValueError:
        return [answer.status_code, answer.text]


for line in sys.stdin:
    name, arguments = json.loads(line)
    try:
        reply = {"value": globals()[name](**arguments)}
    except Exception as err:
        reply = {"error": type(err).__name__, "text": str(err)}
    sys.stdout.write(json.dumps(reply) + "\n")
    sys.stdout.flush()
"""


class HubError(Exception):
    """What a call on the hub's side raised; ``kind`` is the class name."""

    def __init__(self, kind: str, text: str):
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Hub:
    """Launch jobs and ask about them, as the ordinary user.

    Parameters
    ----------
    lab : Lab
        A lab that is up.
    env : mapping, optional
        Variables on top of the lab's client environment.
    """

    def __init__(self, lab: Lab, env: Mapping[str, str] | None = None):
        self.lab = lab
        path = lab.hub_install(PROJECT / "app")
        self._process = lab.popen(
            [lab.client_python, "-c", _SERVER],
            env={"PYTHONPATH": str(path), **(env or {})},
            stdin=-1,
            stdout=-1,
        )

    def close(self) -> None:
        """End the hub's process."""
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        finally:
            self._process.kill()
            self._process.stdout.close()

    def _call(self, name: str, **arguments: Any) -> Any:
        self._process.stdin.write(json.dumps([name, arguments]) + "\n")
        self._process.stdin.flush()
        reply = json.loads(self._process.stdout.readline())
        if "error" in reply:
            raise HubError(reply["error"], reply["text"])
        return reply["value"]

    def launch(
        self,
        model: str = MODEL,
        environ: Any = None,
        stock: bool = False,
        **options: Any,
    ) -> "Job":
        """Launch through ``launch_model``, or as vec-inf alone does.

        `environ` holds knobs for this launch.
        """
        job = self._call(
            "launch", model=model, options=options, environ=environ or {}, stock=stock
        )
        return Job(self, job, model)

    def status(self, job: str, ours: bool = False) -> dict[str, Any]:
        """Status by vec-inf's own client, or by ours."""
        return self._call("status", job=job, ours=ours)

    def shutdown(self, job: str) -> bool:
        """vec-inf's ``shutdown_model``."""
        return self._call("shutdown", job=job)

    def request(self, method: str, url: str, **more: Any) -> tuple[int, Any]:
        """One HTTP request; status code and decoded body."""
        more.setdefault("timeout", 60)
        code, body = self._call("request", method=method, url=url, **more)
        return code, body


class Job:
    """One launched job.

    Parameters
    ----------
    hub : Hub
        The hub that launched it.
    number : str
        Slurm's id.
    model : str
        The model's name.
    """

    def __init__(self, hub: Hub, number: str, model: str):
        self.hub, self.number, self.model = hub, number, model
        self.log_dir = Path(hub.status(number)["log_dir"])

    def status(self, ours: bool = False) -> dict[str, Any]:
        """Status now."""
        return self.hub.status(self.number, ours)

    def log(self, kind: str) -> str:
        """Text of the job's ``.out`` or ``.err``."""
        path = self.log_dir / f"{self.model}.{self.number}.{kind}"
        return path.read_text(errors="replace") if path.exists() else ""

    def slurm(self, field: str) -> str:
        """A field of ``squeue``; empty once the job is gone."""
        show = ["squeue", "-h", "-t", "all", "-j", self.number, "-o", field]
        return self.hub.lab.run(show, timeout=20).stdout.strip()

    def state(self) -> str:
        """Slurm's state of the job."""
        return self.slurm("%T")

    def wait_for(self, wanted: set[str], limit: float) -> dict[str, Any]:
        """Wait for one of vec-inf's server states; the status that had it.

        Raises
        ------
        AssertionError
            If it does not come within `limit` seconds or the job ends otherwise.
        """
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            found = self.status()
            if found["server"] in wanted:
                return found
            if found["server"] in ("FAILED", "UNAVAILABLE") and found["job"] not in (
                "PENDING",
                "CONFIGURING",
            ):
                break
            time.sleep(0.5)
        raise AssertionError(f"waited for {wanted}, found {found}\n{self.report()}")

    def ready(self, limit: float = 240) -> dict[str, Any]:
        """Wait for READY."""
        return self.wait_for({"READY"}, limit)

    def failed(self, limit: float = 60) -> str:
        """Wait for FAILED by our client; the reason by vec-inf's own scan of ``.err``.

        vec-inf's client says FAILED only while Slurm still has the job running, which
        may be for a moment.
        """
        deadline = time.monotonic() + limit
        while (found := self.status(ours=True))["server"] != "FAILED":
            assert time.monotonic() < deadline, f"found {found}\n{self.report()}"
            time.sleep(0.5)
        scan = is_server_running(self.model, self.number, str(self.log_dir))
        assert isinstance(scan, tuple), f"vec-inf found {scan}\n{self.report()}"
        status, reason = scan
        assert status.value == "FAILED"
        return reason

    def wait_gone(self, limit: float = 60) -> float:
        """Wait until the job is over and nothing of it runs; seconds it took."""
        started = time.monotonic()
        while time.monotonic() - started < limit:
            running = self.state() in ("RUNNING", "COMPLETING", "PENDING")
            if not running and not self.processes():
                return time.monotonic() - started
            time.sleep(0.2)
        raise AssertionError(
            f"job {self.number} is {self.state()} after {limit} s; left: "
            f"{self.processes()}\n{self.report()}"
        )

    def processes(self) -> list[tuple[str, int, str]]:
        """Every job process on every node: node, pid, command line."""
        return [
            (node, process.pid, " ".join(process.cmdline))
            for node in self.hub.lab.nodes
            for process in self.hub.lab.node_processes(node)
        ]

    def report(self) -> str:
        """What a person would look at first."""
        parts = [f"--- {kind}\n{self.log(kind)[-4000:]}" for kind in ("out", "err")]
        parts += [
            f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}"
            for path in sorted(self.log_dir.glob("ranks/*.err"))
        ]
        for path in (self.log_dir / "batch.log", *self.log_dir.glob("*/step.log")):
            if path.exists():
                parts.append(f"--- {path.name}\n{path.read_text()[-2000:]}")
        return "\n".join(parts)

    def story(self) -> str:
        """One line: Slurm's state, what both clients say, seconds from fault to end."""
        logs = (p.read_text() for p in sorted(self.log_dir.glob("attempt-*/step.log")))
        ends = re.findall(r"LLMHUB-END .* at=([\d.]+) stopping=0", "".join(logs))
        state, _, end = self.slurm("%T %e").partition(" ")
        took = "no rank ended by itself"
        if ends and end.startswith("20"):
            ended = datetime.fromisoformat(end).astimezone().timestamp()
            took = f"over {ended - min(map(float, ends)):+.1f} s after the first end"
        said = [self.status(ours) for ours in (False, True)]
        words = [f"{one['server']} ({one['reason']})" for one in said]
        return f"{state}, {took}; vec-inf {words[0]}; ours {words[1]}"

    def cancel(self) -> None:
        """End the job, whatever its state."""
        self.hub.lab.run(["scancel", self.number], timeout=20)
