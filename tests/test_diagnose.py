"""Diagnosis: over directories that real runs of the scripts left, and over ruins."""

import json
import os
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import support
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from node import JOB_ID, MODEL, SERVE, STAY, JobCase, when_ready
from rich.console import Console

from app.utils.vec_inf_multinode import (
    JobDirectoryError,
    MultinodeClient,
)
from app.utils.vec_inf_multinode import diagnose as module
from app.utils.vec_inf_multinode import failures, jobdir, nccl, slurm
from app.utils.vec_inf_multinode.cli import common
from app.utils.vec_inf_multinode.cli import diagnose as command
from app.utils.vec_inf_multinode.cli import main
from app.utils.vec_inf_multinode.diagnose import diagnose
from app.utils.vec_inf_multinode.jobdir import JobDirectory
from app.utils.vec_inf_multinode.slurm import SlurmFacts

NAME = f"{MODEL}.{JOB_ID}"
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 896.00 MiB."
CXI_LOG = """\
nid001:401:401 [0] NCCL INFO Bootstrap: Using hsn0:172.28.86.10<0>
nid001:401:401 [0] NCCL INFO NCCL version 2.27.3+cuda12.9
nid001:401:466 [0] NCCL INFO NET/Plugin: Loaded net plugin AWS Libfabric (v10)
nid001:401:466 [0] NCCL INFO NET/OFI Initializing aws-ofi-nccl 1.19.0
nid001:401:466 [0] NCCL INFO NET/OFI Selected provider is cxi, fabric is cxi (found 4 nics)
nid001:401:466 [0] NCCL INFO Using network AWS Libfabric
nid001:401:466 [0] NCCL INFO NET/AWS Libfabric : GPU Direct RDMA Enabled for HCA 0 'cxi0'
nid001:401:466 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/IPC/read
nid001:401:466 [0] NCCL INFO Channel 00/0 : 4[0] -> 0[0] [receive] via NET/AWS Libfabric/0/GDRDMA/Shared
"""
SOCKET_LOG = """\
nid002:77:77 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.
nid002:77:80 [0] NCCL INFO NET/IB : No device found.
nid002:77:80 [0] NCCL INFO NET/Socket : Using [0]hsn0:172.28.86.11<0> [1]hsn1:172.28.86.12<0>
nid002:77:80 [0] NCCL INFO Using network Socket
nid002:77:80 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [receive] via NET/Socket/0
"""
IB_LOG = """\
gpu02:20868:20914 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB ib0:10.0.0.2<0>
gpu02:20868:20914 [0] NCCL INFO Using network IB
gpu02:20868:20914 [0] NCCL INFO Channel 07/0 : 6[6] -> 14[6] [send] via NET/IB/11/GDRDMA
gpu02:20868:20914 [0] NCCL INFO Channel 07/0 : 6[6] -> 14[6] [send] via NET/IB/11
"""

CRASH = f"echo 'INFO loading' >&2; echo '{OOM}' >&2; exit 1"
DIES_ONCE = (
    '[ -e "$STUB_ETC/died" ] && exec sleep 60; :>"$STUB_ETC/died"; sleep 3; exit 9'
)


def _again(run):
    run.wait_for(lambda: run.out.count("LLMHUB-READY") == 2)
    run.cancel()


