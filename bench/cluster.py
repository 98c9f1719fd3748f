"""What is measured on the one-machine cluster: starts, faults, the data path, scale.

Each function takes one measurement; `bench.py` takes them in turns.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Optional

import requests
import yaml
from vec_inf.client._client_vars import MODEL_READY_SIGNATURE

PROJECT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PROJECT), str(PROJECT / "tests" / "lab")]

from hub import MODEL, Hub, Job  # noqa: E402
from lab import Lab  # noqa: E402

from app.utils.vec_inf_multinode.plan import engine_argv  # noqa: E402

# Leaves a mark when its container runs it, and stays.
ENGINE = """#!/bin/bash
date +%s.%N >"$BENCH_MARKS/$(uname -n)"
exec sleep 600
"""
# Ray as far as vec-inf's script needs it to go on.
RAY = "#!/bin/bash\nexec sleep 600\n"
HAND_PORT, HAND_MASTER_PORT = 18080, 29917
PROMPT = {"model": MODEL, "prompt": "The quick brown fox", "max_tokens": 32}
PROMPT |= {"ignore_eos": True, "temperature": 0}
CAP = 45.0  # seconds after a fault, from when on a job counts as one that stays


def wait_for(condition: Any, seconds: float, what: str, pause: float = 0.02) -> Any:
    """Poll until a condition gives something; that."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {seconds:.0f} s")
        time.sleep(pause)
    return value


class Place:
    """A directory in the lab with stand-ins and room for their marks."""

    def __init__(self, lab: Lab):
        self.path = lab.dir / "bench"
        self.bin = self.path / "bin"
        self.bin.mkdir(parents=True, exist_ok=True)
        for name, text in (("vllm", ENGINE), ("ray", RAY)):
            self.bin.joinpath(name).write_text(text)
            self.bin.joinpath(name).chmod(0o755)

    def marks(self) -> Path:
        """A new directory, writable by jobs."""
        path = self.path / f"marks-{time.time_ns()}"
        path.mkdir()
        path.chmod(0o777)
        return path


def born(path: Path) -> float:
    """When a file was made, in seconds since the epoch; Slurm makes a job's output."""
    words = ["date", "+%s.%N", "-d", _stat_birth(path)]
    return float(subprocess.check_output(words, text=True, timeout=10))


def _stat_birth(path: Path) -> str:
    return subprocess.check_output(
        ["stat", "-c", "%w", path], text=True, timeout=10
    ).strip()


def last_mark(marks: Path, count: int, limit: float) -> float:
    """When the last of so many engines was started."""

    def times() -> list[float]:
        texts = [path.read_text() for path in marks.iterdir()]
        return [float(text) for text in texts if text.endswith("\n")]

    wait_for(lambda: len(times()) >= count, limit, f"{count} marks in {marks}")
    return max(times())


# ------------------------------------------------------------ start of the containers


def standin(place: Place, marks: Path, nodes: int) -> dict[str, Any]:
    """Options of a job of the stand-in, for ``Hub.launch``."""
    return {
        "num_nodes": nodes,
        "cpus_per_task": 1,
        "mem_per_node": "1G",
        "time": "00:20:00",
        "bind": str(place.path),
        "env": f"PATH={place.bin}:/usr/bin:/bin,BENCH_MARKS={marks}",
    }


def start_seconds(hub: Hub, place: Place, nodes: int, stock: bool) -> float:
    """From job start until the last rank's engine is exec'd; of vec-inf, rank 0's."""
    marks = place.marks()
    job = hub.launch(
        stock=stock,
        **standin(place, marks, nodes),
        environ={"LLMHUB_MN_READY_PROBE": "health"},
        vllm_args=f"--pipeline-parallel-size={nodes}",
    )
    try:
        end = last_mark(marks, 1 if stock else nodes, 240)
        return end - born(job.log_dir / f"{MODEL}.{job.number}.out")
    finally:
        job.cancel()
        job.wait_gone(120)


