"""What a job says when ranks die, hang or lie, on the real Slurm and Apptainer.

A stand-in engine takes vLLM's place, so that each fault costs seconds.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from app.utils.vec_inf_multinode.plan import MIN_VLLM

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300)]

STANDIN = Path(__file__).with_name("lab") / "standin"


@pytest.fixture
def launch(lab, hub):
    """Return a function that launches over the stand-in; its jobs end with the test."""
    shutil.copytree(STANDIN, lab.dir / "standin", dirs_exist_ok=True)
    jobs = []

    def start(rank0="", rank1="", environ=None, env="", **options):
        words = [f"STANDIN_RANK0={rank0}", f"STANDIN_RANK1={rank1}", env]
        words.append(f"PATH={lab.dir}/standin:/usr/bin:/bin")
        job = hub.launch(
            env=",".join(word for word in words if word),
            bind=str(lab.dir / "standin"),
            cpus_per_task=2,
            mem_per_node="1G",
            environ=environ,
            **{"time": "00:30:00", **options},
        )
        jobs.append(job)
        return job

    yield start
    for job in jobs:
        job.cancel()
    for job in jobs:
        job.wait_gone()
        if len(jobs) < 5:
            print(f"job {job.number}: {job.story()}")


def failure(job):
    """The job's own record of its failure."""
    return json.loads((job.log_dir / "failure.json").read_text())


def errors(job):
    """The error lines that vec-inf reads."""
    lines = job.log("err").splitlines()
    return [line for line in lines if line.startswith("LLMHUB-ERROR")]


def find(job, node, text):
    """Process id of the job's process on a node whose command line holds a text."""
    found = [
        pid for where, pid, line in job.processes() if where == node and text in line
    ]
    assert found, f"no {text} on {node}: {job.processes()}"
    return found[0]


@pytest.mark.parametrize(
    ("rank", "status"), [(1, 0), (1, 1), (0, 0), (0, 3)], ids=lambda value: str(value)
)
def test_a_rank_that_ends_in_start_up_fails_the_job(launch, rank, status):
    """Any status, 0 included, before ready."""
    words = {"rank0": "ready=never", "rank1": "ready=never"}
    words[f"rank{rank}"] += f" exit={status} after=2"
    job = launch(**words)
    reason = f"LLMHUB-ERROR: rank {rank} on nid00{rank + 1} exited with status {status}"
    assert job.failed().startswith(reason)
    job.wait_gone(10)
    assert job.state() == "FAILED"
    assert [line.startswith(reason) for line in errors(job)] == [True]
    assert (failure(job)["rank"], failure(job)["status"]) == (rank, status)
    ours = job.status(ours=True)
    assert (ours["server"], ours["reason"]) == ("FAILED", errors(job)[0])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_ends_while_serving_ends_the_job_in_5_s(launch, rank):
    """Status 0 after ready: the job is over on all nodes within 5 s of it."""
    job = launch(**{f"rank{rank}": "exit=0 after=6"})
    job.ready()
    job.wait_gone(30)
    ended = re.search(r"status=0 .* at=([\d.]+) stopping=0", step_log(job))
    assert failure(job)["time"] - float(ended[1]) < 5
    assert "while serving" in errors(job)[0]
    assert job.status(ours=True)["server"] == "FAILED"


def step_log(job):
    """What srun and the rank scripts said."""
    return "".join(p.read_text() for p in sorted(job.log_dir.glob("*/step.log")))


def test_a_vllm_that_is_too_old_is_refused(hub, lab):
    """In seconds, by the metadata in the container; rank 0's engine is not started."""
    place = lab.dir / "old-vllm"
    site = place / "lib/python3.12/site-packages/vllm-0.11.0.dist-info"
    site.mkdir(parents=True, exist_ok=True)
    shutil.copytree(STANDIN, place / "bin", dirs_exist_ok=True)
    job = hub.launch(
        env=f"PATH={place}/bin:/usr/bin:/bin", bind=str(place), time="00:05:00"
    )
    try:
        reason = job.failed(30)
        assert reason.startswith(f"LLMHUB-ERROR: vLLM 0.11.0 in {lab.image} cannot")
        assert f"the first version that can is {MIN_VLLM}" in reason
        job.wait_gone(10)
        timeline = (job.log_dir / "attempt-0" / "timeline").read_text()
        assert failure(job)["time"] - int(timeline.split()[0]) < 6
        assert not list(job.log_dir.glob("ranks/rank-0.*"))
    finally:
        job.cancel()


