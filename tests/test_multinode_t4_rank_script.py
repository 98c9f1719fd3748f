"""T4: the shipped rank and batch scripts, really run on nodes made of stand-ins.

Each test names the run that it judges in a `case`; the runs of a session start
together, so that their waits overlap.
"""

import json
import os
import re
import signal
import stat
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from node import (
    IMAGE,
    IMAGE_SITE,
    INTERFACES,
    JOB_ID,
    MASTER,
    MODEL,
    SERVE,
    SRC_DIR,
    STAY,
    STUBS,
    TOOLS,
    Case,
    JobCase,
    JobRun,
    Node,
    RankCase,
    rendezvous_base,
    watch_argv,
    when_ready,
)
from vec_inf.client.models import ModelStatus

from app.utils.vec_inf_multinode.jobdir import JobDirectory

SECRET = "hf_PrettySecretToken"
REFUSAL = (
    "no routable fabric IPv4 on nid001 (rank 0): no interface hsn<n> has one; "
    "set LLMHUB_MN_HSN_IFACE"
)


@pytest.fixture(scope="module")
def pool(request, tmp_path_factory):
    """Start the run of every selected test of this module."""
    cases = [
        item.callspec.params["run"]
        for item in request.session.items
        if item.module is request.module and hasattr(item, "callspec")
    ]
    # the long ones first
    cases = sorted(
        set(cases), key=lambda case: (isinstance(case, RankCase), case.during is None)
    )
    top = tmp_path_factory.mktemp("t4")
    with ThreadPoolExecutor(10) as executor:
        yield {
            case: executor.submit(case.start, top / str(number) / "root")
            for number, case in enumerate(cases)
        }
        executor.shutdown(cancel_futures=True)


@pytest.fixture
def run(request, pool):
    """Return the finished run of this test's case."""
    return pool[request.param].result()


def case(one: Case):
    """Give a test one run."""
    return pytest.mark.parametrize("run", [one], indirect=True, ids=["run"])


def cases(names: str, table: dict[str, tuple]):
    """Give a test one run for each row; the run is the first item."""
    return pytest.mark.parametrize(
        f"run, {names}", table.values(), ids=table.keys(), indirect=["run"]
    )


# ---------------------------------------------------------------- rank -> flags


ENGINE_ARGS = {
    "--tensor-parallel-size": 4,
    "--pipeline-parallel-size": 2,
    "--max-model-len": "2048",
    "--trust-remote-code": True,
    "--enforce-eager": False,
    "--hf-overrides": '{"rope": [1, 2]}',
}


def expected_argv(run, rank_flags, rank):
    """Whole argv of a rank's container."""
    engine = ["--tensor-parallel-size", "4", "--pipeline-parallel-size", "2"]
    engine += ["--max-model-len", "2048", "--trust-remote-code"]
    engine += ["--hf-overrides", '{"rope": [1, 2]}']
    weights = f"{run.root}/weights/{MODEL}"
    return [
        *("exec", "--nv", "--containall", IMAGE),
        *("env", "-u", "FI_LOG_LEVEL", "vllm", "serve", weights),
        *rank_flags,
        *engine,
        *("--nnodes", "2", "--node-rank", str(rank)),
        *("--master-addr", MASTER, "--master-port", "29500"),
        *("--distributed-executor-backend", "mp"),
    ]


@case(RankCase(rank=0, params={"engine_args": ENGINE_ARGS}))
def test_rank_0_serves(run):
    """Rank 0 has the name, host and port of the server."""
    flags = ["--served-model-name", MODEL, "--host", "0.0.0.0", "--port", "8080"]
    assert run.container.text == expected_argv(run, flags, 0)


@case(RankCase(rank=1, params={"engine_args": ENGINE_ARGS}))
def test_other_ranks_are_headless(run):
    """The others have no server."""
    assert run.container.text == expected_argv(run, ["--headless"], 1)


@case(RankCase(params={"hf_model": "org/model"}))
def test_hf_model_is_served_by_its_id(run):
    """An id of the Hugging Face hub goes to vllm as it is."""
    assert run.container.text[8:10] == ["serve", "org/model"]


# ---------------------------------------------------------------- fabric


def on_head(*interfaces, **more):
    """A rank 0 whose node has these interfaces."""
    return RankCase(interfaces={"nid001": interfaces}, **more)


@cases(
    "nccl, gloo",
    {
        "vlan-child-first": (
            on_head("hsn0.561 10.9.0.5/24", f"hsn0 {MASTER}/21"),
            "=hsn0",
            "hsn0",
        ),
        "vlan-child-with-parent": (
            on_head("hsn0.561@hsn0 10.9.0.5/24", f"hsn0@if7 {MASTER}/21"),
            "=hsn0",
            "hsn0",
        ),
        "by-number": (
            on_head("hsn10 10.2.0.10/24", "hsn2 10.2.0.2/24", f"hsn1 {MASTER}/21"),
            "=hsn1,hsn2,hsn10",
            "hsn1",
        ),
        "link-local": (
            on_head("hsn0 169.254.7.7/16", f"hsn1 {MASTER}/21"),
            "=hsn1",
            "hsn1",
        ),
        "loopback-address": (
            on_head("hsn0 127.0.0.2/8", f"hsn1 {MASTER}/21"),
            "=hsn1",
            "hsn1",
        ),
        "second-address": (
            on_head(f"hsn0 {MASTER}/21", "hsn0 10.2.0.2/24"),
            "=hsn0",
            "hsn0",
        ),
        "alike-names": (
            on_head("hsnx0 10.2.0.1/24", "xhsn0 10.2.0.2/24", f"hsn3 {MASTER}/21"),
            "=hsn3",
            "hsn3",
        ),
        "no-number": (
            on_head("hsn 10.2.0.1/24", f"hsn3 {MASTER}/21"),
            "=hsn3",
            "hsn3",
        ),
        "master-on-second": (
            on_head("hsn0 10.2.0.1/24", f"hsn1 {MASTER}/21"),
            "=hsn0,hsn1",
            "hsn1",
        ),
        "other-prefix": (
            on_head("hsn0 10.2.0.1/24", f"ib0 {MASTER}/21", knobs={"hsn_iface": "ib"}),
            "=ib0",
            "ib0",
        ),
        "prefix-is-no-pattern": (
            on_head(
                "exp0 10.2.0.1/24", f"e.p0 {MASTER}/21", knobs={"hsn_iface": "e.p"}
            ),
            "=e.p0",
            "e.p0",
        ),
        "override": (
            on_head(
                f"hsn0 {MASTER}/21",
                "hsn1 10.2.0.1/24",
                knobs={"nccl_socket_ifname": "^eth0"},
            ),
            "^eth0",
            "hsn0",
        ),
    },
)
def test_fabric(run, nccl, gloo):
    """Interfaces are those named exactly <prefix><digits>, lowest number first."""
    assert run.container.container_env("NCCL_SOCKET_IFNAME") == nccl
    assert run.container.container_env("GLOO_SOCKET_IFNAME") == gloo
    assert run.container.container_env("VLLM_HOST_IP") == MASTER


@case(RankCase(rank=1))
def test_other_rank_has_its_own_address(run):
    """A rank's address is its own node's."""
    assert run.container.container_env("VLLM_HOST_IP") == "172.28.86.11"