def bare_seconds(lab: Lab, place: Place, nodes: int, container: bool) -> float:
    """The same for a bare srun of the stand-in, with or without its container."""
    marks = place.marks()
    engine = f"env BENCH_MARKS={marks} {place.bin}/vllm"
    if container:
        engine = f"apptainer exec --nv --containall {lab.image} {engine}"
    output = marks / "job.out"
    step = f"srun --nodes={nodes} --ntasks-per-node=1 --kill-on-bad-exit=1 {engine}"
    bind = f"export APPTAINER_BINDPATH={lab.bind},{place.path}\n" if container else ""
    done = lab.run(
        ["sbatch", "--parsable", f"--nodes={nodes}", "--ntasks-per-node=1"]
        + ["--gres=gpu:1", "--mem=1G", "--time=10", f"--output={output}"],
        input=f"#!/bin/bash\n{bind}{step}\n",
        timeout=30,
    )
    job = done.stdout.strip()
    try:
        return last_mark(marks, nodes, 120) - born(output)
    finally:
        lab.run(["scancel", job], timeout=30)
        wait_for(lambda: not processes(lab), 60, "end of the bare job")


def processes(lab: Lab) -> list[Any]:
    """Every job process on every node."""
    return [p for node in lab.nodes for p in lab.node_processes(node)]


# ------------------------------------------------------------------- real engines


@dataclass
class Served:
    """A server that answers.

    Parameters
    ----------
    url : str
        Its address, up to ``/v1``.
    healthy : float
        From job start (or the two commands) until its health check was good, seconds.
    ready : float
        Until it had answered a completion; of a job, until it said so.
    job : Job or None
        The job, None if it was started by hand.
    """

    url: str
    healthy: float
    ready: float
    job: Optional[Job] = None

    def times(self) -> dict[str, float]:
        """Return both times, for a row of numbers."""
        return {"healthy": self.healthy, "ready": self.ready}


def answers(url: str) -> bool:
    """Whether a server completes a prompt."""
    try:
        request = {**PROMPT, "max_tokens": 1}
        return requests.post(f"{url}/completions", json=request, timeout=60).ok
    except requests.RequestException:
        return False


def wait_healthy(url: str, limit: float, failed: Any = None) -> float:
    """Wait until a server's health check is good; the time. The same on each side."""

    def healthy() -> bool:
        if failed and (words := failed()):
            raise RuntimeError(f"the job ended: {words}")
        try:
            return requests.get(f"{url.removesuffix('/v1')}/health", timeout=10).ok
        except requests.RequestException:
            return False

    wait_for(healthy, limit, "health of the server", pause=0.1)
    return time.time()


@contextmanager
def served_by_job(hub: Hub, limit: float = 300, **options: Any) -> Iterator[Served]:
    """A job's server; `options` as for ``Hub.launch``."""
    job = hub.launch(**{"time": "00:20:00", **options})
    try:
        out = job.log_dir / f"{MODEL}.{job.number}.out"
        wait_for(out.exists, 60, "start of the job")

        # files only: a question to Slurm at each poll would take the engine's cores
        def failed() -> str:
            said = job.log("err")
            return said[-500:] if "LLMHUB-ERROR:" in said else ""

        def said_ready() -> bool:
            return MODEL_READY_SIGNATURE in job.log("err")

        url = address(job, limit)
        healthy = wait_healthy(url, limit, failed)
        wait_for(said_ready, limit, "the job's word that it is ready")
        begun = born(out)
        yield Served(url, healthy - begun, time.time() - begun, job)
    finally:
        job.cancel()
        job.wait_gone(120)


def address(job: Job, limit: float) -> str:
    """Address that the job has published in its JSON."""
    path = job.log_dir / f"{MODEL}.{job.number}.json"

    def published() -> Optional[str]:
        try:
            return json.loads(path.read_text()).get("server_address")
        except (OSError, ValueError):
            return None

    return wait_for(published, limit, "address of the server")


