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


def program(lab, place):
    """Start the program as the ordinary user."""
    path = lab.hub_install(support.TREE / "app")
    return lab.popen(
        [
            *(lab.client_python, "-m", PROGRAM, "run", MODEL),
            *("--input", place / "prompts.jsonl", "--output", place / "results.jsonl"),
            *("--num-nodes", "2", "--time", "00:30:00", "--concurrency", "8"),
            "--json-mode",
        ],
        env={"PYTHONPATH": str(path), "PYTHONWARNINGS": "ignore"},
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_at(process, path, count):
    """Kill the program with all that it started once there are so many results."""
    deadline = time.monotonic() + 300
    while lines(path) < count and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    out, err = process.communicate()
    assert process.returncode == -signal.SIGKILL, (out, err)
    print(f"killed at {lines(path)} results; it had said:\n{err}")


def test_killed_twice_on_the_real_stack(lab, place):
    """500 prompts, 500 results, one Slurm job, and nothing of it at the end."""
    prompts = [
        json.dumps({"prompt": f"Prompt number {n}", "max_tokens": 8})
        for n in range(1, COUNT + 1)
    ]
    text = "\n".join(prompts)
    lab.run(["tee", str(place / "prompts.jsonl")], input=text, timeout=20)
    results = place / "results.jsonl"
    jobs = set()
    try:
        for count in (COUNT // 3, 2 * COUNT // 3):
            kill_at(program(lab, place), results, count)
            state = json.loads((place / "results.jsonl.run.json").read_text())
            jobs.add(state["job_id"])
        last = program(lab, place)
        out, err = last.communicate(timeout=600)
        print(f"{err}{out}")
        assert last.returncode == 0
        summary = json.loads(out)
        jobs.add(summary["job_id"])
        answers = [json.loads(line) for line in results.read_text().splitlines()]
        wanted = {f"line-{n}" for n in range(1, COUNT + 1)}
        assert {answer["custom_id"] for answer in answers} == wanted
        assert len(answers) == COUNT == summary["done"]
        assert all(answer["response"]["status_code"] == 200 for answer in answers)
        assert (
            sum(
                answer["response"]["body"]["usage"]["completion_tokens"]
                for answer in answers
            )
            == summary["completion_tokens"]
        )
        assert len(jobs) == 1
    finally:
        lab.run(["scancel", *filter(None, jobs)], timeout=30)
    deadline = time.monotonic() + 60
    running = ["squeue", "-h", "-t", "running,pending,completing", "-n"]
    while lab.run([*running, f"{MODEL}-vec-inf"], timeout=20).stdout:
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert not any(lab.node_processes(node) for node in lab.nodes)