# What really happened, and what a person should be told of it.
CASES = {
    "crash": JobCase(engines={0: STAY, 1: CRASH}),
    "no-word": JobCase(engines={0: STAY, 1: "echo 'a last word' >&2; exit 3"}),
    "cancelled": JobCase(during=when_ready),
    "no-gpus": JobCase(environ={"STUB_GPUS": "0"}),
    "no-fabric": JobCase(interfaces={"nid001": ("eth0 10.1.0.10/16",)}),
    "allocation": JobCase(environ={"SLURM_JOB_NUM_NODES": "1"}),
    "never-ready": JobCase(engines={0: STAY, 1: STAY}, knobs={"server_timeout": 2}),
    "restarted": JobCase(
        engines={0: SERVE, 1: DIES_ONCE}, knobs={"max_restarts": 1}, during=_again
    ),
}
EXPECTED = {
    "crash": (
        "failed",
        "rank 1 on nid002 exited with status 1 after ",
        "gpu-memory",
    ),
    "no-word": ("failed", "rank 1 on nid002 exited with status 3 after ", "rank-ended"),
    "cancelled": ("stopped", "stopped on request, while it was serving", None),
    "no-gpus": (
        "failed",
        # whichever says so first
        tuple(f"rank {k} on nid00{k + 1} has 1 GPU(s) (0), planned 4" for k in (0, 1)),
        "few-gpus",
    ),
    "no-fabric": ("failed", "no routable fabric IPv4 on nid001", "no-fabric"),
    "allocation": (
        "failed",
        "allocation has 1 node(s), expected 2",
        "nodes-changed",
    ),
    "never-ready": ("failed", "server not ready within 2s", "not-ready"),
    "restarted": ("stopped", "stopped on request, while it was serving", None),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Every case, run at once."""
    top = tmp_path_factory.mktemp("diagnose")
    with ThreadPoolExecutor(len(CASES)) as executor:
        yield {
            name: executor.submit(one.start, top / name / "root")
            for name, one in CASES.items()
        }


@pytest.fixture
def left(request, runs, tmp_path):
    """A copy of what a run left, as a directory of a job."""
    run = runs[request.param].result()
    return JobDirectory(Path(shutil.copytree(run.job_dir, tmp_path / "logs/f" / NAME)))


def of_case(*names):
    """Give a test what these runs left."""
    return pytest.mark.parametrize("left", names, indirect=True)


@pytest.mark.parametrize("left, name", list(zip(CASES, CASES)), indirect=["left"])
def test_verdict(left, name):
    state, verdict, cause = EXPECTED[name]
    found = diagnose(left)
    assert found.ours
    assert (found.state, found.cause and found.cause.id) == (state, cause)
    assert found.verdict.startswith(verdict)
    assert bool(found.advice) == (state == "failed")
    assert json.loads(json.dumps(found.as_dict()))["verdict"] == found.verdict


@of_case("crash")
def test_what_a_crash_left(left):
    found = diagnose(left)
    assert [(m.text, m.seconds >= 0) for m in found.timeline] == [
        ("submitted", True),
        ("started on nid[001-002]", True),
        *[(m.text, True) for m in found.timeline if m.text.startswith("rank ")],
        (f"failed: {found.verdict}", True),
    ]
    assert len(found.timeline) == 5
    assert found.topology["nnodes"] == "2"
    assert found.topology["interfaces"] == {"hsn0": "172.28.86.10/21"}
    assert found.topology["nccl_socket_ifname"] == "=hsn0"
    assert [(r.rank, r.node) for r in found.ranks] == [(0, "nid001"), (1, "nid002")]
    assert found.ranks[1].end.startswith("exited with status 1 after ")
    assert found.verdict.endswith("s: out of GPU memory")
    assert [line.text for line in found.ranks[1].lines] == [OOM]
    assert "told to stop" in found.ranks[0].end or found.ranks[0].end == "Killed"
    assert found.step == module.Step(2, True, "ranks")


@of_case("no-word")
def test_the_last_words_of_a_rank_without_a_known_failure(left):
    found = diagnose(left)
    assert [line.text for line in found.ranks[1].lines] == ["a last word"]
    assert found.ranks[0].lines == ()


@of_case("restarted")
def test_earlier_attempts_are_mentioned(left):
    found = diagnose(left)
    assert found.attempts == ("attempt-0", "attempt-1")
    restart = [m for m in found.timeline if m.text.startswith("restart ")]
    assert [m.attempt for m in restart] == ["attempt-0"]
    assert found.timeline[-1].text == "stopped"
    ups = [m.attempt for m in found.timeline if m.text.startswith("rank ")]
    assert ups == ["attempt-1", "attempt-1"]


# ---------------------------------------------------------------- with Slurm


def by_slurm(state, **more):
    """What Slurm says of a job."""
    return SlurmFacts({"JobState": state, **more})


@of_case("cancelled")
@pytest.mark.parametrize(
    "err, facts, state, cause",
    [
        ("DUE TO TIME LIMIT ***", SlurmFacts(), "failed", "slurm-time-limit"),
        ("DUE TO PREEMPTION ***", SlurmFacts(), "failed", "slurm-preempted"),
        ("DUE TO NODE FAILURE, SEE ***", None, "failed", "slurm-node-failure"),
        ("DUE TO JOB REQUEUE ***", None, "starting", None),
        ("***", None, "stopped", None),
        ("", by_slurm("TIMEOUT"), "failed", "slurm-time-limit"),
        ("", by_slurm("OUT_OF_MEMORY"), "failed", "slurm-memory"),
        ("", by_slurm("CANCELLED"), "stopped", None),
        ("", by_slurm("PENDING", Reason="BeginTime"), "starting", None),
    ],
)
def test_how_slurm_ended_it(left, err, facts, state, cause):
    if err:
        with left.file("err").open("a") as file:
            file.write(
                f"slurmstepd-nid001: error: *** JOB {JOB_ID} ON nid001 CANCELLED AT "
                f"2026-12-01T02:56:59 {err}\n"
            )
    found = diagnose(left, facts)
    assert (found.state, found.cause and found.cause.id) == (state, cause)


@of_case("cancelled")
@pytest.mark.parametrize(
    "job_state, state", [("RUNNING", "ready"), ("", "ready"), ("FAILED", "failed")]
)
def test_a_job_that_serves(left, job_state, state):
    timeline = left.attempts()[-1] / "timeline"
    timeline.write_text(timeline.read_text().replace("stopped", "noise"))
    facts = by_slurm(job_state, ExitCode="1:0") if job_state else None
    found = diagnose(left, facts)
    assert found.state == state
    assert ("Slurm does not know the job" in found.verdict) == (job_state == "")
    assert ("exit code 1:0" in found.verdict) == (job_state == "FAILED")


@of_case("crash")
def test_a_kill_for_memory_explains_what_follows_from_it(left):
    """Slurm's word goes before a rank's."""
    left.path.joinpath("ranks/rank-1.nid002.err").write_text("it died unexpectedly\n")
    record = left.failure()
    record["message"] = "rank 1 on nid002 exited with status 137 after 9s: gone"
    record["cause"] = "gone"
    left.path.joinpath("failure.json").write_text(json.dumps(record))
    with left.attempts()[-1].joinpath("step.log").open("a") as file:
        file.write(
            "1: slurmstepd: error: Detected 1 oom_kill event in StepId=4242.0. Some "
            "of the step tasks have been OOM Killed.\n"
        )
    found = diagnose(left)
    assert found.verdict == (
        "rank 1 on nid002 exited with status 137 after 9s: the memory limit of the "
        "job killed a process"
    )
    assert found.cause.id == "slurm-memory"


@of_case("crash")
def test_another_rank_may_know_why(left):
    """When the one that ended first has no known failure in its log."""
    for name, text in (("0.nid001", OOM), ("1.nid002", "nothing")):
        left.path.joinpath(f"ranks/rank-{name}.err").write_text(text)
    record = {**left.failure(), "cause": None}
    left.path.joinpath("failure.json").write_text(json.dumps(record))
    assert diagnose(left).cause.id == "gpu-memory"
    record.update(cause="stalled", message="no token for 9s with 1 request(s) waiting")
    left.path.joinpath("failure.json").write_text(json.dumps(record))
    assert diagnose(left).cause.id == "stalled"


@of_case("crash")
def test_without_failure_json(left):
    """A full disk may leave the error line only."""
    left.path.joinpath("failure.json").unlink()
    found = diagnose(left)
    assert (found.state, found.cause.id) == ("failed", "gpu-memory")


@of_case("crash")
@pytest.mark.parametrize(
    "nodes, spans", [("2", True), ("1", False), ("", True)], ids=repr
)
def test_the_best_witness_of_the_step(left, nodes, spans):
    facts = SlurmFacts({}, {"Nodes": nodes}, "scontrol")
    step = diagnose(left, facts).step
    assert (step.spans_all, step.source) == (spans, "scontrol" if nodes else "ranks")


def test_slurm_answers_are_read(tmp_path, monkeypatch):
    """Values with spaces, a command that fails, one that hangs, and none at all."""
    answers = {
        "scontrol": 'case "$2" in job) echo "JobId=7 JobName=my model-vec-inf '
        "JobState=RUNNING Reason=None CPUs/Task=2 ReqB:S:C:T=0:0:*:* "
        'StdOut=/logs/my dir/m.7/m.7.out Power="; echo ;; '
        '*) echo "StepId=7.0 UserId=1 Nodes=2 Tasks=2 NodeList=nid[001-002]";; esac',
        "sacct": "exit 1",
    }
    for name, script in answers.items():
        tmp_path.joinpath(name).write_text(f"#!/bin/bash\n{script}\n")
        tmp_path.joinpath(name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    facts = slurm.facts("7")
    assert facts.job["JobName"] == "my model-vec-inf"
    assert facts.job["StdOut"] == "/logs/my dir/m.7/m.7.out"
    assert (facts.step["Nodes"], facts.step_source) == ("2", "scontrol")
    tmp_path.joinpath("sacct").write_text(
        "#!/bin/bash\nprintf '7|3|1|x\\n7.batch|1|1|x\\n7.0|3|3|nid[001-003]\\n'\n"
    )
    facts = slurm.facts("7")
    assert (facts.step["Nodes"], facts.step_source) == ("3", "sacct")
    monkeypatch.setattr(slurm, "LIMIT", 0.2)
    tmp_path.joinpath("scontrol").write_text("#!/bin/bash\nexec sleep 5\n")
    assert slurm.show_job("7") == {}
    monkeypatch.setenv("PATH", "/nowhere")
    assert slurm.facts("7") == SlurmFacts()


# ---------------------------------------------------------------- NCCL


def transport_of(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    return nccl.transport(path)


def test_the_transport_of_each_process(tmp_path):
    cxi = transport_of(tmp_path, "nid001.401", CXI_LOG)
    assert cxi.words == "AWS Libfabric (cxi) on cxi0, GPUDirect"
    assert (cxi.host, cxi.pid, cxi.version) == ("nid001", "401", "2.27.3+cuda12.9")
    sockets = transport_of(tmp_path, "nid002.77", SOCKET_LOG)
    assert sockets.words == "Socket on hsn0,hsn1, no GPUDirect"
    assert sockets.fell_back
    infiniband = transport_of(tmp_path, "gpu02.local.20868", IB_LOG)
    assert infiniband.words == "IB on mlx5_0,mlx5_1, no GPUDirect"
    assert infiniband.host == "gpu02.local"
    assert transport_of(tmp_path, "nid001.1", CXI_LOG[:200]) is None


def test_odd_transports_are_warned_of(tmp_path):
    cxi = transport_of(tmp_path, "nid001.401", CXI_LOG)
    sockets = transport_of(tmp_path, "nid002.77", SOCKET_LOG)
    assert nccl.warnings([cxi, cxi]) == nccl.warnings([]) == []
    slow, different = nccl.warnings([cxi, sockets])
    assert slow.startswith("1 of 2 processes go over TCP sockets, on nid002 (NCCL's")
    assert "nid001: AWS Libfabric (cxi)" in different and "nid002: Socket" in different


@of_case("crash")
def test_nccl_logs_of_the_attempt(left):
    """Those of an earlier attempt are not this one's; a warning can be the cause."""
    logs = left.path / "nccl-debug"
    logs.joinpath("nid002.77").write_text(
        SOCKET_LOG + "nid002:77:80 [0] net.cc:626 NCCL WARN Error: network AWS "
        "Libfabric not found.\n"
    )
    logs.joinpath("nid001.9").write_text(CXI_LOG)
    os.utime(logs / "nid001.9", (1, 1))
    left.path.joinpath("ranks/rank-1.nid002.err").write_text("NCCL error: x\n")
    record = {**left.failure(), "cause": "NCCL failed"}
    left.path.joinpath("failure.json").write_text(json.dumps(record))
    found = diagnose(left)
    assert [one.host for one in found.transports] == ["nid002"]
    assert found.cause.id == "ofi-plugin"
    assert [line.failure for line in found.ranks[1].lines] == ["ofi-plugin", "nccl"]


# ---------------------------------------------------------------- not ours


@pytest.mark.parametrize(
    "err, facts, state, words",
    [
        (f"Traceback\n{OOM}\n", None, "failed", "out of GPU memory"),
        ("INFO:     Application startup complete.\n", "RUNNING", "ready", "is up"),
        ("INFO:     Application startup complete.\n", "", "unknown", "no known"),
        ("", "TIMEOUT", "failed", "the time limit of the job ended it"),
        (
            "slurmstepd: error: *** JOB 5 ON n1 CANCELLED AT 2026-12-01T02:56:59 ***",
            "CANCELLED",
            "stopped",
            "on request",
        ),
    ],
)
def test_a_job_of_vec_infs_own(tmp_path, err, facts, state, words):
    job = JobDirectory(tmp_path / "m.5")
    job.path.mkdir()
    job.file("err").write_text(err)
    job.file("sbatch").write_text("#!/bin/bash\nvllm serve\n")
    found = diagnose(job, by_slurm(facts) if facts else None)
    assert (found.ours, found.state) == (False, state)
    assert found.verdict.startswith("not a multi-node job of this package; ")
    assert words in found.verdict


# ---------------------------------------------------------------- ruins

FILES = (
    f"{NAME}.out",
    f"{NAME}.err",
    f"{NAME}.json",
    f"{NAME}.sbatch",
    "failure.json",
    "batch.log",
    "attempt-0/timeline",
    "attempt-0/step.log",
    "ranks/rank-0.nid001.err",
    "ranks/rank-1.nid002.out",
    "nccl-debug/nid001.12",
)
FRAGMENTS = (
    b"LLMHUB-TOPOLOGY: nnodes=",
    b"LLMHUB-STAGE-A: all ",
    b"LLMHUB-END rank=1 node=x status=9 seconds=1 at=1.5 stopping=0",
    # more digits than Python makes a number of
    b"LLMHUB-END rank=%b node=x status=0 seconds=1 at=1 stopping=1" % (b"9" * 5000),
    b"LLMHUB-REFUSED rank=0 node=a: b",
    b"srun: error: n: task 1: ",
    b"1796093816 rank 1 up on ",
    b"99999999999999999999 ready",
    b'{"message": {"a": [1]}, "rank": "x", "time": 1e999}',
    b'{"rank": 1, "time": -5, "cause": 7}',
    b"[" * 3000,
    b"NCCL INFO Using network Socket",
    b"NET/Socket : Using [0]",
    b"\n",
    b"\xff\x00\x1b[31m[bold]",
)
contents = st.lists(
    st.one_of(st.binary(max_size=60), st.sampled_from(FRAGMENTS)), max_size=8
).map(b"".join)


def ruin(root, files):
    """A job's directory with any bytes in its files."""
    job = JobDirectory(root / NAME)
    shutil.rmtree(job.path, ignore_errors=True)
    job.path.joinpath("attempt-0").mkdir(parents=True)
    for name, data in files.items():
        path = job.path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    return job


@settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(files=st.dictionaries(st.sampled_from(FILES), contents))
def test_any_bytes_are_diagnosed_and_shown(tmp_path, files):
    found = diagnose(ruin(tmp_path, files))
    json.dumps(found.as_dict())
    shown = shown_by(found, width=60)
    assert found.state.upper() in shown
    assert "\x1b" not in shown


def shown_by(found, **options):
    """What a person sees of a diagnosis, without a terminal."""
    console = Console(highlight=False, **options)
    with pytest.MonkeyPatch.context() as patch, console.capture() as capture:
        patch.setattr(common, "out", console)
        command.show(found)
    return capture.get()


def test_a_log_is_no_markup(tmp_path):
    job = ruin(
        tmp_path,
        {
            "ranks/rank-1.nid002.err": b"[red]x[/red] [/bold] CUDA out of memory\n",
            "failure.json": b'{"message": "[link=http://x]y", "rank": 1}',
        },
    )
    shown = shown_by(diagnose(job))
    assert "[red]x[/red] [/bold] CUDA out of memory" in shown
    assert "[link=http://x]y" in shown


def test_control_characters_of_a_log_are_not_passed_on(tmp_path):
    data = b"\x1b]0;title\x07\x1b[31mCUDA out of memory\x00\x08\r\n"
    job = ruin(tmp_path, {"ranks/rank-1.nid002.err": data})
    (line,) = diagnose(job).ranks[0].lines
    assert "CUDA out of memory" in line.text and line.text.isprintable()


def test_nor_are_those_of_a_name(tmp_path):
    data = b"NCCL INFO Using network \x1b[31mSocket\n"
    job = ruin(tmp_path, {"nccl-debug/nid\x1b[1m.12": data})
    assert "\x1b" not in shown_by(diagnose(job))


def test_a_huge_log_is_read_at_its_ends(tmp_path):
    """Bounded memory, and the telling line is found at either end."""
    job = ruin(tmp_path, {"attempt-0/timeline": b"1796093816 rank 0 up on nid001\n"})
    err = job.path / "ranks" / "rank-0.nid001.err"
    err.parent.mkdir()
    with err.open("wb") as file:
        file.write(OOM.encode() + b"\n")
        file.truncate(5 * 2**30)
        file.seek(0, os.SEEK_END)
        file.write(b"\nIllegal instruction\n")
    assert len(jobdir.read(err)) <= 2 * jobdir.EDGE + 1
    began = time.monotonic()
    (rank,) = diagnose(job).ranks
    assert [line.failure for line in rank.lines] == [
        "gpu-memory",
        "illegal-instruction",
    ]
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 9])
def test_the_ends_of_a_log(tmp_path, size, monkeypatch):
    """Nothing twice, nothing lost of what is not huge."""
    monkeypatch.setattr(jobdir, "EDGE", 2)
    path = tmp_path / "log"
    path.write_text("123456789"[:size])
    wanted = {5: "12\n45", 9: "12\n89"}
    assert jobdir.read(path) == wanted.get(size, "123456789"[:size])