def test_benign_lines_do_not_fail_a_healthy_job(launch):
    """2,000 lines with every phrase of vec-inf's list on each rank's stderr."""
    job = launch(rank0="noise=2000", rank1="noise=2000")
    job.ready()
    assert job.log("err") == "INFO:     Application startup complete.\n"
    for log in job.log_dir.glob("ranks/*.err"):
        assert log.read_text().count("libfabric") == 2000


def test_the_rank_with_a_cause_is_named(launch):
    """Of two that end within a second, the one whose log holds a cause wins."""
    end = time.time() + 15
    job = launch(
        rank0=f"ready=never exit=1 at={end}",
        rank1=f"exit=1 at={end + 0.4} say=torch.OutOfMemoryError:_CUDA_out_of_memory.",
    )
    job.failed(60)
    assert errors(job) == [
        f"LLMHUB-ERROR: rank 1 on nid002 exited with status 1 after "
        f"{failure(job)['seconds']}s: out of GPU memory"
    ]
    tail = [line for line in job.log("err").splitlines() if "LLMHUB-TAIL" in line]
    assert "CUDA out of memory" in tail[-1]


def test_the_reason_survives_a_traceback_in_the_tail(launch):
    """vec-inf's reason is the error line, whatever the rank's stderr ends with."""
    job = launch(rank1="exit=1 after=2 noise=30", rank0="ready=never")
    reason = job.failed(60)
    assert reason.startswith("LLMHUB-ERROR: rank 1 on nid002")


def slurmd(lab, node):
    """Process id of a node's slurmd."""
    for process in lab.node_processes(node, user=False):
        if process.cmdline[0].endswith("slurmd"):
            return process.pid
    pids = subprocess.run(
        ["pgrep", "-f", f"slurmd.*{node}"], capture_output=True, text=True, timeout=10
    ).stdout.split()
    for pid in pids:
        if Path(f"/proc/{pid}/comm").read_text().strip() == "slurmd":
            return int(pid)
    raise AssertionError(f"no slurmd of {node}")


@pytest.fixture
def frozen_node(lab):
    """nid002, whose slurmd takes no step until the test lets it."""
    pid = slurmd(lab, "nid002")
    os.kill(pid, signal.SIGSTOP)
    yield lambda: os.kill(pid, signal.SIGCONT)
    os.kill(pid, signal.SIGCONT)


@pytest.fixture
def slow_node(lab):
    """nid002, on which a task starts only once the site's prolog lets it."""
    prolog = lab.dir / "etc" / "task_prolog.sh"
    text, gate = prolog.read_text(), lab.dir / "run" / "gate"
    wait = (
        f'while [ "$SLURMD_NODENAME" = nid002 ] && [ ! -e {gate} ]; do sleep 0.1; done'
    )
    prolog.write_text(f"{text}{wait}\n")
    yield gate.touch
    prolog.write_text(text)
    gate.unlink(missing_ok=True)


def test_a_late_rank_comes_up(launch, slow_node):
    """A rank that starts 60 s late is waited for."""
    job = launch(environ={"LLMHUB_MN_RANK_START_TIMEOUT": "90"})
    deadline = time.monotonic() + 30
    while "rank 0 up" not in job.log("out"):
        assert time.monotonic() < deadline, job.report()
        time.sleep(0.1)
    time.sleep(60)
    assert "all 2 ranks launched" not in job.log("out")
    slow_node()
    job.ready(30)
    assert "LLMHUB-STAGE-A: rank 1 up on nid002" in job.log("out")


def test_a_rank_that_never_starts_is_said(launch, frozen_node):
    """The budget ends the job, vec-inf says FAILED, DIAG lines tell what was seen."""
    job = launch(environ={"LLMHUB_MN_RANK_START_TIMEOUT": "8"})
    reason = job.failed(90)
    assert "only 1 of 2 ranks started within 8s, without rank 1 on nid002" in reason
    frozen_node()
    diagnosis = [line for line in job.log("out").splitlines() if "LLMHUB-DIAG" in line]
    assert "LLMHUB-DIAG: ranks seen: 0" in diagnosis
    job.wait_gone(60)


def test_a_node_that_does_not_answer_slurm_is_named(launch, frozen_node):
    """srun gives up on it before our budget is over, and kills the other rank."""
    job = launch()
    reason = job.failed(120)
    assert "Slurm could not start the task on nid002" in reason
    assert failure(job)["node"] == "nid002"
    frozen_node()
    job.wait_gone(60)


