"""``run`` on the one-machine cluster: real Slurm, real vLLM over two nodes."""

import json
import os
import signal
import subprocess
import time

import pytest
import support

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(900)]

MODEL = "tiny-llama"
COUNT = 500
PROGRAM = "app.utils.vec_inf_multinode.cli"


@pytest.fixture
def place(lab):
    """Return a directory of the ordinary user."""
    directory = lab.home / "batch"
    lab.run(["rm", "-rf", str(directory)], timeout=20)
    lab.run(["mkdir", str(directory)], timeout=20)
    return directory


def program(lab, place, *options):
    """Start the program as the ordinary user."""
    path = lab.hub_install(support.TREE / "app")
    return lab.popen(
        [
            *(lab.client_python, "-m", PROGRAM, "run", MODEL),
            *("--input", place / "prompts.jsonl", "--output", place / "results.jsonl"),
            *("--num-nodes", "2", "--time", "00:30:00", "--concurrency", "8"),
            *("--json-mode", *options),
        ],
        env={"PYTHONPATH": str(path), "PYTHONWARNINGS": "ignore"},
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def write_prompts(lab, place, count):
    prompts = [
        json.dumps({"prompt": f"Prompt number {n}", "max_tokens": 8})
        for n in range(1, count + 1)
    ]
    path = str(place / "prompts.jsonl")
    lab.run(["tee", path], input="\n".join(prompts), timeout=20)


def wait_for_results(process, path, count):
    """Wait until there are so many results."""
    deadline = time.monotonic() + 300
    while lines(path) < count and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def recorded_job(place):
    return json.loads((place / "results.jsonl.run.json").read_text())["job_id"]


def check(place, count, summary):
    """Every request has its result, once; the sums are those of the results."""
    text = (place / "results.jsonl").read_text()
    answers = [json.loads(line) for line in text.splitlines()]
    assert len(answers) == count == summary["done"]
    wanted = {f"line-{n}" for n in range(1, count + 1)}
    assert {answer["custom_id"] for answer in answers} == wanted
    assert all(answer["response"]["status_code"] == 200 for answer in answers)
    usages = [answer["response"]["body"]["usage"] for answer in answers]
    tokens = sum(usage["completion_tokens"] for usage in usages)
    assert tokens == summary["completion_tokens"]


def wait_gone(lab):
    """Wait until Slurm has no such job and no process of one is left."""
    deadline = time.monotonic() + 60
    show = ["squeue", "-h", "-t", "running,pending,completing", "-n"]
    while lab.run([*show, f"{MODEL}-vec-inf"], timeout=20).stdout:
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert not any(lab.node_processes(node) for node in lab.nodes)


@pytest.fixture
def jobs(lab):
    """Return a set for the ids of jobs; what is left of them is cancelled."""
    ids = set()
    yield ids
    lab.run(["scancel", *ids], timeout=30)


def test_killed_twice_on_the_real_stack(lab, place, jobs):
    """500 prompts, 500 results, one Slurm job, and nothing of it at the end."""
    write_prompts(lab, place, COUNT)
    for count in (COUNT // 3, 2 * COUNT // 3):
        process = program(lab, place)
        wait_for_results(process, place / "results.jsonl", count)
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        print(f"killed at {lines(place / 'results.jsonl')} results; it said:\n{err}")
        assert process.returncode == -signal.SIGKILL, out
        jobs.add(recorded_job(place))
    last = program(lab, place)
    out, err = last.communicate(timeout=600)
    print(f"{err}{out}")
    assert last.returncode == 0
    jobs.add(json.loads(out)["job_id"])
    assert len(jobs) == 1
    check(place, COUNT, json.loads(out))
    wait_gone(lab)


def test_a_rank_that_dies_ends_the_run_and_the_next_goes_on(lab, place, jobs):
    """The cause is told, no result is lost, and a new job does the rest."""
    write_prompts(lab, place, 200)
    first = program(lab, place, "--retries=2")
    wait_for_results(first, place / "results.jsonl", 60)
    jobs.add(recorded_job(place))
    (worker,) = [
        process.pid
        for process in lab.node_processes("nid002")
        if "VLLM::Worker_PP1" in " ".join(process.cmdline)
    ]
    os.kill(worker, signal.SIGKILL)
    killed = time.monotonic()
    out, err = first.communicate(timeout=300)
    print(f"ended after {time.monotonic() - killed:.0f} s:\n{err}{out}")
    assert first.returncode == 4
    error = json.loads(out)["error"]
    assert "on nid002 exited with status" in error["message"]
    assert 60 <= error["done"] == lines(place / "results.jsonl") < 200
    second = program(lab, place)
    out, err = second.communicate(timeout=600)
    print(f"{err}{out}")
    assert second.returncode == 0
    jobs.add(json.loads(out)["job_id"])
    assert len(jobs) == 2
    check(place, 200, json.loads(out))
    wait_gone(lab)