@pytest.mark.timeout(10)
def test_what_is_no_file_is_empty(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "missing", "."):
        assert jobdir.read(tmp_path / name) == ""


@of_case("crash")
def test_a_directory_that_cannot_be_written_or_is_half_gone(left):
    for name in FILES:
        path = left.path / name.replace("-1.nid002.out", "-1.nid002.err")
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
            diagnose(left)
            path.unlink()
            diagnose(left)


# ---------------------------------------------------------------- at the shell


@pytest.fixture
def shell(login, monkeypatch, capsys):
    """Run the program on a submitting machine: status, stdout and stderr."""

    def run(*words):
        with pytest.raises(SystemExit) as left:
            main(["diagnose", *map(str, words)])
        return SimpleNamespace(status=left.value.code, **capsys.readouterr()._asdict())

    monkeypatch.setattr(common, "out", Console(highlight=False, width=80))
    return run


@of_case("crash")
def test_by_id_by_directory_and_as_json(left, shell, login):
    root = left.path.parent.parent
    for words in ([JOB_ID, "--log-dir", root], [left.path], [f"{left.path}/"]):
        done = shell(*words)
        assert (done.status, done.err) == (common.FAILED, "")
        assert done.out.startswith("FAILED  rank 1 on nid002 exited with status 1")
        assert f"    | {OOM}\n      out of GPU memory\n" in done.out
        assert "\x1b" not in done.out
    record = json.loads(shell(left.path, "--json-mode").out)
    assert (record["state"], record["cause"]["id"]) == ("failed", "gpu-memory")