@cases(
    "message",
    {
        "none": (on_head("lo 127.0.0.1/8", "eth0 10.1.0.10/16"), REFUSAL),
        "only-vlan-child": (on_head(f"hsn0.561 {MASTER}/21"), REFUSAL),
        "only-link-local": (on_head("hsn0 169.254.7.7/16"), REFUSAL),
        "no-interface-at-all": (on_head(), REFUSAL),
        "other-prefix": (
            on_head(f"hsn0 {MASTER}/21", knobs={"hsn_iface": "ib"}),
            REFUSAL.replace("hsn<n>", "ib<n>"),
        ),
        "not-the-master": (
            on_head("hsn0 10.2.0.1/24"),
            "rank 0 runs on nid001 (10.2.0.1), which does not hold the master address "
            + MASTER,
        ),
        "no-gpus": (
            RankCase(environ={"CUDA_VISIBLE_DEVICES": "UNSET"}),
            "rank 0 on nid001 has no GPUs: CUDA_VISIBLE_DEVICES is not set in the "
            "step; check the job's --gres",
        ),
        "empty-gpus": (
            RankCase(environ={"CUDA_VISIBLE_DEVICES": ""}),
            "rank 0 on nid001 has no GPUs: CUDA_VISIBLE_DEVICES is not set in the "
            "step; check the job's --gres",
        ),
        "few-gpus": (
            RankCase(environ={"CUDA_VISIBLE_DEVICES": "0,1,2"}),
            "rank 0 on nid001 has 3 GPU(s) (0,1,2), planned 4; check the job's --gres",
        ),
    },
)
def test_refused_before_the_barrier(run, message):
    """A node that cannot serve says so, before it counts as started."""
    assert run.err == f"LLMHUB-REFUSED rank=0 node=nid001: {message}\n"
    assert run.status == 1
    assert not run.marker.exists()
    assert run.node.calls("apptainer") == []


@case(
    RankCase(
        params={"gpus_per_node": "1"}, environ={"CUDA_VISIBLE_DEVICES": "NoDevFiles"}
    )
)
def test_slurms_word_for_no_gpu_is_no_gpu(run):
    """Slurm sets NoDevFiles in a step that has no device."""
    assert run.status == 1
    assert "LLMHUB-REFUSED rank=0 node=nid001: rank 0 on nid001 has no GPU" in run.err
    assert not run.marker.exists()


# ---------------------------------------------------------------- barrier


def remove_marker_directory(run):
    """Take away what markers are written into."""
    run.job_dir.joinpath("attempt-0", "started").rmdir()


@case(RankCase(before=remove_marker_directory))
def test_marker_that_cannot_be_written(run):
    """It is an error that says so."""
    assert run.status == 1
    assert run.err == (
        "LLMHUB-REFUSED rank=0 node=nid001: rank 0 on nid001 cannot write "
        f"{run.marker}; is the log directory on shared storage, writable and not "
        "full?\n"
    )


def run_without_word(run):
    """See that a rank that waits has marked itself and started nothing."""
    run.wait_for(run.marker.exists)
    time.sleep(0.3)
    run.notes["containers"] = len(run.node.calls("apptainer"))
    run.notes["marker"] = run.marker.read_text().split()[0]


LATE = {"PLAN_RANK_START_TIMEOUT=7\n": "PLAN_RANK_START_TIMEOUT=-29\n"}


@case(
    RankCase(
        rank=1,
        stdin=None,
        knobs={"rank_start_timeout": 7},
        edit=LATE,
        during=run_without_word,
    )
)
def test_barrier_waits_and_then_gives_up(run):
    """Without the word no container starts; after the budget the rank ends."""
    assert run.notes == {**run.notes, "containers": 0, "marker": "nid002"}
    assert run.status not in (0, None)
    assert run.err.startswith("LLMHUB-REFUSED rank=1 node=nid002: ")
    assert "not all 2 ranks started" in run.err
    assert 0.8 < run.seconds < 4
    assert run.node.calls("apptainer") == []


@cases(
    "word",
    {
        "end-of-file": (RankCase(stdin=b""), ""),
        "wrong-word": (RankCase(stdin=b"gone\n"), "gone"),
        "half-a-word": (RankCase(stdin=b"g"), "g"),
        "empty-line": (RankCase(stdin=b"\n"), ""),
    },
)
def test_barrier_takes_one_word_only(run, word):
    """Anything but the word means that the batch script is gone."""
    assert run.status == 1
    assert run.err.startswith("LLMHUB-REFUSED rank=0 node=nid001: ")
    assert "not all 2 ranks started" in run.err
    assert run.node.calls("apptainer") == []