@contextmanager
def served_by_hand(lab: Lab) -> Iterator[Served]:
    """The same two ``vllm serve`` commands, with nothing around them."""
    catalog = yaml.safe_load((lab.config_dir / "models.yaml").read_text())
    entry = catalog["models"][MODEL]
    master = lab.address(lab.nodes[0])
    commands = []
    started = time.time()
    try:
        for rank, node in enumerate(lab.nodes[:2]):
            argv = hand_argv(lab, engine_argv(entry["vllm_args"]), rank, master)
            env = hand_env(lab, entry["env"], lab.address(node))
            commands.append(lab.node_popen(node, argv, env))
        url = f"http://{lab.nodes[0]}:{HAND_PORT}/v1"
        healthy = wait_healthy(url, 300)
        wait_for(lambda: answers(url), 300, "the server by hand")
        yield Served(url, healthy - started, time.time() - started)
    finally:
        for command in commands:
            os.killpg(command.pid, signal.SIGKILL)
            command.wait(20)
        for process in processes(lab):
            os.kill(process.pid, signal.SIGKILL)
        wait_for(lambda: not processes(lab), 30, "end of the commands")


def hand_argv(lab: Lab, args: tuple[str, ...], rank: int, master: str) -> list[str]:
    """One rank's command."""
    own = ["--headless"]
    if rank == 0:
        own = ["--served-model-name", MODEL, "--host", "0.0.0.0"]
        own += ["--port", str(HAND_PORT)]
    return [
        *("apptainer", "exec", "--nv", "--containall", str(lab.image)),
        *("env", "-u", "FI_LOG_LEVEL", "vllm", "serve", str(lab.model_dir / MODEL)),
        *own,
        *args,
        *("--nnodes", "2", "--node-rank", str(rank), "--master-addr", master),
        *("--master-port", str(HAND_MASTER_PORT)),
        *("--distributed-executor-backend", "mp"),
    ]


def hand_env(lab: Lab, env: dict[str, str], address: str) -> dict[str, str]:
    """Environment of a command by hand: what its container needs to work at all."""
    cache = f"{lab.home}/work/.vec-inf-cache:{lab.home}/.cache"
    bind = f"/dev,/tmp,{cache},{lab.model_dir / MODEL},{lab.bind}"
    inside = {**env, "VLLM_HOST_IP": address, "GLOO_SOCKET_IFNAME": "hsn0"}
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "HOME": str(lab.home),
        "USER": lab.user,
        "LANG": "C.UTF-8",
        "APPTAINER_BINDPATH": bind,
        **{f"APPTAINERENV_{name}": value for name, value in inside.items()},
    }


def load(url: str, clients: int = 4, seconds: float = 12) -> dict[str, float]:
    """Closed-loop streaming clients: tokens a second, median seconds to the first."""
    end = time.monotonic() + seconds
    tokens, first = [0] * clients, []

    def client(number: int) -> None:
        while time.monotonic() < end:
            asked = time.monotonic()
            with requests.post(
                f"{url}/completions",
                json={**PROMPT, "stream": True},
                stream=True,
                timeout=60,
            ) as answer:
                waiting = True
                for line in answer.iter_lines():
                    if not line.startswith(b"data: {"):
                        continue
                    if waiting:
                        first.append(time.monotonic() - asked)
                        waiting = False
                    tokens[number] += 1

    started = time.monotonic()
    threads = [threading.Thread(target=client, args=(n,)) for n in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds + 120)
    return {
        "tokens_per_second": sum(tokens) / (time.monotonic() - started),
        "first_token_seconds": median(first),
    }


# ----------------------------------------------------------------------------- faults


def kill_worker(lab: Lab, node: str) -> None:
    """Kill -9 of vLLM's worker on a node."""
    for process in lab.node_processes(node):
        if "VLLM::Worker" in " ".join(process.cmdline):
            os.kill(process.pid, signal.SIGKILL)
            return
    raise LookupError(f"no worker on {node}")