@of_case("cancelled")
def test_slurm_knows_where(left, shell, login):
    """By the path of the job's stdout; an id that is another job's by now is not it."""
    login.answer(
        "scontrol.out", f"JobId={JOB_ID} JobState=PENDING StdOut={left.file('out')}"
    )
    assert shell(JOB_ID).out.startswith("STARTING  waiting in the queue (PENDING)")
    login.answer(
        "scontrol.out", f"JobId={JOB_ID} JobState=PENDING StdOut=/other/m.1/m.1.out"
    )
    done = shell(left.path)
    assert (done.status, done.out.split()[0]) == (common.DONE, "STOPPED")


@pytest.mark.parametrize("words", [["999"], ["/no/such/m.5"], ["no-such"], ["\0"]])
def test_no_such_job(shell, login, words):
    done = shell(*words, "--log-dir", login.logs)
    assert (done.status, done.out) == (common.BAD_INPUT, "")
    assert words[0].strip("\0") in done.err and "Traceback" not in done.err


@pytest.mark.parametrize("closed", ["job", "family", "above"])
def test_what_another_user_closed(shell, monkeypatch, closed):
    """Neither shown nor a traceback, whichever directory of the path is closed."""
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as top:  # pytest's own are one user's alone
        root = Path(top) / "above" / "logs"
        path = root / "family" / NAME
        path.mkdir(parents=True)
        out = {"StdOut": str(path / f"{NAME}.out")}
        monkeypatch.setattr(slurm, "show_job", lambda job_id: out)
        of = {"job": path, "family": path.parent, "above": root.parent}[closed]
        os.chmod(top, 0o755)
        os.chmod(of, 0)
        try:
            if user == 0:  # whom no mode keeps out
                os.seteuid(65534)
            by_path, by_id = shell(path), shell(JOB_ID, "--log-dir", root)
        finally:
            os.seteuid(user)
            os.chmod(of, 0o755)
    assert (by_path.status, by_id.status) == (common.BAD_INPUT, common.BAD_INPUT)
    assert f"{path} is no directory that you can read." in by_path.err
    assert f"Job {JOB_ID} has no directory here: {path} cannot be read" in by_id.err