def test_a_server_that_is_never_ready_is_said(launch):
    """The readiness budget ends the job."""
    job = launch(rank0="ready=never", environ={"LLMHUB_MN_SERVER_TIMEOUT": "5"})
    reason = job.failed(60)
    assert "server not ready within 5s" in reason
    job.wait_gone(10)


def test_the_budget_is_clamped_to_the_walltime(launch):
    """90 % of what remains of the walltime, with a warning."""
    job = launch(time="00:02:00")
    job.ready()
    clamp = re.search(
        r"LLMHUB-WARN: budget 1800s exceeds the allocation; clamping to (\d+)s",
        job.log("out"),
    )
    assert 90 <= int(clamp[1]) <= 108


@pytest.mark.parametrize("code", [500, 404])
def test_ready_means_an_answered_completion(launch, code):
    """A 5xx is not ready; a 4xx is alive, with a warning."""
    job = launch(rank0=f"code={code}", environ={"LLMHUB_MN_SERVER_TIMEOUT": "8"})
    if code == 500:
        assert "not ready" in job.failed(60)
    else:
        job.ready()
        assert "answers the readiness request with HTTP 404" in job.log("out")


def test_a_killed_rank_script_fails_the_job(launch):
    """kill -9 of slurmstepd's child, the rank script itself."""
    job = launch()
    job.ready()
    os.kill(find(job, "nid002", "/rank.sh"), signal.SIGKILL)
    job.wait_gone(40)
    assert "rank 1 on nid002: Killed" in errors(job)[0]
    assert (failure(job)["rank"], failure(job)["node"]) == (1, "nid002")
    assert job.status(ours=True)["server"] == "FAILED"


def test_a_signal_that_only_one_node_got_fails_the_job(launch):
    """TERM to one rank script: its engine ends with 0, and nobody cancelled the job."""
    job = launch()
    job.ready()
    os.kill(find(job, "nid002", "/rank.sh"), signal.SIGTERM)
    job.wait_gone(20)
    assert "rank 1 on nid002: Exited with exit code 143" in errors(job)[0]
    assert job.status(ours=True)["server"] == "FAILED"


def test_scancel_leaves_no_error_line(launch):
    """Cancelled while starting and while serving: nothing left, nothing blamed."""
    for wait in (lambda job: job.wait_for({"LAUNCHING"}, 60), lambda job: job.ready()):
        job = launch()
        wait(job)
        job.cancel()
        job.wait_gone(20)
        assert not errors(job)
        assert not (job.log_dir / "failure.json").exists()


@pytest.mark.parametrize("moment", ["starting", "READY"])
def test_a_requeued_job_comes_up_again(launch, lab, moment):
    """The second attempt is READY at its own address, whenever it is requeued."""
    job = launch(rank0="ready=4")
    first = job.ready()["url"] if moment == "READY" else None
    while "all 2 ranks launched" not in job.log("out"):
        time.sleep(0.2)
    lab.run(["scontrol", "requeue", job.number], timeout=20)
    deadline = time.monotonic() + 90
    kept = job.log_dir / "ranks.before-attempt-1"
    while not kept.exists() or "LLMHUB-READY" not in job.log("out"):
        assert time.monotonic() < deadline, job.report()
        time.sleep(0.5)
    second = job.ready(90)["url"]
    assert second != first and second in job.log("out")
    assert not errors(job)
    assert sorted(path.name for path in job.log_dir.glob("ranks*")) == [
        "ranks",
        "ranks.before-attempt-1",
    ]


def master_port(job):
    """Rendezvous port of the job."""
    return int(re.search(r"master=[\d.]+:(\d+)", job.log("out"))[1])


def test_two_jobs_share_the_nodes(launch):
    """Both come up, on different ports."""
    jobs = [launch(), launch()]
    for job in jobs:
        job.ready()
    assert len({master_port(job) for job in jobs}) == 2
    for job in jobs:
        job.cancel()


def test_a_taken_rendezvous_port_is_passed_over(launch, lab):
    """A listener on the only other port leaves one choice."""
    base = 29700
    taken = lab.node_run(
        "nid001",
        [
            "bash",
            "-c",
            f"nohup nc -lk 0.0.0.0 {base} >/dev/null 2>&1 & echo $!",
        ],
        timeout=10,
    )
    knobs = {"LLMHUB_MN_RDZV_PORT": str(base), "LLMHUB_MN_PORT_SCAN_MAX": "1"}
    try:
        jobs = []
        for _ in range(2):
            jobs.append(launch(environ=knobs))
            jobs[-1].ready()
            assert master_port(jobs[-1]) == base + 1
            jobs[-1].cancel()
            jobs[-1].wait_gone(20)
    finally:
        lab.node_run("nid001", ["kill", taken.stdout.strip()], timeout=10)


