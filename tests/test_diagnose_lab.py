"""What ``diagnose`` says of real jobs that really failed, on the real cluster."""

import json
import os
import re
import signal
import time

import pytest
import test_faults_standin as faults

pytestmark = [pytest.mark.lab, pytest.mark.timeout(400)]

# fixtures: the stand-in engine, a node that takes no step, a fabric of one node only
launch = faults.launch
frozen_node = faults.frozen_node
other_fabric = faults.other_fabric

DONE, FAILED = 0, 4
PROGRAM = "from app.utils.vec_inf_multinode.cli import main; main()"


@pytest.fixture
def diagnose(lab):
    """Run the command as the ordinary user: its document, after the printed form."""

    def run(job, status):
        words = [lab.client_python, "-c", PROGRAM, "diagnose", job.number]
        env = {"PYTHONPATH": str(lab.hub)}
        printed = lab.run(words, timeout=60, env=env)
        print(printed.stdout + printed.stderr)
        assert printed.returncode == status, printed.stdout + printed.stderr
        done = lab.run([*words, "--json-mode"], timeout=60, env=env)
        assert done.returncode == status
        found = json.loads(done.stdout)
        assert printed.stdout.startswith(f"{found['state'].upper()}  ")
        assert found["verdict"] in printed.stdout
        return found

    return run


@pytest.fixture
def failed(diagnose):
    """Wait until a job has failed; its diagnosis, which must name a cause."""

    def run(job, cause, limit=90):
        deadline = time.monotonic() + limit
        while not (job.log_dir / "failure.json").exists():
            assert time.monotonic() < deadline, job.report()
            time.sleep(0.5)
        job.wait_gone(60)
        found = diagnose(job, FAILED)
        assert (found["state"], found["cause"]["id"]) == ("failed", cause)
        assert found["advice"]
        return found

    return run


# ---------------------------------------------------------------- the stand-in engine


def test_gpu_memory(launch, failed):
    words = "exit=1 after=2 say=torch.OutOfMemoryError:_CUDA_out_of_memory."
    found = failed(launch(rank0="ready=never", rank1=words), "gpu-memory")
    assert re.fullmatch(
        r"rank 1 on nid002 exited with status 1 after \ds: out of GPU memory",
        found["verdict"],
    )
    (line,) = found["ranks"][1]["lines"]
    assert line["text"] == "torch.OutOfMemoryError: CUDA out of memory."


def test_a_port_in_use(launch, failed):
    words = "ready=never exit=1 after=2 say=OSError:_[Errno_98]_Address_already_in_use"
    found = failed(launch(rank0=words), "port-in-use")
    assert found["ranks"][0]["node"] == "nid001"


def test_a_rank_that_never_starts(launch, frozen_node, diagnose):
    job = launch(environ={"LLMHUB_MN_RANK_START_TIMEOUT": "8"})
    job.failed(90)
    found = diagnose(job, FAILED)
    frozen_node()
    assert found["cause"]["id"] == "ranks-missing"
    assert [rank["end"] for rank in found["ranks"]][1] == "has not started"
    assert "ranks seen: 0" in [line["text"] for line in found["lines"]]
    job.wait_gone(60)


def test_a_server_that_is_never_ready(launch, failed):
    knobs = {"LLMHUB_MN_SERVER_TIMEOUT": "5"}
    found = failed(launch(rank0="ready=never", environ=knobs), "not-ready")
    assert found["step"]["spans_all"]


def test_no_fabric_on_rank_1(launch, other_fabric, failed):
    found = failed(launch(environ={"LLMHUB_MN_HSN_IFACE": "xsn"}), "no-fabric")
    assert found["ranks"][1]["end"].startswith("refused: no routable fabric IPv4")


def test_no_image_on_rank_1(launch, lab, failed):
    lab.node_run("nid002", ["mount", "-t", "tmpfs", "tmpfs", lab.image], 10)
    try:
        found = failed(launch(rank0="ready=never"), "image-missing")
    finally:
        lab.node_run("nid002", ["umount", lab.image], 10)
    (line,) = found["ranks"][1]["lines"]
    assert line["text"].startswith("FATAL:   ")


def test_fewer_gpus(launch, failed):
    job = launch(gpus_per_node=2, environ={"SBATCH_GRES": "gpu:1"})
    assert "has 1 GPU(s) (0), planned 2" in failed(job, "few-gpus")["verdict"]


def test_a_job_directory_that_rank_1_cannot_write(launch, lab, failed):
    logs = lab.home / "read-only-2" / "tiny-llama"
    lab.run(["mkdir", "-p", logs], timeout=10)
    lab.node_run("nid002", ["mount", "--bind", logs, logs], 10)
    lab.node_run("nid002", ["mount", "-o", "remount,ro,bind", logs], 10)
    try:
        found = failed(launch(log_dir=str(logs.parent)), "marker")
    finally:
        lab.node_run("nid002", ["umount", logs], 10)
    # found by Slurm's word: it lies in no usual place
    assert found["directory"].startswith(str(logs))