def test_the_logs_of_vec_inf_are_the_default(shell, monkeypatch, login):
    """As its configuration says."""
    job = ruin(login.home / "logs" / "family", {})
    assert str(job.path) in shell(JOB_ID).out


@of_case("crash")
def test_for_users_of_python(left, login):
    client = MultinodeClient()
    found = client.diagnose(JOB_ID, log_dir=left.path.parent.parent)
    assert (found.state, found.cause.id) == ("failed", "gpu-memory")
    for wrong in ("999", "../x", ""):
        with pytest.raises(JobDirectoryError):
            client.diagnose(wrong, log_dir=login.logs)


@of_case("no-word")
def test_a_sites_own_failures(left, shell, tmp_path, monkeypatch):
    path = tmp_path / "failures.yaml"
    path.write_text(
        "failures: [{id: site, pattern: a last w, verdict: known here, advice: ask}]"
    )
    monkeypatch.setenv("LLMHUB_MN_FAILURES", str(path))
    assert ": known here\n" in shell(left.path).out
    path.unlink()
    failures.load.cache_clear()
    assert shell(left.path).status == common.REFUSED


def test_the_help_has_an_example():
    done = subprocess.run(
        [
            os.path.join(os.path.dirname(os.sys.executable), "vec-inf-multinode"),
            "diagnose",
            "--help",
        ],
        cwd=support.TREE,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "vec-inf-multinode diagnose 4711" in done.stdout


@of_case("cancelled")
def test_no_rank_of_a_job_that_is_over_is_called_up(left):
    found = diagnose(left)
    assert found.state == "stopped" and len(found.ranks) == 2
    assert "up" not in {rank.end for rank in found.ranks}


@of_case("cancelled")
def test_the_version_and_the_budget_of_a_job_that_is_well(left):
    with left.file("out").open("a") as out:
        out.write("LLMHUB-TOPOLOGY: vllm 0.32.0+cpu\nLLMHUB-WARN: budget 9s exceeds\n")
    found = diagnose(left)
    assert found.topology["vllm"] == "0.32.0+cpu"
    assert not any("budget" in warning for warning in found.warnings)