@pytest.fixture
def other_fabric(lab):
    """An xsn0 on nid001 only; nid002 has just a VLAN child of that name."""
    for node, name in (("nid001", "xsn0"), ("nid002", "xsn0.561")):
        address = "10.78.0.1/24" if node == "nid001" else "10.79.0.2/24"
        pair = ["ip", "link", "add", name, "type", "veth", "peer", "name", "other"]
        lab.node_run(node, pair, 10)
        lab.node_run(node, ["ip", "addr", "add", address, "dev", name], 10)
        lab.node_run(node, ["ip", "link", "set", name, "up"], 10)
    yield
    for node, name in (("nid001", "xsn0"), ("nid002", "xsn0.561")):
        lab.node_run(node, ["ip", "link", "del", name], 10)


def test_a_missing_fabric_interface_is_said(launch, other_fabric):
    """Rank 1 has no fabric, or only a VLAN child: named, and at once."""
    job = launch(environ={"LLMHUB_MN_HSN_IFACE": "xsn"})
    reason = job.failed(60)
    assert "no routable fabric IPv4 on nid002" in reason
    job.wait_gone(20)


def test_no_fabric_on_the_head_node_is_said(launch):
    """Nothing is started without a master address."""
    job = launch(environ={"LLMHUB_MN_HSN_IFACE": "ib"})
    reason = job.failed(60)
    assert "no routable fabric IPv4 on nid001" in reason


def test_a_job_directory_that_rank_1_cannot_write_is_said(launch, lab):
    """A log directory that is read-only on one node."""
    logs = lab.home / "read-only" / "tiny-llama"
    lab.run(["mkdir", "-p", logs], timeout=10)
    lab.node_run("nid002", ["mount", "--bind", logs, logs], 10)
    lab.node_run("nid002", ["mount", "-o", "remount,ro,bind", logs], 10)
    try:
        job = launch(log_dir=str(logs.parent))
        reason = job.failed(60)
        assert re.search("rank 1 on nid002 cannot write .*/started/1", reason)
        job.wait_gone(20)
    finally:
        lab.node_run("nid002", ["umount", logs], 10)


def test_a_missing_image_on_rank_1_is_said(launch, lab):
    """The image is not there on one node."""
    lab.node_run("nid002", ["mount", "-t", "tmpfs", "tmpfs", lab.image], 10)
    try:
        job = launch(rank0="ready=never")
        reason = job.failed(60)
        assert re.search(r"rank 1 on nid002 exited with status 255", reason)
        job.wait_gone(20)
    finally:
        lab.node_run("nid002", ["umount", lab.image], 10)


def test_fewer_gpus_than_planned_is_said(launch):
    """Something changed --gres after planning."""
    job = launch(gpus_per_node=2, environ={"SBATCH_GRES": "gpu:1"})
    reason = job.failed(60)
    assert "has 1 GPU(s) (0), planned 2" in reason
    job.wait_gone(20)


def test_an_outer_job_changes_nothing(launch, lab):
    """Submitted with the variables of an outer job around."""
    outer = {
        "SLURM_MEM_PER_CPU": "100",
        "SLURM_CPU_BIND": "mask_cpu:0x1",
        "SLURM_CPU_BIND_TYPE": "mask_cpu:",
        "SLURM_GPUS_PER_TASK": "3",
        "SLURM_HINT": "nomultithread",
        "SLURM_THREADS_PER_CORE": "1",
        "SLURM_EXACT": "1",
        "SLURM_NTASKS": "7",
        "SLURM_DISTRIBUTION": "cyclic",
        "SLURM_JOB_ID": "4711",
        "SLURM_EXPORT_ENV": "NONE",
    }
    job = launch(environ=outer)
    job.ready()
    step = lab.run(["scontrol", "show", "step", f"{job.number}.0"], timeout=20).stdout
    assert re.search(r"Nodes=2 CPUs=4 Tasks=2", step)


def test_a_stall_ends_the_job(launch, hub):
    """Requests run and no token comes: the job ends with that reason."""
    job = launch(rank0="hold", environ={"LLMHUB_MN_STALL_TIMEOUT": "8"})
    url = job.ready()["url"]
    ask(hub, url)
    job.wait_gone(60)
    assert re.search(r"no token for \d+s with 1 request", errors(job)[0])
    assert job.status(ours=True)["server"] == "FAILED"