def test_a_killed_rank_script(launch, failed):
    job = launch()
    job.ready()
    os.kill(faults.find(job, "nid002", "/rank.sh"), signal.SIGKILL)
    found = failed(job, "step-ended")
    assert found["ranks"][1]["end"] == "Killed"


def test_an_end_with_status_0_while_serving(launch, failed):
    found = failed(launch(rank1="exit=0 after=6"), "rank-ended")
    assert found["verdict"].endswith("while serving")


def test_a_stall(launch, hub, failed):
    job = launch(rank0="hold", environ={"LLMHUB_MN_STALL_TIMEOUT": "8"})
    faults.ask(hub, job.ready()["url"])
    found = failed(job, "stalled")
    assert [m["text"] for m in found["timeline"]][-2] == "ready"


def test_a_restart(launch, diagnose):
    """The step of the restart is looked at, and the first attempt mentioned."""
    job = launch(environ={"LLMHUB_MN_MAX_RESTARTS": "1"})
    job.ready()
    os.kill(faults.find(job, "nid002", "/vllm serve"), signal.SIGKILL)
    deadline = time.monotonic() + 60
    while job.log("out").count("LLMHUB-READY") < 2:
        assert time.monotonic() < deadline, job.report()
        time.sleep(0.2)
    found = diagnose(job, DONE)
    assert found["attempts"] == ["attempt-0", "attempt-1"]
    assert found["step"] == {"nodes": 2, "spans_all": True, "source": "scontrol"}
    assert any(m["text"].startswith("restart rank 1") for m in found["timeline"])


def test_well_and_then_cancelled(launch, diagnose):
    """Neither is a failure."""
    job = launch()
    job.ready()
    found = diagnose(job, DONE)
    assert found["state"] == "ready" and "does not know" not in found["verdict"]
    assert found["step"] == {"nodes": 2, "spans_all": True, "source": "scontrol"}
    assert [rank["end"] for rank in found["ranks"]] == ["up", "up"]
    job.cancel()
    job.wait_gone(20)
    found = diagnose(job, DONE)
    assert found["verdict"] == "stopped on request, while it was serving"


@pytest.mark.slow
def test_the_time_limit(launch, diagnose):
    job = launch(time="00:01:00")
    job.ready()
    job.wait_gone(150)
    found = diagnose(job, FAILED)
    assert (found["state"], found["cause"]["id"]) == ("failed", "slurm-time-limit")
    assert found["verdict"] == "the time limit of the job ended it"


# ---------------------------------------------------------------- real vLLM


@pytest.fixture
def real(hub):
    """Launch the real engine; its jobs end with the test."""
    jobs = []

    def start(**options):
        jobs.append(hub.launch(**{"time": "00:30:00", **options}))
        return jobs[-1]

    yield start
    for job in jobs:
        job.cancel()
        job.wait_gone()


def test_a_missing_bind_path(real, failed):
    found = failed(real(bind="/nowhere/cache"), "bind-missing")
    assert "mount source /nowhere/cache" in found["ranks"][0]["lines"][0]["text"]


@pytest.mark.slow
def test_an_argument_that_vllm_does_not_know(real, failed):
    found = failed(real(vllm_args="--no-such-flag=1"), "unknown-argument")
    assert "unrecognized arguments: --no-such-flag" in str(found["ranks"])


@pytest.mark.slow
def test_a_model_path_that_the_container_does_not_have(real, failed):
    nowhere = {"hf_model": "/no/such/model", "model_weights_parent_dir": "/no/such"}
    found = failed(real(**nowhere), "model-path", limit=180)
    assert "'/no/such/model'" in str(found["ranks"])


@pytest.mark.slow
def test_a_kv_cache_that_is_too_small(real, failed):
    args = "--kv-cache-memory-bytes=1048576,--max-model-len=1024"
    failed(real(vllm_args=args), "kv-cache-small", limit=240)


@pytest.mark.slow
def test_no_line_of_a_job_that_is_well_is_telling(real, diagnose):
    job = real()
    job.ready()
    found = diagnose(job, DONE)
    assert [rank["lines"] for rank in found["ranks"]] == [[], []]


@pytest.mark.slow
def test_a_job_of_vec_infs_own(real, diagnose):
    job = real(model="tiny-llama-single", vllm_args="--no-such-flag=1")
    job.wait_gone(120)
    found = diagnose(job, FAILED)
    assert not found["ours"]
    assert found["cause"]["id"] == "unknown-argument"
