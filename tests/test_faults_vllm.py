"""The faults that matter most, with real vLLM: what dies, and what the job says.

Each launch loads a model, so most of these are marked slow: `make test-faults`.
"""

import json
import os
import re
import signal
import subprocess
import time
from contextlib import contextmanager

import pytest

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]

# vec-inf takes each of these for a failure when it is in the job's .err before ready
NOISE = """#!/bin/bash
for i in {1..250}; do
    for words in Traceback exception 'fatal error' 'critical error' 'Failed to open' \\
        'could not' 'unable to' 'error: none'; do
        printf 'libfabric:%s: %s\\n' "$i" "$words" >&2
    done
done
exec VENV/bin/vllm "$@"
"""


@pytest.fixture
def launch(lab, hub):
    """Return a function that launches real vLLM, noisy before it is ready."""
    noisy = lab.dir / "noisy"
    noisy.mkdir(exist_ok=True)
    program = noisy / "vllm"
    program.write_text(NOISE.replace("VENV", str(lab.vllm_venv)))
    program.chmod(0o755)
    jobs = []

    def start(**options):
        job = hub.launch(
            env=f"PATH={noisy}:/usr/bin:/bin",
            bind=str(noisy),
            **{"time": "00:30:00", **options},
        )
        jobs.append(job)
        return job

    yield start
    for job in jobs:
        job.cancel()
        job.wait_gone()
        print(f"job {job.number}: {job.story()}")


def kill(lab, node, text, number=signal.SIGKILL):
    """Send a signal to the one process of a node whose command line holds a text."""
    found = [p for p in lab.node_processes(node) if text in " ".join(p.cmdline)]
    assert found, f"no {text} on {node}"
    os.kill(found[0].pid, number)


def step_log(job):
    """What srun and the rank scripts said."""
    return "".join(p.read_text() for p in sorted(job.log_dir.glob("*/step.log")))


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("node", "process", "rank"),
    [
        pytest.param("nid002", "VLLM::Worker_PP1", 1, id="worker-of-rank-1"),
        pytest.param(
            "nid001", "VLLM::Worker_PP0", 0, id="worker-of-rank-0", marks=slow
        ),
        pytest.param("nid001", "VLLM::EngineCore", 0, id="engine-core", marks=slow),
        pytest.param("nid001", "vllm serve", 0, id="api-server", marks=slow),
        pytest.param("nid002", "vllm serve", 1, id="headless-main", marks=slow),
    ],
)
def test_a_kill_ends_the_job_with_its_cause(launch, lab, node, process, rank):
    """2,000 benign lines did not fail it; a kill -9 does, on every node, in seconds."""
    job = launch()
    job.ready()
    assert job.log("err") == "INFO:     Application startup complete.\n"
    killed = time.monotonic()
    kill(lab, node, process)
    job.wait_gone(30)
    seconds = time.monotonic() - killed
    record = json.loads((job.log_dir / "failure.json").read_text())
    ended = re.search(rf"rank={rank} .* at=([\d.]+) stopping=0", step_log(job))
    print(f"{process} on {node}: gone after {seconds:.1f} s, {record['message']}")
    assert record["rank"] == rank
    assert record["time"] - float(ended[1]) < 5
    # vLLM itself needs up to about 5 s to end after it has lost a worker
    assert seconds < 12
    found = job.status(ours=True)
    assert found["server"] == "FAILED"
    assert found["reason"].startswith(f"LLMHUB-ERROR: rank {rank} on {node} exited")


@slow
def test_a_restart_and_a_requeue_serve_again(launch, lab, hub):
    """READY after a restart at the same address, and after a requeue at its own."""
    job = launch(environ={"LLMHUB_MN_MAX_RESTARTS": "1"})
    first = job.ready()["url"]
    kill(lab, "nid002", "VLLM::Worker_PP1")
    wait_for_ready_lines(job, 2)
    assert job.ready()["url"] == first
    assert complete(hub, first) == 200
    lab.run(["scontrol", "requeue", job.number], timeout=20)
    deadline = time.monotonic() + 120
    while job.state() != "RUNNING" or "RESTART" in job.log("out"):
        assert time.monotonic() < deadline, job.report()
        time.sleep(0.5)
    wait_for_ready_lines(job, 1)
    again = job.ready()["url"]
    assert again in job.log("out")
    assert complete(hub, again) == 200