def ask(hub, url):
    """Send a completion and leave it."""
    with pytest.raises(Exception, match="[Tt]imed? ?out"):
        hub.request("POST", f"{url}/completions", json={"prompt": "x"}, timeout=1)


def test_a_slow_or_idle_server_is_no_stall(launch, hub):
    """A request that takes long while counters move, and an idle server."""
    slow = launch(rank0="slow", environ={"LLMHUB_MN_STALL_TIMEOUT": "4"})
    idle = launch(environ={"LLMHUB_MN_STALL_TIMEOUT": "4"})
    ask(hub, slow.ready()["url"])
    idle.ready()
    time.sleep(15)
    for job in (slow, idle):
        assert job.state() == "RUNNING"
        job.cancel()


def test_an_idle_probe_finds_a_dead_server(launch):
    """Nobody asks, the probe does."""
    job = launch(rank0="hold", environ={"LLMHUB_MN_IDLE_PROBE": "3"})
    job.ready()
    job.wait_gone(60)
    assert "the idle server did not answer" in errors(job)[0]


def test_a_restart_serves_again_at_the_same_address(launch):
    """Once, with a line that says why; the second failure ends the job."""
    job = launch(environ={"LLMHUB_MN_MAX_RESTARTS": "1"})
    before = job.ready()
    old_port = master_port(job)
    os.kill(find(job, "nid002", "/vllm serve"), signal.SIGKILL)
    deadline = time.monotonic() + 60
    while job.log("out").count("LLMHUB-READY") < 2:
        assert time.monotonic() < deadline, job.report()
        time.sleep(0.2)
    assert job.ready()["url"] == before["url"]
    restart = re.search("LLMHUB-RESTART: 1 of 1: (.*)", job.log("out"))[1]
    assert restart.startswith("rank 1 on nid002 exited with status 137")
    ports = [int(p) for p in re.findall(r"master=[\d.]+:(\d+)", job.log("out"))]
    assert len(ports) == 2 and ports[0] == old_port != ports[1]
    assert not errors(job)
    os.kill(find(job, "nid002", "/vllm serve"), signal.SIGKILL)
    job.wait_gone(30)
    assert len(errors(job)) == 1


def test_a_step_that_was_not_ready_is_not_restarted(launch):
    """A failure in start-up ends the job whatever the knob says."""
    job = launch(
        rank0="ready=never",
        rank1="exit=1 after=2",
        environ={"LLMHUB_MN_MAX_RESTARTS": "3"},
    )
    job.failed(60)
    job.wait_gone(20)
    assert "LLMHUB-RESTART" not in job.log("out")


@pytest.mark.parametrize("failing", [6, 1000], ids=["for a while", "for ever"])
def test_the_address_is_published_or_the_job_fails(launch, lab, failing):
    """The JSON update fails as on a stale file handle, then works, or never does."""
    tools = lab.home / f"jq-{failing}"
    script = (
        f"#!/bin/bash\nn=$(cat {tools}/n 2>/dev/null || echo 0)\n"
        f'case "$*" in *server_add*) echo $((n + 1)) >{tools}/n\n'
        f'[ "$n" -ge {failing} ] || exit 5 ;; esac\nexec /usr/bin/jq "$@"\n'
    )
    lab.run(
        ["bash", "-c", f"mkdir -p {tools}; cat >{tools}/jq; chmod +x {tools}/jq"],
        timeout=10,
        input=script,
    )
    job = launch(environ={"PATH": f"{tools}:{lab.client_env()['PATH']}"})
    if failing == 6:
        job.ready(90)
    else:
        reason = job.failed(120)
        assert "could not write the server address" in reason


@pytest.mark.slow
def test_the_walltime_ends_the_job_without_an_error_line(launch):
    """Slurm ends it: nothing is left, nobody is blamed."""
    job = launch(time="00:01:00")
    job.ready()
    job.wait_gone(150)
    assert job.state() == "TIMEOUT"
    assert not errors(job) and not (job.log_dir / "failure.json").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_hundred_launches_lose_nothing(launch):
    """A job that starts at once has its log, JSON and address all the same."""
    jobs = [launch(rank0="exit=0 after=0", rank1="ready=never") for _ in range(100)]
    for job in jobs:
        job.wait_gone(300)
    assert len({job.number for job in jobs}) == 100
    for job in jobs:
        fields = json.loads((job.log_dir / f"tiny-llama.{job.number}.json").read_text())
        assert fields["slurm_job_id"] == job.number
        assert fields["server_address"].startswith("http://nid001:")
        assert "LLMHUB-STAGE-A: all 2 ranks launched" in job.log("out")
        assert len(errors(job)) == 1