def seconds_to_end(lab: Lab, job: Job, cap: float = CAP) -> Optional[float]:
    """Seconds until a job is over and nothing of it runs; None if it stays."""
    started = time.monotonic()
    while time.monotonic() - started < cap:
        if job.state() not in ("RUNNING", "COMPLETING") and not processes(lab):
            return time.monotonic() - started
        time.sleep(0.1)
    return None


def plain_fault(lab: Lab, place: Place) -> Optional[float]:
    """The same fault in the plain design: one srun whose tasks exec the container.

    Seconds until the job is over, None if it stays.
    """
    marks = place.marks()
    master = lab.address(lab.nodes[0])
    catalog = yaml.safe_load((lab.config_dir / "models.yaml").read_text())
    entry = catalog["models"][MODEL]
    script = marks / "rank.sh"
    lines = ["#!/bin/bash"]
    for rank, node in enumerate(lab.nodes[:2]):
        argv = hand_argv(lab, engine_argv(entry["vllm_args"]), rank, master)
        env = hand_env(lab, entry["env"], lab.address(node))
        words = ["env", *(f"{k}={v}" for k, v in env.items()), *argv]
        lines.append(f"[ $SLURM_PROCID != {rank} ] || exec {shlex.join(words)}")
    script.write_text("\n".join(lines) + "\n")
    step = "srun --nodes=2 --ntasks-per-node=1 --kill-on-bad-exit=1"
    done = lab.run(
        ["sbatch", "--parsable", "--nodes=2", "--ntasks-per-node=1", "--time=10"]
        + ["--gres=gpu:1", "--mem=8G", f"--output={marks}/job.out"],
        input=f"#!/bin/bash\n{step} bash {script}\n",
        timeout=30,
    )
    job = done.stdout.strip()
    try:
        url = f"http://{lab.nodes[0]}:{HAND_PORT}/v1"
        wait_for(lambda: answers(url), 300, "the server of the plain design")
        kill_worker(lab, "nid002")
        started = time.monotonic()
        while time.monotonic() - started < CAP:
            state = lab.run(["squeue", "-h", "-j", job, "-o", "%T"], timeout=20)
            if state.stdout.strip() not in ("RUNNING", "COMPLETING"):
                return time.monotonic() - started
            time.sleep(0.2)
        return None
    finally:
        lab.run(["scancel", job], timeout=30)
        wait_for(lambda: not processes(lab), 60, "end of the plain job")


# ------------------------------------------------------------------------------ scale


@dataclass
class Scaled:
    """What a job of many nodes took.

    Parameters
    ----------
    nodes : int
        Number of nodes.
    launched : float
        Seconds from job start until every rank's engine was exec'd.
    script_bytes : int
        Size of the batch script.
    processes_per_node : int
        Processes that the launcher adds on a node that is not the first.
    dead_rank : float
        Seconds from the kill of the last rank's engine until all are gone.
    """

    nodes: int
    launched: float
    script_bytes: int
    processes_per_node: int
    dead_rank: Optional[float]


def scale(lab: Lab, hub: Hub, place: Place, nodes: int) -> Scaled:
    """One job of so many nodes, whose last rank is killed."""
    marks = place.marks()
    job = hub.launch(**standin(place, marks, nodes))
    try:
        launched = last_mark(marks, nodes, 300)
        name = job.log_dir / f"{MODEL}.{job.number}"
        begun = born(name.with_name(f"{name.name}.out"))
        last = lab.nodes[nodes - 1]
        time.sleep(2)
        ours = [
            p
            for p in lab.node_processes(last)
            if "rank.sh" in " ".join(p.cmdline) or p.cmdline[:1] == ["tee"]
        ]
        engine = next(p for p in lab.node_processes(last) if p.cmdline[:1] == ["sleep"])
        os.kill(engine.pid, signal.SIGKILL)
        gone = seconds_to_end(lab, job, 120)
        size = name.with_name(f"{name.name}.sbatch").stat().st_size
        return Scaled(nodes, launched - begun, size, len(ours), gone)
    finally:
        job.cancel()
        job.wait_gone(120)