def wait_for_ready_lines(job, number, limit=180):
    """Wait until the job has said so often that it is ready."""
    deadline = time.monotonic() + limit
    while job.log("out").count("LLMHUB-READY") < number:
        assert time.monotonic() < deadline, job.report()
        time.sleep(0.5)


def complete(hub, url, limit=60):
    """Status code of a completion."""
    request = {"model": "tiny-llama", "prompt": "The", "max_tokens": 8}
    return hub.request("POST", f"{url}/completions", json=request, timeout=limit)[0]


@slow
def test_a_stopped_worker_ends_the_job(launch, lab, hub):
    """SIGSTOP: /health stays 200, requests hang; the stall watch ends the job."""
    job = launch(environ={"LLMHUB_MN_STALL_TIMEOUT": "20"})
    url = job.ready()["url"]
    kill(lab, "nid002", "VLLM::Worker_PP1", signal.SIGSTOP)
    with pytest.raises(Exception, match="[Tt]imed? ?out"):
        complete(hub, url, limit=3)
    # the client is gone and vLLM may drop its request; another one waits on
    with waiting_request(lab, url):
        job.wait_gone(90)
    assert "no token for" in job.log("err")


@contextmanager
def waiting_request(lab, url):
    """A client that asks for a completion and waits for it for as long as it takes."""
    request = '{"model": "tiny-llama", "prompt": "The", "max_tokens": 8}'
    header = "content-type: application/json"
    client = lab.popen(
        ["curl", "-s", "-m", "300", f"{url}/completions", "-H", header, "-d", request],
        stdout=-1,
    )
    try:
        yield client
    finally:
        client.kill()
        client.communicate(timeout=10)


@slow
def test_a_cut_that_heals_does_not_end_the_job(launch, lab, hub):
    """Rank 1's fabric link is down for 85 s with a request running; it serves again."""
    job = launch(environ={"LLMHUB_MN_STALL_TIMEOUT": "150"})
    url = job.ready()["url"]
    assert complete(hub, url) == 200
    lab.set_link("nid002", "hsn0", False)
    try:
        with waiting_request(lab, url) as client:
            cut = time.monotonic()
            with pytest.raises(subprocess.TimeoutExpired):
                client.wait(85)
            lab.set_link("nid002", "hsn0", True)
            answer, _ = client.communicate(timeout=120)
            healed = time.monotonic() - cut - 85
    finally:
        lab.set_link("nid002", "hsn0", True)
    print(f"the request that waited was answered {healed:.1f} s after the cut")
    assert json.loads(answer)["choices"][0]["finish_reason"]
    assert complete(hub, url) == 200
    assert job.state() == "RUNNING"
    assert job.status()["server"] == "READY"
    assert job.log("err") == "INFO:     Application startup complete.\n"


@slow
def test_a_cut_that_stays_ends_the_job(launch, lab):
    """The link stays down: the stall watch ends the job."""
    job = launch(environ={"LLMHUB_MN_STALL_TIMEOUT": "20"})
    url = job.ready()["url"]
    lab.set_link("nid002", "hsn0", False)
    try:
        with waiting_request(lab, url):
            cut = time.monotonic()
            while not (job.log_dir / "failure.json").exists():
                assert time.monotonic() - cut < 90, job.report()
                time.sleep(0.5)
            seconds = time.monotonic() - cut
    finally:
        lab.set_link("nid002", "hsn0", True)
    print(f"the job ended {seconds:.1f} s after the cut")
    job.wait_gone(60)
    assert "no token for" in job.status(ours=True)["reason"]