def term_at_barrier(run):
    """Cancel a rank that waits for the others, and see how long it stays."""
    run.wait_for(run.marker.exists)
    time.sleep(0.2)
    os.killpg(run.process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        run.notes["status"] = run.process.wait(5)
    run.process.kill()


@case(RankCase(stdin=None, during=term_at_barrier))
def test_cancelled_at_the_barrier(run):
    """A rank that still waits ends soon, without an error line."""
    assert run.notes.get("status", 0) != 0
    assert "LLMHUB-" not in run.err
    assert run.node.calls("apptainer") == []


# ---------------------------------------------------------------- vLLM's version


def image_with(*versions, site=IMAGE_SITE, **more):
    """A rank 0 whose image has these versions of vLLM."""
    return RankCase(
        before=lambda run: run.node.install_vllm(*versions, site=site), **more
    )


def twice_in_the_image(run):
    """Let the image have its one vLLM under lib64 too, as many have."""
    run.node.etc.joinpath("image", "lib64").symlink_to("lib")


def linked_program(run):
    """Let the command on PATH be a link into the place where vLLM is."""
    image = run.node.etc / "image"
    # a name that begins as the metadata's does
    venv = image.rename(image.with_name("vllm-venv"))
    image.joinpath("bin").mkdir(parents=True)
    image.joinpath("bin", "vllm").symlink_to(venv / "bin" / "vllm")


UNKNOWN = (
    f"WARN: cannot tell the version of vLLM in {IMAGE}; it must be 0.11.1 or newer"
)


@cases(
    "said",
    {
        **{
            version: (image_with(version), f"TOPOLOGY: vllm {version}")
            for version in (
                *("0.11.1", "0.11.1rc2", "0.11.2.post1", "0.12", "0.32.0", "1.0"),
                *("0.19.0+cpu", "0.100.0+cu130", "10.1.0"),
                # builds of some commit: nobody can tell
                *("0.1.dev1+cpu", "0.11.0rc3.dev12+g1a2b3c4", "0+unknown"),
            )
        },
        "debian": (
            image_with("0.32.0", site="lib/python3/dist-packages"),
            "TOPOLOGY: vllm 0.32.0",
        ),
        "lib64": (RankCase(before=twice_in_the_image), "TOPOLOGY: vllm 0.32.0"),
        "link": (RankCase(before=linked_program), "TOPOLOGY: vllm 0.32.0"),
        "no-metadata": (image_with(), UNKNOWN),
        "two-versions": (image_with("0.10.0", "0.32.0"), UNKNOWN),
        "no-container": (RankCase(say={"probe": "exit 255"}), UNKNOWN),
        "hangs": (RankCase(say={"probe": "exec sleep 60"}), UNKNOWN),
    },
)
def test_a_vllm_that_may_work(run, said):
    """Its version is in the job's log; one that cannot be told is no obstacle."""
    assert run.said == [said]
    assert run.status == 1 and run.end_line()["status"] == "0"
    assert run.container.text[4:9] == ["env", "-u", "FI_LOG_LEVEL", "vllm", "serve"]


OLD = ("0.9.2", "0.10.1.1+cu128", "0.11.0", "0.11.0.post2", "0.11.0rc6", "0.11")


@cases("version", {version: (image_with(version), version) for version in OLD})
def test_a_vllm_that_is_too_old(run, version):
    """The rank refuses before it starts the engine, and names both versions."""
    assert run.status == 1
    assert run.err == f"LLMHUB-REFUSED rank=0 node=nid001: {too_old(version)}\n"
    assert run.node.calls("apptainer") == []


def too_old(version):
    """The reason that is given."""
    return (
        f"vLLM {version} in {IMAGE} cannot serve over several nodes; the first version "
        "that can is 0.11.1: name a newer image in vec-inf's environment.yaml"
    )


@case(image_with("0.9.2", rank=1))
def test_one_rank_looks_at_the_image(run):
    """It is the same image on every rank."""
    assert run.node.calls("probe") == []
    assert run.container


@case(RankCase(environ={"APPTAINERENV_PATH": "/there"}))
def test_the_version_is_that_of_the_container_that_will_run(run):
    """The image is asked with the environment, and the binds, of the engine."""
    (probe,) = run.node.calls("probe")
    assert probe.text[:5] == [*run.container.text[:4], "sh"]
    names = ("APPTAINERENV_PATH", "APPTAINER_BINDPATH", "APPTAINERENV_VLLM_HOST_IP")
    for name in map(os.fsencode, names):
        assert probe.environ[name] == run.container.environ[name]


# ---------------------------------------------------------------- environment


@cases(
    "name, value",
    {
        "symm-mem": (RankCase(), "VLLM_ALLREDUCE_USE_SYMM_MEM", "0"),
        "symm-mem-knob": (
            RankCase(knobs={"symm_mem": "1"}),
            "VLLM_ALLREDUCE_USE_SYMM_MEM",
            "1",
        ),
        "symm-mem-env": (
            RankCase(params={"env": {"VLLM_ALLREDUCE_USE_SYMM_MEM": "1"}}),
            "VLLM_ALLREDUCE_USE_SYMM_MEM",
            "1",
        ),
        "gpus": (RankCase(), "CUDA_VISIBLE_DEVICES", "0,1,2,3"),
        "gpus-as-the-hub-names-them": (
            RankCase(
                params={"env": {"CUDA_VISIBLE_DEVICES": "$CUDA_VISIBLE_DEVICES"}},
                environ={"CUDA_VISIBLE_DEVICES": "4,5,6,7"},
            ),
            "CUDA_VISIBLE_DEVICES",
            "4,5,6,7",
        ),
        "braces": (
            RankCase(params={"env": {"WHERE": "${SLURMD_NODENAME}:$SLURM_PROCID"}}),
            "WHERE",
            "nid001:0",
        ),
        "unset-reference": (
            RankCase(params={"env": {"WHERE": "a$NO_SUCH_VARIABLE-b"}}),
            "WHERE",
            "a-b",
        ),
        "value-of-reference-is-data": (
            RankCase(
                params={"env": {"WHERE": "<$OUTER>"}},
                environ={"OUTER": "$(:>{root}/ran) ${HOME} `x` \\"},
            ),
            "WHERE",
            "<$(:>{root}/ran) ${HOME} `x` \\>",
        ),
        "job-wins-over-host": (
            RankCase(
                params={"env": {"KEY": "job"}}, environ={"APPTAINERENV_KEY": "host"}
            ),
            "KEY",
            "job",
        ),
    },
)
def test_container_env(run, name, value):
    """What a variable is in the container."""
    assert run.container.container_env(name) == value.replace("{root}", str(run.root))
    assert not run.root.joinpath("ran").exists()


NAMES_OF_THE_SCRIPT = "RANK NODE PLAN_MODEL STATUS i name value llmhub_rest".split()


@case(RankCase(params={"env": {n.upper(): f"<${n}>" for n in NAMES_OF_THE_SCRIPT}}))
def test_reference_to_a_name_of_the_script(run):
    """Only the rank's environment is looked up, not what the script calls its own."""
    found = {n: run.container.container_env(n.upper()) for n in NAMES_OF_THE_SCRIPT}
    assert found == dict.fromkeys(NAMES_OF_THE_SCRIPT, "<>")


OWN = ("VLLM_HOST_IP", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "VLLM_PORT")


@cases(
    "source",
    {
        "job": (RankCase(params={"env": dict.fromkeys(OWN, "bad")}), ""),
        "apptainer": (
            RankCase(environ={f"APPTAINERENV_{name}": "bad" for name in OWN}),
            "",
        ),
        "singularity": (
            RankCase(environ={f"SINGULARITYENV_{name}": "bad" for name in OWN}),
            "",
        ),
        "host": (RankCase(environ=dict.fromkeys(OWN, "bad")), ""),
    },
)
def test_rank_sets_its_own_variables(run, source):
    """Addresses and interfaces are the rank's, wherever others come from."""
    found = {name: run.container.container_env(name) for name in OWN}
    assert found == {
        "VLLM_HOST_IP": MASTER,
        "NCCL_SOCKET_IFNAME": "=hsn0",
        "GLOO_SOCKET_IFNAME": "hsn0",
        "VLLM_PORT": None,
    }


# ---------------------------------------------------------------- NCCL


def nccl(env=None, **environ):
    """A rank with this deployment env and these host variables."""
    return RankCase(params={"env": env or {}}, environ=environ)


OUR_FILE = "{job}/nccl-debug/%h.%p"


@cases(
    "level, subsystems, file",
    {
        "nothing-set": (nccl(), "INFO", "INIT,NET", OUR_FILE),
        "level-of-job": (nccl({"NCCL_DEBUG": "WARN"}), "WARN", None, OUR_FILE),
        "level-of-host": (nccl(NCCL_DEBUG="TRACE"), "TRACE", None, OUR_FILE),
        "level-of-apptainer": (
            nccl(APPTAINERENV_NCCL_DEBUG="VERSION"),
            "VERSION",
            None,
            OUR_FILE,
        ),
        "level-of-singularity": (
            nccl(SINGULARITYENV_NCCL_DEBUG="WARN"),
            "WARN",
            None,
            OUR_FILE,
        ),
        "job-over-host": (
            nccl(
                {"NCCL_DEBUG": "WARN"}, NCCL_DEBUG="TRACE", APPTAINERENV_NCCL_DEBUG="X"
            ),
            "WARN",
            None,
            OUR_FILE,
        ),
        "level-by-reference": (
            nccl({"NCCL_DEBUG": "$OUTER_LEVEL"}, OUTER_LEVEL="WARN"),
            "WARN",
            None,
            OUR_FILE,
        ),
        "level-and-subsystems-of-job": (
            nccl({"NCCL_DEBUG": "WARN", "NCCL_DEBUG_SUBSYS": "ALL"}),
            "WARN",
            "ALL",
            OUR_FILE,
        ),
        "level-and-subsystems-of-host": (
            nccl(NCCL_DEBUG="WARN", APPTAINERENV_NCCL_DEBUG_SUBSYS="GRAPH"),
            "WARN",
            "GRAPH",
            OUR_FILE,
        ),
        "file-of-job": (
            nccl({"NCCL_DEBUG_FILE": "/logs/%h"}),
            "INFO",
            "INIT,NET",
            "/logs/%h",
        ),
        "file-of-host": (
            nccl(NCCL_DEBUG_FILE="/logs/%h"),
            "INFO",
            "INIT,NET",
            "/logs/%h",
        ),
        "file-of-apptainer": (
            nccl(APPTAINERENV_NCCL_DEBUG_FILE="/logs/%h"),
            "INFO",
            "INIT,NET",
            "/logs/%h",
        ),
        "file-of-singularity": (
            nccl(SINGULARITYENV_NCCL_DEBUG_FILE="/logs/%h"),
            "INFO",
            "INIT,NET",
            "/logs/%h",
        ),
        "level-and-file-of-job": (
            nccl({"NCCL_DEBUG": "WARN", "NCCL_DEBUG_FILE": "/logs/%h"}),
            "WARN",
            None,
            "/logs/%h",
        ),
        "level-of-host-file-of-apptainer": (
            nccl(NCCL_DEBUG="WARN", APPTAINERENV_NCCL_DEBUG_FILE="/logs/%h"),
            "WARN",
            None,
            "/logs/%h",
        ),
    },
)
def test_nccl_debug(run, level, subsystems, file):
    """A level or file that is set is kept; ours go into the job directory."""
    container = run.container
    file = file.replace("{job}", str(run.job_dir))
    assert container.container_env("NCCL_DEBUG") == level
    assert container.container_env("NCCL_DEBUG_SUBSYS") == subsystems
    assert container.container_env("NCCL_DEBUG_FILE") == file
    ours = run.job_dir / "nccl-debug"
    assert ours.is_dir() == file.startswith(str(ours))
    assert (str(ours) in container.binds) == file.startswith(str(ours))


# ---------------------------------------------------------------- caches and binds


def move_cache_by_symlink(run):
    """Make HF_HOME a symlink to somewhere else, as a full home makes people do."""
    run.root.joinpath("scratch", "hf").mkdir(parents=True)
    run.node.home.joinpath("hf").symlink_to(run.root / "scratch" / "hf")


@case(
    RankCase(
        params={"env": {"HF_HOME": "$HOME/hf", "OTHER": "$HOME/hf"}},
        environ={"APPTAINER_BINDPATH": "/dev,/tmp"},
        before=move_cache_by_symlink,
    )
)
def test_cache_behind_a_symlink(run):
    """The container gets what the symlink points at, bound."""
    target = str(run.root / "scratch" / "hf")
    assert run.container.container_env("HF_HOME") == target
    assert target in run.container.binds
    assert run.container.binds[:2] == ["/dev", "/tmp"]
    assert run.container.container_env("OTHER") == f"{run.node.home}/hf"


@case(RankCase(rank=1))
def test_triton_cache_is_the_ranks_own(run):
    """It lies in a bound directory, one for each rank."""
    cache = Path(run.container.container_env("TRITON_CACHE_DIR"))
    assert cache.is_dir()
    assert "rank-1" in cache.parts
    assert cache.is_relative_to(run.root / "work")
    assert any(cache.is_relative_to(b) for b in run.container.binds if b)


@case(RankCase(params={"env": {"TRITON_CACHE_DIR": "/somewhere"}}))
def test_triton_cache_of_the_job_is_kept(run):
    """A cache that the deployment names is used."""
    assert run.container.container_env("TRITON_CACHE_DIR") == "/somewhere"


# ---------------------------------------------------------------- end, logs, secrets


@cases(
    "status, reported",
    {
        "zero": (RankCase(engines={0: "exit 0"}), 1, "0"),
        "three": (RankCase(engines={0: "exit 3"}), 3, "3"),
        "killed": (RankCase(engines={0: "kill -9 $$"}), 137, "137"),
        "segfault": (RankCase(engines={0: "kill -11 $$"}), 139, "139"),
    },
)
def test_status(run, status, reported):
    """Any end is a failure; the report has the status as it was."""
    assert run.status == status
    end = run.end_line()
    assert (end["rank"], end["node"]) == ("0", "nid001")
    assert (end["status"], end["stopping"]) == (reported, "0")


def term_when_engine_runs(run):
    """Cancel a rank whose engine runs."""
    run.wait_for(lambda: (run.root / "engine-runs").exists())
    run.process.send_signal(signal.SIGTERM)


STUBBORN = """
trap 'echo engine got TERM; stopping=1' TERM
: >"${STUB_ETC%/*}/engine-runs"
until [ "${stopping-}" ]; do sleep 0.05; done
sleep 0.5
echo last word
exit 0
"""


@case(RankCase(engines={0: STUBBORN}, during=term_when_engine_runs))
def test_term_is_forwarded(run):
    """The container gets it, has its time to stop, and its end is no failure."""
    assert run.end_line()["stopping"] == "1"
    assert run.status == 143
    assert run.out == "engine got TERM\nlast word\n"
    assert run.notes["left"] == []


TALK = "echo to stdout; echo Failed to load libfabric >&2; exit 3"


@case(RankCase(engines={0: TALK}))
def test_logs(run):
    """stdout goes to the job's log and a file; stderr to a file only."""
    assert run.out == "to stdout\n"
    assert run.read(run.log + ".out") == "to stdout\n"
    assert run.read(run.log + ".err") == "Failed to load libfabric\n"
    assert "libfabric" not in run.err


@case(RankCase(rank=1, engines={1: TALK}, environ={"SLURMD_NODENAME": "UNSET"}))
def test_node_name_without_slurms(run):
    """The machine's own name stands in."""
    assert run.read("ranks/rank-1.nid001.out") == "to stdout\n"


@case(RankCase(environ={"SLURMD_NODENAME": "nid001"}, engines={0: TALK}))
def test_nobody_asks_hostname(run):
    """hostname answers with a link-local address first."""
    assert run.node.calls("hostname") == []


@case(
    RankCase(
        params={"env": {"HF_TOKEN": SECRET}},
        environ={"LLMHUB_UMASK": "0027"},
        engines={0: TALK},
    )
)
def test_files_are_the_owners(run):
    """What we write is for the owner; the engine has the umask that it would have."""
    for path in run.job_dir.rglob("*"):
        if path.is_file():
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    assert run.container.umask == "0027"


# ================================================================ the whole job


def run_status(run):
    """What vec-inf says about a failed job: state and reason."""
    state, reason = run.server_status()
    assert state is ModelStatus.FAILED
    return reason


TWO_FABRIC = {"nid001": (*INTERFACES["nid001"], "hsn1 172.28.94.10/21")}


@case(JobCase(interfaces=TWO_FABRIC, during=when_ready))
def test_topology_and_ready(run):
    """The job log says what the job is made of, and vec-inf sees it run."""
    base = run.knobs["rdzv_port"]
    assert base <= run.master_port <= base + 64
    topology = run.lines("TOPOLOGY")
    assert topology[:5] == [
        f"nnodes=2 tp=4 pp=2 world=8 master={MASTER}:{run.master_port}",
        f"iface hsn0 {MASTER}/21",
        "iface hsn1 172.28.94.10/21",
        "nccl_socket_ifname==hsn0,hsn1",
        "readiness_budget=1800s",
    ]
    stage = run.lines("STAGE-A")
    assert sorted(stage[:2]) == ["rank 0 up on nid001", "rank 1 up on nid002"]
    assert stage[2:] == ["all 2 ranks launched"]
    assert topology[5:] == ["sizes tp derived, pp derived", "vllm 0.32.0"]
    assert run.lines("WARN") == []
    assert run.notes["status"] == "RUNNING"
    assert run.err == "INFO:     Application startup complete.\n"


@case(JobCase(before=lambda run: run.node.install_vllm("0.11.0")))
def test_a_vllm_that_is_too_old_ends_the_job(run):
    """At once, with the reason, in every place where one looks."""
    assert run.status == 1
    assert run.errors() == [too_old("0.11.0")]
    assert run.failure()["message"] == too_old("0.11.0")
    assert run.failure()["rank"] == 0
    assert run.node.calls("apptainer", "0") == []
    assert run.seconds < 5


@case(JobCase(before=lambda run: run.node.install_vllm(), during=when_ready))
def test_a_vllm_of_no_known_version_serves(run):
    """The job says that it cannot tell, and goes on."""
    assert run.lines("WARN") == [UNKNOWN.removeprefix("WARN: ")]
    assert run.notes["status"] == "RUNNING"


@case(JobCase(during=when_ready))
def test_timeline(run):
    """The attempt's own record of what happened when."""
    job = JobDirectory(run.job_dir)
    (attempt,) = job.attempts()
    events = job.timeline(attempt)
    first, *ranks, ready = [e.text for e in events if e.text != "stopped"]
    assert first == "started on nid[001-002]"
    assert sorted(ranks) == ["rank 0 up on nid001", "rank 1 up on nid002"]
    assert ready == "ready"
    times = [event.time for event in events]
    assert times == sorted(times)
    assert time.time() - 300 < times[0] <= time.time()


@case(JobCase(during=when_ready))
def test_each_rank_in_the_step(run):
    """One srun starts one container on each node, with all of the job's GPUs."""
    (srun,) = run.node.calls("srun")
    assert "--kill-on-bad-exit=1" in srun.text
    assert "--cpus-per-task=16" in srun.text
    for rank in (0, 1):
        argv = run.node.container(rank).text
        assert argv[argv.index("--node-rank") + 1] == str(rank)
        assert argv[argv.index("--master-port") + 1] == str(run.master_port)
    argv = run.node.container(0).text
    assert argv[argv.index("--port") + 1] == str(run.node.server_port)
    binds = run.node.container(1).binds
    assert f"{run.root}/work/.vec-inf-cache:{run.node.home}/.cache" in binds
    assert f"{run.root}/weights/{MODEL}" in binds


@case(JobCase(during=when_ready))
def test_cancelled(run):
    """A cancelled job leaves no process, no error line and no failure.json."""
    assert run.status not in (0, None)
    assert run.notes["left"] == []
    assert run.err == "INFO:     Application startup complete.\n"
    assert "LLMHUB-ERROR" not in run.out
    assert run.failure() is None
    address = json.loads(run.file("json").read_text())["server_address"]
    assert address == f"http://nid001:{run.node.server_port}/v1"


def cancel_ranks_first(run):
    """Let the signal reach the ranks before the batch script."""
    run.wait_for(run.ready)
    run.cancel(ranks_first=True)


@case(JobCase(during=cancel_ranks_first))
def test_cancelled_ranks_first(run):
    """The order in which Slurm's signals arrive makes no difference."""
    assert "LLMHUB-ERROR" not in run.out + run.err
    assert run.failure() is None
    assert run.status not in (0, None)


def cancel_early(run):
    """Cancel while one rank is still missing."""
    run.wait_for(lambda: "rank 0 up" in run.out)
    run.cancel()


NC_THAT_IS_LEFT = """#!/bin/bash
kill -STOP "$PPID"
echo "$PPID" >"$STUB_LOG/search"
exec sleep 60
"""


def stay_in_the_port_search(run):
    """Let vec-inf's port search stop where it has started nc and not ended it yet."""
    nc = run.node.path / "nc"
    nc.unlink()
    nc.write_text(NC_THAT_IS_LEFT)
    nc.chmod(0o755)


def cancel_in_the_port_search(run):
    """End the search as Slurm does, which no longer finds the nc that it leaves."""
    search = run.node.log / "search"
    run.wait_for(lambda: search.exists() and search.read_text().endswith("\n"))
    shell = int(search.read_text())
    run.cancel()
    os.kill(shell, signal.SIGTERM)
    os.kill(shell, signal.SIGCONT)


@case(JobCase(before=stay_in_the_port_search, during=cancel_in_the_port_search))
def test_cancelled_in_the_port_search(run):
    """What vec-inf's own search leaves behind ends too."""
    assert run.status == 143
    assert run.err == ""
    assert run.notes["left"] == []


@case(JobCase(say={"srun.json": '{"absent": [1]}'}, during=cancel_early))
def test_cancelled_before_all_ranks_are_up(run):
    """It is no failure either, and ends soon."""
    assert "LLMHUB-ERROR" not in run.out + run.err
    assert run.status not in (0, None)
    assert run.seconds < 15


@case(JobCase(params={"num_nodes": "3"}, environ={"SLURM_JOB_NUM_NODES": "2"}))
def test_wrong_node_count(run):
    """Something changed --nodes after planning."""
    message = "allocation has 2 node(s), expected 3"
    assert run.errors()[0].startswith(message)
    assert run_status(run).startswith(f"LLMHUB-ERROR: {message}")
    assert run.status == 1
    assert run.node.calls("srun") == []


@case(JobCase(interfaces={"nid001": ("hsn0.561 10.9.0.5/24", "eth0 10.1.0.10/16")}))
def test_no_fabric_on_the_head(run):
    """The head node has no master address to give."""
    assert run.errors() == [
        "no routable fabric IPv4 on nid001: no interface hsn<n> has one; set "
        "LLMHUB_MN_HSN_IFACE"
    ]
    assert run_status(run) == f"LLMHUB-ERROR: {run.errors()[0]}"
    assert run.node.calls("srun") == []


@case(JobCase(interfaces={"nid002": ("hsn0.561 10.9.0.5/24",)}))
def test_no_fabric_on_another_node(run):
    """The rank's own words are the job's reason."""
    assert "no routable fabric IPv4 on nid002 (rank 1)" in run.errors()[0]
    assert run_status(run) == f"LLMHUB-ERROR: {run.errors()[0]}"
    assert run.status == 1


@case(
    JobCase(
        say={"srun.json": '{"absent": [1]}'},
        knobs={"rank_start_timeout": 2},
    )
)
def test_barrier_timeout(run):
    """Missing ranks fail the job after the budget, with what there is to know."""
    assert len(run.errors()) == 1
    assert run.errors()[0].startswith(
        "only 1 of 2 ranks started within 2s, without rank 1 on nid002: "
    )
    assert run_status(run) == f"LLMHUB-ERROR: {run.errors()[0]}"
    assert run.status == 1
    assert run.seconds < 12
    diagnosis = "\n".join(run.lines("DIAG"))
    for part in ("nid001", str(JOB_ID), "nid[001-002]", "hsn0", str(run.job_dir)):
        assert part in diagnosis
    assert re.search(r"ranks seen: 0$", diagnosis, re.MULTILINE)
    assert run.failure()["message"] == run.errors()[0]
    assert run.notes["left"] == []
    assert run.node.calls("apptainer") == []


STEP_FAILS = {"srun.json": '{"fails": "srun: error: Unable to create step"}'}


@case(JobCase(say=STEP_FAILS))
def test_step_that_cannot_start(run):
    """It is told from a rank that is late."""
    assert run.errors()[0].startswith("srun step exited before all ranks started")
    assert run_status(run) == f"LLMHUB-ERROR: {run.errors()[0]}"
    assert run.status == 1
    assert run.seconds < 10


NODE_SILENT = (
    "srun: error: Task launch for StepId=4242.0 failed on node nid002: Socket timed out"
    " on send/recv operation\nsrun: error: Application launch failed: Socket timed out"
    " on send/recv operation\nsrun: error: nid001: task 0: Killed"
)


@case(JobCase(say={"srun.json": json.dumps({"fails": NODE_SILENT})}))
def test_node_that_takes_no_task(run):
    """It is named, and not the rank that srun killed because of it."""
    assert run.errors() == [
        "srun step exited before all ranks started: Slurm could not start the task on "
        "nid002: Socket timed out on send/recv operation"
    ]
    assert (run.failure()["node"], run.failure()["rank"]) == ("nid002", None)


@case(JobCase(without=("ss",), during=when_ready))
def test_ss_missing(run):
    """It is said on stdout, and the job goes on."""
    assert run.lines("WARN") == [
        "ss not found on nid001; cannot tell which ports are in use"
    ]
    assert run.notes["status"] == "RUNNING"


def all_ports_but(number):
    """Let ss list every port of a search but one."""

    def before(run):
        base = run.knobs["rdzv_port"]
        sockets = ["[::]:{}", "*:{}", "0.0.0.0:{}", "[::ffff:10.0.0.1]:{}"]
        lines = [
            f"LISTEN 0 128 {sockets[port % 4].format(port)} 0.0.0.0:*\n"
            for port in range(base, base + 9)
            if port != base + number
        ]
        run.node.say("ss", "".join(lines))

    return JobCase(knobs={"port_scan_max": 8}, before=before, say=STEP_FAILS)


@cases(
    "number",
    {f"all-but-{number}": (all_ports_but(number), number) for number in (0, 3, 8)},
)
def test_port_in_use(run, number):
    """A port that is in use, on any address, is not taken."""
    assert run.master_port == run.knobs["rdzv_port"] + number


def ephemeral_low():
    """First port that the kernel gives to outgoing connections."""
    text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
    return int(text.split()[0])


@case(JobCase(knobs={"rdzv_port": ephemeral_low(), "port_scan_max": 8}))
def test_ephemeral_ports_only(run):
    """No port of the kernel's ephemeral range is taken."""
    assert run.errors()[0].startswith("no free rendezvous port from")
    assert run_status(run) == f"LLMHUB-ERROR: {run.errors()[0]}"
    assert run.node.calls("srun") == []


@case(
    JobCase(
        knobs={"rdzv_port": ephemeral_low() - 1, "port_scan_max": 8}, say=STEP_FAILS
    )
)
def test_ephemeral_ports_skipped(run):
    """The one port below the range is found, wherever the search starts."""
    assert run.master_port == ephemeral_low() - 1


SHARED_BASE = rendezvous_base()


def second_job(run):
    """Start another job on the node, whose search starts at the same port."""
    run.wait_for(run.ready)
    other = JobCase(knobs={"rdzv_port": SHARED_BASE}, during=when_ready)
    run.notes["other"] = JobRun(other, run.root / "other").finish()
    run.cancel()


@case(JobCase(knobs={"rdzv_port": SHARED_BASE}, during=second_job))
def test_two_jobs_on_a_node(run):
    """A port is held for the life of its job, although ss does not show it."""
    other = run.notes["other"]
    assert other.notes["status"] == "RUNNING"
    assert other.master_port != run.master_port


class TwoAttempts(JobCase):
    """A job that ends at once, and the same job started again."""

    def start(self, root):
        """Return the runs of both attempts."""
        knobs = {"rdzv_port": rendezvous_base()}
        again = {"SLURM_RESTART_COUNT": "1"}
        return [
            JobCase(knobs=knobs, say=STEP_FAILS, environ=environ).start(root / name)
            for name, environ in (("first", {}), ("second", again))
        ]


@case(TwoAttempts())
def test_attempts_have_ports_of_their_own(run):
    """What is left of the first attempt cannot meet the second."""
    first, second = run
    assert first.master_port != second.master_port


# ---------------------------------------------------------------- readiness


def never_ready(run):
    """See what vec-inf says for a while, then cancel."""
    run.wait_for(lambda: any(r["method"] == "POST" for r in run.node.requests()))
    time.sleep(2.5)
    run.notes["status"] = run.server_status()
    run.cancel()


@cases(
    "answer",
    {
        "500": (
            JobCase(say={"http.json": '{"completion": 500}'}, during=never_ready),
            500,
        ),
        "503": (
            JobCase(say={"http.json": '{"completion": 503}'}, during=never_ready),
            503,
        ),
        "none": (JobCase(say={"http.json": '{"hang": true}'}, during=never_ready), 0),
    },
)
def test_server_that_does_not_complete(run, answer):
    """A server that answers /health and no request is not ready."""
    assert run.notes["status"] is ModelStatus.LAUNCHING
    assert not run.ready()
    assert run.lines("READY") == []
    assert run.notes["left"] == []


def ready_after_a_while(run):
    """Let the server recover, and see that nothing was ready before."""
    run.wait_for(lambda: len(run.node.requests()) >= 2)
    run.notes["before"] = run.server_status()
    run.node.say("http.json", "{}")
    when_ready(run)


@case(JobCase(say={"http.json": '{"health": 503}'}, during=ready_after_a_while))
def test_unhealthy_then_ready(run):
    """It is asked again until it answers, and asked nothing else before."""
    assert run.notes["before"] is ModelStatus.LAUNCHING
    assert run.notes["status"] == "RUNNING"
    paths = [request["path"] for request in run.node.requests()]
    assert paths.index("/v1/completions") >= 2
    assert paths.count("/v1/completions") == 1


@case(JobCase(say={"http.json": '{"completion": 400}'}, during=when_ready))
def test_server_that_refuses_the_request(run):
    """It is alive; the job log says what it answered."""
    assert run.notes["status"] == "RUNNING"
    (warning,) = run.lines("WARN")
    assert "HTTP 400" in warning


@case(
    JobCase(
        params={"env": {"VLLM_API_KEY": SECRET, "HF_TOKEN": SECRET}},
        say={"http.json": json.dumps({"key": SECRET})},
        during=lambda run: run.notes.update(argv=watched(run)),
    )
)
def test_secrets(run):
    """The key opens the server, is on no command line and in no open file."""
    assert run.notes["status"] == "RUNNING"
    assert run.lines("WARN") == []
    (request,) = [r for r in run.node.requests() if r["method"] == "POST"]
    assert request["headers"]["authorization"] == f"Bearer {SECRET}"
    assert run.notes["argv"] == set()
    assert run.node.container(1).container_env("HF_TOKEN") == SECRET
    holders = [
        path
        for path in run.job_dir.rglob("*")
        if path.is_file() and SECRET.encode() in path.read_bytes()
    ]
    assert holders
    for path in holders:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    assert SECRET not in run.out + run.err


def watched(run):
    """Look at every command line until the job is ready and cancelled."""
    with watch_argv(SECRET) as found:
        when_ready(run)
        run.process.wait(20)
    return found


@case(
    JobCase(
        params={"env": {"VLLM_API_KEY": "$HUB_KEY"}},
        environ={"HUB_KEY": "from the host"},
        say={"http.json": json.dumps({"key": "from the host"})},
        during=when_ready,
    )
)
def test_key_by_reference(run):
    """A key that is a reference is the same for the probe as for the server."""
    assert run.lines("WARN") == []
    assert run.notes["status"] == "RUNNING"
    assert run.node.container(0).container_env("VLLM_API_KEY") == "from the host"


@case(JobCase(during=when_ready))
def test_readiness_request(run):
    """One token of the served model is asked for."""
    (request,) = [r for r in run.node.requests() if r["method"] == "POST"]
    body = json.loads(request["body"])
    assert (body["model"], body["max_tokens"]) == (MODEL, 1)
    assert "authorization" not in request["headers"]


@cases(
    "posts",
    {
        "knob": (JobCase(knobs={"ready_probe": "health"}, during=when_ready), 0),
        "embedding": (
            JobCase(params={"model_type": "Text_Embedding"}, during=when_ready),
            0,
        ),
        "reward": (
            JobCase(params={"model_type": "Reward_Modeling"}, during=when_ready),
            0,
        ),
        "vision": (JobCase(params={"model_type": "VLM"}, during=when_ready), 1),
    },
)
def test_which_servers_are_asked_to_complete(run, posts):
    """Models that complete, unless the knob says otherwise; health for the rest."""
    assert run.notes["status"] == "RUNNING"
    methods = [request["method"] for request in run.node.requests()]
    assert methods.count("POST") == posts


@case(JobCase(knobs={"server_timeout": 2}, engines={0: STAY, 1: STAY}))
def test_readiness_budget(run):
    """A server that is not ready in time fails the job."""
    assert run.errors()[0].startswith("server not ready within 2s")
    assert run_status(run) == f"LLMHUB-ERROR: {run.errors()[0]}"
    assert run.status == 1
    assert run.seconds < 15
    assert run.notes["left"] == []
    assert run.failure()["message"] == run.errors()[0]


BUDGET = 31_536_000


def left(text, budget=BUDGET):
    """A job for which squeue gives this time left."""
    return JobCase(
        knobs={"server_timeout": budget},
        say={**STEP_FAILS, "squeue": f"{text}\n"},
    )


@cases(
    "seconds",
    {
        "days": (left("1-02:03:04"), 93_784 * 9 // 10),
        "hours": (left("2:03:04"), 7_384 * 9 // 10),
        "minutes": (left("08:09"), 489 * 9 // 10),
        "seconds": (left("59"), 59 * 9 // 10),
        "unlimited": (left("UNLIMITED"), None),
        "not-set": (left("NOT_SET"), None),
        "no-answer": (left(""), None),
        "long-enough": (left("2:03:04", 1_800), None),
        "no-budget": (left("2:03:04", 0), None),
    },
)
def test_budget_within_the_walltime(run, seconds):
    """It is clamped to 90 % of what squeue says is left."""
    budget = run.knobs["server_timeout"]
    assert f"readiness_budget={seconds or budget}s" in run.lines("TOPOLOGY")
    assert run.lines("WARN") == (
        [f"budget {budget}s exceeds the allocation; clamping to {seconds}s"]
        if seconds
        else []
    )


class EndsIn1000Seconds(JobCase):
    """A job whose walltime Slurm gives in the environment."""

    def start(self, root):
        """Return a finished run of this case."""
        end = str(int(time.time()) + 1_000)
        environ = {"SLURM_JOB_END_TIME": end}
        return JobCase(environ=environ, say=STEP_FAILS).start(root)


@case(EndsIn1000Seconds())
def test_budget_within_slurms_end_time(run):
    """The environment of the job is asked first."""
    (warning,) = run.lines("WARN")
    start = "budget 1800s exceeds the allocation; clamping to "
    assert warning.startswith(start)
    assert 880 <= int(warning[len(start) : -1]) <= 900
    assert not [call for call in run.node.calls("squeue") if b"%L" in call.argv]


# ---------------------------------------------------------------- failures


def when_told(rank):
    """An engine that ends with 0 when the test says so."""
    return f'until [ -e "$STUB_ETC/end.{rank}" ]; do sleep 0.05; done'


def end_after_ready(rank):
    """Let a rank's engine end while the job serves."""

    def during(run):
        run.wait_for(run.ready)
        run.node.say(f"end.{rank}", "")
        began = time.monotonic()
        run.wait_for(lambda: "LLMHUB-ERROR" in run.err)
        run.notes["seconds to the reason"] = time.monotonic() - began
        run.process.wait(20)
        run.notes["seconds to the end"] = time.monotonic() - began

    return during


@case(JobCase(engines={0: SERVE, 1: when_told(1)}, during=end_after_ready(1)))
def test_rank_ends_with_0_while_serving(run):
    """A server that lost a rank would hang on every request."""
    assert run.notes["seconds to the end"] < 5
    assert run.status == 1
    (error,) = run.errors()
    assert error.startswith("rank 1 on nid002 exited with status 0 after ")
    failure = run.failure()
    assert (failure["rank"], failure["node"]) == (1, "nid002")
    assert (failure["status"], failure["signal"]) == (0, None)
    assert failure["message"] == error
    assert run.notes["left"] == []


SERVES_AND_IGNORES_TERM = """
trap '' TERM
exec "$STUB_PYTHON" -IS "$STUB_DIR/engine.py" "$@"
"""


@case(
    JobCase(
        engines={0: SERVES_AND_IGNORES_TERM, 1: when_told(1)},
        during=end_after_ready(1),
    )
)
def test_survivor_that_does_not_stop(run):
    """What is left of the step does not delay the reason."""
    assert run.notes["seconds to the end"] < 5
    assert run.errors()[0].startswith("rank 1 on nid002 exited with status 0")
    assert run.notes["left"] == []


CRASH = """
echo 'INFO loading' >&2
echo 'torch.OutOfMemoryError: CUDA out of memory. Tried to allocate' >&2
echo 'Traceback (most recent call last):' >&2
echo 'RuntimeError: Engine core initialization failed: could not start' >&2
"""


@case(JobCase(engines={0: SERVE, 1: CRASH + "exit 7"}))
def test_reason_of_a_crash(run):
    """vec-inf gives our line for the reason, not the last line of the rank's log."""
    reason = run_status(run)
    assert reason.startswith("LLMHUB-ERROR: rank 1 on nid002 exited with status 7 ")
    assert "out of GPU memory" in reason
    assert "RuntimeError: Engine core initialization failed" in run.err
    assert run.status == 1


@case(JobCase(engines={0: SERVE, 1: CRASH + "kill -9 $$"}))
def test_failure_file(run):
    """The first cause is kept for who asks after the job has ended."""
    failure = run.failure()
    log = run.job_dir / "ranks" / "rank-1.nid002.err"
    assert failure == {
        "message": run.errors()[0],
        "rank": 1,
        "node": "nid002",
        "status": 137,
        "signal": 9,
        "seconds": failure["seconds"],
        "cause": "out of GPU memory",
        "log": str(log),
        "attempt": "attempt-0",
        "time": failure["time"],
    }
    assert isinstance(failure["seconds"], int)
    assert abs(failure["time"] - time.time()) < 120
    assert "CUDA out of memory" in log.read_text()


def cancel_when_the_failure_is_told(run):
    """Let whoever watches for ``failure.json`` cancel the job at once."""
    mv = run.node.path / "mv"
    real = mv.resolve()
    mv.unlink()
    mv.write_text(f"""#!/bin/bash
{real} "$@"
case "$*" in
    *failure.json) kill -TERM "$PPID" ;;
esac
""")
    mv.chmod(0o755)


@case(
    JobCase(
        engines={0: STAY, 1: CRASH + "exit 7"}, before=cancel_when_the_failure_is_told
    )
)
def test_cancelled_when_the_failure_is_told(run):
    """The account of a failure is whole even so."""
    reason = run_status(run)
    assert reason.startswith("LLMHUB-ERROR: rank 1 on nid002 exited with status 7 ")
    assert "RuntimeError: Engine core initialization failed" in run.err
    assert run.status == 1
    assert run.notes["left"] == []


@case(JobCase(engines={0: STAY, 1: "exit 0"}))
def test_rank_ends_with_0_in_start_up(run):
    """The job does not wait for a rank that is gone."""
    assert run.errors()[0].startswith("rank 1 on nid002 exited with status 0 after ")
    assert run.status == 1
    assert run.seconds < 12


@case(JobCase(engines={0: SERVE, 1: "kill -9 $PPID; exec sleep 60"}))
def test_rank_script_that_is_killed(run):
    """A rank that can say nothing more is named all the same."""
    (error,) = run.errors()
    assert "nid002" in error
    failure = run.failure()
    assert (failure["rank"], failure["node"]) == (1, "nid002")
    assert run.notes["left"] == []
    assert run.seconds < 12


# ---------------------------------------------------------------- while serving


def serve_for(seconds):
    """Let a ready job go on for a while, and cancel it if it does."""

    def during(run):
        run.wait_for(run.ready)
        with suppress(subprocess.TimeoutExpired):
            run.process.wait(seconds)
        run.notes["went on"] = run.process.poll() is None
        run.cancel()

    return during


def serving(metrics, seconds, **knobs):
    """A ready job whose server has these metrics."""
    return JobCase(
        knobs=knobs, say={"http.json": json.dumps(metrics)}, during=serve_for(seconds)
    )


def with_connection(http, seconds=6.0):
    """A ready job with a connection to its server, and these answers once ready."""

    def during(run):
        run.wait_for(run.ready)
        # the job has seen its server's metrics
        run.wait_for(lambda: any(r["path"] == "/metrics" for r in run.node.requests()))
        time.sleep(0.5)
        port = run.node.server_port
        run.node.say("ss", f"ESTAB 0 0 127.0.0.1:{port} 127.0.0.1:40000\n")
        run.node.say("http.json", json.dumps(http))
        serve_for(seconds)(run)

    first = {"http.json": json.dumps({"running": 0})}
    return JobCase(knobs={"stall_timeout": 2}, say=first, during=during)


@case(with_connection({"running": 0, "hang": True}, 15))
def test_stalled_before_the_engine_has_the_request(run):
    """vLLM's gauge stands at 0, and a request for a token is not answered."""
    assert not run.notes["went on"]
    (error,) = run.errors()
    assert re.match(r"no token for \d+s with 1 request", error)
    assert run.notes["left"] == []


@case(serving({"running": 2}, 15, stall_timeout=2))
def test_stalled(run):
    """Requests run and no token comes: a hung rank or a cut link."""
    assert not run.notes["went on"]
    (error,) = run.errors()
    assert "no token for " in error
    assert run.failure()["message"] == error
    assert run.status == 1
    assert run.notes["left"] == []


@cases(
    "asked",
    {
        "tokens-come": (
            serving({"running": 2, "moving": True}, 4.5, stall_timeout=2),
            False,
        ),
        "idle": (serving({"running": 0}, 4.5, stall_timeout=2), False),
        "switched-off": (serving({"running": 2}, 4.5, stall_timeout=0), False),
        "silent-connection": (with_connection({"running": 0}), True),
        "no-metrics-any-more": (with_connection({}), True),
    },
)
def test_not_stalled(run, asked):
    """A server that works, or has nothing to do, is left alone, or is asked once."""
    assert run.notes["went on"]
    assert run.errors() == []
    # the first is the readiness request
    assert (len(posts_of(run)) > 1) == asked


def posts_of(run):
    """Requests for a token that the server got."""
    return [r for r in run.node.requests() if r["method"] == "POST"]


@case(serving({"running": 0}, 4, idle_probe=1, stall_timeout=0))
def test_idle_probe(run):
    """An idle server is asked for a token now and then."""
    assert run.notes["went on"]
    assert len(posts_of(run)) >= 2


def hang_when_ready(run):
    """Let the server hang once it is ready."""
    run.wait_for(run.ready)
    run.node.say("http.json", '{"running": 0, "hang": true}')
    with suppress(subprocess.TimeoutExpired):
        run.process.wait(15)


def answer_when_ready(**http):
    """A job with an idle probe whose server answers so once it is ready."""

    def during(run):
        run.wait_for(run.ready)
        run.node.say("http.json", json.dumps({"running": 0, **http}))
        serve_for(8)(run)

    return JobCase(knobs={"idle_probe": 1, "stall_timeout": 0}, during=during)


@case(answer_when_ready(completion=500))
def test_idle_probe_with_an_error(run):
    """A server that answers with errors fails the job, and the status is told."""
    assert run.errors() == [
        "the idle server answers a request for one token with HTTP 500"
    ]
    # one before ready; an error is asked about once more
    assert len(posts_of(run)) >= 3


@case(answer_when_ready(completion=500, good_every=2))
def test_idle_probe_with_a_passing_error(run):
    """One error, and an answer to the next request."""
    assert run.notes["went on"]
    assert run.errors() == []


def end_in_the_probe(run):
    """Let a rank end while the idle server has a request for a token."""
    run.wait_for(run.ready)
    run.node.say("http.json", '{"running": 0, "hang": true}')
    asked = len(posts_of(run))
    run.wait_for(lambda: len(posts_of(run)) > asked)
    run.node.say("end.1", "")
    run.process.wait(15)


@case(
    JobCase(
        knobs={"idle_probe": 5, "stall_timeout": 0},
        engines={0: SERVE, 1: when_told(1)},
        during=end_in_the_probe,
    ),
)
def test_a_rank_ends_in_the_idle_probe(run):
    """The rank is named, not the answer that did not come."""
    (error,) = run.errors()
    assert error.startswith("rank 1 on nid002 exited with status 0")


@case(
    JobCase(knobs={"idle_probe": 1, "stall_timeout": 0}, during=hang_when_ready),
)
def test_idle_probe_without_answer(run):
    """An idle server that no longer answers fails the job."""
    (error,) = run.errors()
    assert "idle server did not answer" in error
    assert run.status == 1
    assert run.notes["left"] == []


def end_twice(run):
    """Let a rank end while the job serves, and again after its restart."""
    run.wait_for(run.ready)
    run.node.say("end.1", "")
    run.wait_for(lambda: len(run.lines("RESTART")) == 1)
    run.wait_for(lambda: len(run.lines("READY")) == 2)
    run.notes["status"] = run.server_status()
    run.notes["ports"] = [
        line.rpartition(":")[2] for line in run.lines("TOPOLOGY") if "master=" in line
    ]
    run.node.say("end.2", "")
    run.process.wait(20)


# the second life of rank 1 waits for another word
TWICE = """
word=end.1
[ ! -e "$STUB_LOG/lived" ] || word=end.2
: >"$STUB_LOG/lived"
until [ -e "$STUB_ETC/$word" ]; do sleep 0.05; done
"""


@case(
    JobCase(knobs={"max_restarts": 1}, engines={0: SERVE, 1: TWICE}, during=end_twice)
)
def test_restart(run):
    """A step that fails while serving is started again, as often as is allowed."""
    assert run.notes["status"] == "RUNNING"
    assert run.lines("RESTART")[0].startswith("1 of 1: rank 1 on nid002 exited")
    first, second = run.notes["ports"]
    assert first != second
    assert run.job_dir.joinpath("attempt-1").is_dir()
    assert len(list(run.job_dir.rglob("rank-1.nid002.err"))) == 2
    (error,) = run.errors()
    assert error.startswith("rank 1 on nid002 exited with status 0 after ")
    assert run.failure()["attempt"] == "attempt-1"
    assert run.status == 1
    assert run.notes["left"] == []


BENIGN = """
echo 'libfabric: Failed to open provider; unable to register' >&2
echo 'error: could not find something' >&2
"""


@case(JobCase(engines={0: BENIGN + SERVE, 1: BENIGN + STAY}, during=when_ready))
def test_benign_lines_before_ready(run):
    """What ranks print is not what decides."""
    assert run.notes["status"] == "RUNNING"
    assert "libfabric" not in run.out + run.err
    assert "libfabric" in run.read("ranks/rank-0.nid001.err")
    assert "libfabric" in run.read("ranks/rank-1.nid002.err")


def earlier_attempt(run):
    """Leave what a first attempt leaves."""
    started = run.job_dir / "attempt-0" / "started"
    started.mkdir(parents=True)
    for rank in (0, 1):
        started.joinpath(str(rank)).write_text("nid009 0\n")
    run.job_dir.joinpath("ranks").mkdir()
    run.job_dir.joinpath("ranks", "rank-0.nid009.err").write_text("first attempt\n")
    run.job_dir.joinpath("failure.json").write_text('{"message": "old"}')


@case(
    JobCase(
        environ={"SLURM_RESTART_COUNT": "1"},
        before=earlier_attempt,
        during=when_ready,
    )
)
def test_requeued(run):
    """A second attempt sees nothing of the first, and loses nothing of it."""
    assert run.notes["status"] == "RUNNING"
    assert sorted(run.lines("STAGE-A")[:2]) == [
        "rank 0 up on nid001",
        "rank 1 up on nid002",
    ]
    assert run.job_dir.joinpath("attempt-1").is_dir()
    assert run.failure() is None
    kept = [path for path in run.job_dir.rglob("rank-0.nid009.err")]
    assert [path.read_text() for path in kept] == ["first attempt\n"]
    assert kept[0].parent != run.job_dir / "ranks"
    assert run.job_dir.joinpath("ranks", "rank-0.nid001.err").exists()


# ---------------------------------------------------------------- surroundings


OUTER_JOB = {
    "SLURM_MEM_PER_CPU": "4000",
    "SLURM_CPU_BIND": "mask_cpu:0x1",
    "SLURM_CPU_BIND_TYPE": "mask_cpu:",
    "SLURM_GPUS_PER_TASK": "1",
    "SLURM_GPUS_ON_NODE": "1",
    "SLURM_HINT": "nomultithread",
    "SLURM_THREADS_PER_CORE": "1",
    "SLURM_EXACT": "1",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_WAIT": "1",
}


@case(JobCase(environ=OUTER_JOB, during=when_ready))
def test_submitted_from_inside_a_job(run):
    """srun, which reads such variables as options, sees none of them."""
    assert run.notes["status"] == "RUNNING"


class HostilePaths(JobCase):
    """A job each of whose paths would run something as shell text."""

    def start(self, root):
        """Return a finished run of this case."""
        odd = "a b'\"`:>ran`$(:>ran);"
        source = Path(root).parent / f"source {odd}"
        source.mkdir(parents=True)
        source.joinpath("find_port.sh").write_bytes(
            Path(SRC_DIR, "find_port.sh").read_bytes()
        )
        params = {
            "log_dir": Path(f"logs {odd}"),
            "work_dir": Path(f"work {odd}"),
            "model_weights_parent_dir": Path(f"weights {odd}"),
            "src_dir": str(source),
            "bind": f"/data {odd}:/data",
            "account": odd,
            "partition": odd,
        }
        return JobCase(params=params, during=when_ready).start(root)


@case(HostilePaths())
def test_paths_are_data(run):
    """No path runs a command, and each arrives as it is."""
    assert run.notes["status"] == "RUNNING"
    assert list(run.root.rglob("ran")) == []
    weights = f"{run.params['model_weights_parent_dir']}/{MODEL}"
    container = run.node.container(0)
    assert container.text[9] == weights
    assert weights in container.binds
    assert run.params["bind"] in container.binds


@case(
    JobCase(
        params={"bind": "$SLURM_TMPDIR:$HOME/.cache,$DATA:/data"},
        environ={"DATA": "/scratch/data"},
        during=when_ready,
    )
)
def test_references_in_bind(run):
    """They are expanded; an entry whose source is unset is left out."""
    binds = run.node.container(1).binds
    assert "/scratch/data:/data" in binds
    assert not [bind for bind in binds if bind.startswith(":")]


@case(
    JobCase(
        params={"work_dir": "$WORK/dir"},
        environ={"WORK": "{root}/w"},
        during=when_ready,
    )
)
def test_reference_in_work_dir(run):
    """It is expanded wherever the directory is used."""
    work = f"{run.root}/w/dir"
    container = run.node.container(1)
    assert f"{work}/.vec-inf-cache:{run.node.home}/.cache" in container.binds
    assert container.container_env("TRITON_CACHE_DIR").startswith(f"{work}/")
    assert not [bind for bind in container.binds if "$" in bind]


def test_stand_ins_cover_the_path(tmp_path):
    """Nothing real is on PATH but the listed tools."""
    stubs = {path.name for path in STUBS.iterdir() if os.access(path, os.X_OK)}
    found = {path.name for path in Node(tmp_path / "node").path.iterdir()}
    assert found == stubs | set(TOOLS)