@contextmanager
def held_back(lab: Lab, node: str) -> Iterator[None]:
    """A node on which no task starts: the site's task prolog does not end."""
    prolog = lab.dir / "etc" / "task_prolog.sh"
    text, gate = prolog.read_text(), lab.dir / "run" / "bench-gate"
    gate.unlink(missing_ok=True)
    wait = f'while [ "$SLURMD_NODENAME" = {node} ] && [ ! -e {gate} ]; do sleep 1; done'
    prolog.write_text(f"{text}{wait}\n")
    try:
        yield
    finally:
        prolog.write_text(text)
        gate.touch()  # a prolog that still waits


def missing_rank(
    lab: Lab, hub: Hub, place: Place, nodes: int, budget: int = 40
) -> dict[str, Any]:
    """A job of so many nodes whose last rank never starts: what it says, and the end.

    ``late`` is seconds beyond the budget, until the job is over and its nodes are free.
    """
    marks, last = place.marks(), lab.nodes[nodes - 1]
    with held_back(lab, last):
        job = hub.launch(
            **standin(place, marks, nodes),
            environ={"LLMHUB_MN_RANK_START_TIMEOUT": str(budget)},
        )
        try:
            out = job.log_dir / f"{MODEL}.{job.number}.out"
            wait_for(out.exists, 60, "start of the job")
            reason = job.failed(budget + 60)
            over = seconds_to_end(lab, job, 120)
            # bash counts whole seconds: the budget may be over up to one early
            late = None if over is None else max(0, time.time() - born(out) - budget)
            return {"nodes": nodes, "rank": nodes - 1, "reason": reason, "late": late}
        finally:
            job.cancel()
            job.wait_gone(120)


# -------------------------------------------------------------------------------- Ray


def ray_environment(lab: Lab) -> Path:
    """An environment with Ray on top of the cluster's vLLM, made once."""
    place, base = lab.cache / "ray-venv", lab.vllm_venv
    if (place / "bin" / "vllm").exists():
        return place
    run = partial(subprocess.run, check=True, timeout=600)
    run(["/usr/bin/python3", "-m", "venv", place])
    packages = next(base.glob("lib/python3*/site-packages"))
    inside = place / packages.relative_to(base)
    inside.joinpath("vllm.pth").write_text(f"{packages}\n")
    run([place / "bin" / "pip", "install", "-q", "ray==2.60.0"])
    script = (base / "bin" / "vllm").read_text().partition("\n")[2]
    place.joinpath("bin", "vllm").write_text(f"#!{place}/bin/python\n{script}")
    place.joinpath("bin", "vllm").chmod(0o755)
    run(["chmod", "-R", "a+rX", place])
    return place


def ray_seconds(lab: Lab, hub: Hub, venv: str, limit: float) -> tuple[float, str]:
    """vec-inf's own script: seconds from job start until it serves, or how far it got.

    Parameters
    ----------
    venv : str
        ``apptainer`` for the container, or an environment that holds Ray and vLLM.
    limit : float
        Seconds after which it is given up.
    """
    job = hub.launch(stock=True, venv=venv, time="00:20:00")
    out = job.log_dir / f"{MODEL}.{job.number}.out"
    try:
        wait_for(out.exists, 60, "start of the job")
        end = time.monotonic() + limit
        while time.monotonic() < end and job.state() == "RUNNING":
            url = job.status()["url"]
            if url.startswith("http") and answers(url):
                return time.time() - born(out), "serves"
            time.sleep(0.5)
        said = re.findall(r"^.*[Ee]rror.*\b[Rr]ay\b.*$", job.log("err"), re.MULTILINE)
        return time.time() - born(out), said[-1].strip()[:200] if said else "nothing"
    finally:
        job.cancel()
        job.wait_gone(120)
