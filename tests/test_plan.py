"""Planning, refusals, knobs, quoting and submission of a multi-node launch."""

import copy
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import support
from hypothesis import given, settings
from hypothesis import strategies as st
from vec_inf.client import LaunchOptions, VecInfClient
from vec_inf.client._exceptions import SlurmJobError

from app.utils.vec_inf_multinode import (
    ContainerError,
    EnvFileError,
    MultinodeClient,
    MultinodeError,
    MultinodeLauncher,
    MultinodeScriptGenerator,
    MultinodeSettings,
    OwnedArgError,
    ParallelismError,
    PlanError,
    SettingsError,
    SubmitError,
    UnsafeValueError,
    UnsupportedEngineError,
    launch_model,
    plan,
    render,
)

HERE = "test_plan"
SHORT = {"-tp": plan.TENSOR, "-pp": plan.PIPELINE, "-dp": "--data-parallel-size"}


def sizes_of(parallelism):
    """Size and origin of the two axes."""
    return [(a.size, a.origin) for a in (parallelism.tensor, parallelism.pipeline)]


@pytest.fixture
def nothing_happens(login):
    """Return the machine; afterwards nothing may have been written or submitted."""
    before = login.tree()
    yield login
    assert login.calls() == []
    assert login.tree() == before


# ---------------------------------------------------------------- parallel sizes

# model, request, [tensor, pipeline] with where each comes from, whether there is a note
SIZES = {
    "derived": ("two-nodes", {}, [(4, "derived"), (2, "derived")], False),
    "catalog": ("two-nodes-sized", {}, [(4, "catalog"), (2, "catalog")], False),
    "catalog, same allocation asked for": (
        "two-nodes-sized",
        {"num_nodes": 2, "gpus_per_node": 4},
        [(4, "catalog"), (2, "catalog")],
        False,
    ),
    "more nodes": (
        "two-nodes-sized",
        {"num_nodes": 4},
        [(4, "derived"), (4, "derived")],
        True,
    ),
    "fewer GPUs per node": (
        "two-nodes-sized",
        {"gpus_per_node": 2},
        [(2, "derived"), (2, "derived")],
        True,
    ),
    "typed long": (
        "two-nodes-sized",
        {"vllm_args": "--tensor-parallel-size=8,--pipeline-parallel-size=1"},
        [(8, "typed"), (1, "typed")],
        False,
    ),
    "typed short": (
        "two-nodes-sized",
        {"vllm_args": "-tp=8,-pp=1"},
        [(8, "typed"), (1, "typed")],
        False,
    ),
    "typed with spaces": (
        "two-nodes-sized",
        {"vllm_args": "-tp 8, -pp 1"},
        [(8, "typed"), (1, "typed")],
        False,
    ),
    "typed with underscores": (
        "two-nodes-sized",
        {"vllm_args": "--tensor_parallel_size=8,--pipeline_parallel_size=1"},
        [(8, "typed"), (1, "typed")],
        False,
    ),
    "typed tensor, more nodes": (
        "two-nodes-sized",
        {"num_nodes": 4, "vllm_args": "-tp=4"},
        [(4, "typed"), (4, "derived")],
        True,
    ),
    "typed pipeline, more nodes": (
        "two-nodes-sized",
        {"num_nodes": 4, "vllm_args": "-pp=4"},
        [(4, "derived"), (4, "typed")],
        True,
    ),
    "both typed, more nodes": (
        "two-nodes-sized",
        {"num_nodes": 4, "vllm_args": "-tp=4,-pp=4"},
        [(4, "typed"), (4, "typed")],
        False,
    ),
    "typed as the catalog has it": (
        "two-nodes-sized",
        {"vllm_args": "-tp=4"},
        [(4, "typed"), (2, "catalog")],
        False,
    ),
    "no power of two": (
        "two-nodes",
        {"num_nodes": 3},
        [(4, "derived"), (3, "derived")],
        False,
    ),
    "one GPU per node": (
        "one-node",
        {"num_nodes": 2},
        [(1, "derived"), (2, "derived")],
        False,
    ),
}


@pytest.mark.parametrize("name, request_, sizes, noted", SIZES.values(), ids=SIZES)
def test_sizes(login, name, request_, sizes, noted):
    launcher = MultinodeLauncher(name, login.request(**request_))
    assert sizes_of(launcher.parallelism) == sizes
    assert bool(launcher.parallelism.note) == noted
    total = int(launcher.params["num_nodes"]) * int(launcher.params["gpus_per_node"])
    assert launcher.parallelism.world_size == total
    # what vec-inf writes into the job's JSON says the same
    args = launcher.params["engine_args"]
    assert [args[plan.TENSOR], args[plan.PIPELINE]] == [size for size, _ in sizes]


def test_the_note_goes_into_the_job_log(login):
    request = login.request(num_nodes=4, vllm_args="-tp=4")
    response = launch_model(VecInfClient(), "two-nodes-sized", LaunchOptions(**request))
    script = login.logs / "family/two-nodes-sized.42/two-nodes-sized.42.sbatch"
    assert response.slurm_job_id == "42"
    assert re.findall(r"^PLAN_ORIGINS=.*", script.read_text(), re.M)[0] == (
        "PLAN_ORIGINS='tp typed, pp derived; the request changed the allocation from "
        "2 x 4 to 4 x 4 (nodes x GPUs per node): --pipeline-parallel-size derived "
        "afresh'"
    )


def test_each_axis_is_derived_on_its_own():
    params = {"num_nodes": 2, "gpus_per_node": 4, "engine_args": {plan.TENSOR: 4}}
    found = plan.plan_parallelism(params, {}, params)
    assert sizes_of(found) == [(4, "catalog"), (2, "derived")]


def test_catalog_sizes_of_another_allocation():
    args = {plan.TENSOR: 4, plan.PIPELINE: 2}
    params = {"num_nodes": 4, "gpus_per_node": 4, "engine_args": args}
    found = plan.plan_parallelism(params, {}, {"num_nodes": 2, "gpus_per_node": 4})
    assert sizes_of(found) == [(4, "derived"), (4, "derived")]


def test_data_parallel_counts(login):
    request = login.request(vllm_args="-dp=2,-tp=4,-pp=1")
    found = MultinodeLauncher("two-nodes", request).parallelism
    assert [(a.option, a.size) for a in found.axes] == [
        (plan.TENSOR, 4),
        (plan.PIPELINE, 1),
        ("--data-parallel-size", 2),
    ]


def test_refusal_of_idle_gpus(nothing_happens):
    request = nothing_happens.request(num_nodes=2, vllm_args="-tp=2")
    with pytest.raises(ParallelismError) as refused:
        MultinodeLauncher("two-nodes", request)
    assert isinstance(refused.value, ValueError)
    assert str(refused.value) == (
        "Parallel sizes --tensor-parallel-size 2 (typed), --pipeline-parallel-size 2 "
        "(derived) use 4 GPU(s); the allocation is 2 node(s) x 4 GPU(s) = 8: 4 GPU(s) "
        "would be billed idle. Leave the sizes out to get --tensor-parallel-size 4 and "
        "--pipeline-parallel-size 2, or give sizes whose product is 8."
    )


# request, GPUs that it uses, what is wrong
MISMATCHES = {
    "too many": ("-tp=8", 16, "8 GPU(s) more than the allocation has"),
    "typed tensor does not bend pipeline": ("-tp=1", 2, "6 GPU(s) would be billed"),
    "pipeline": ("-pp=1", 4, "4 GPU(s) would be billed idle"),
    "data-parallel": ("-dp=2", 16, "8 GPU(s) more than the allocation has"),
    "data-parallel long": ("--data-parallel-size=4", 32, "24 GPU(s) more"),
    "all three": ("-dp=3,-tp=1,-pp=1", 3, "5 GPU(s) would be billed idle"),
}


@pytest.mark.parametrize("args, used, wrong", MISMATCHES.values(), ids=MISMATCHES)
def test_refusal_of_a_mismatch(nothing_happens, args, used, wrong):
    request = nothing_happens.request(vllm_args=args)
    with pytest.raises(ParallelismError) as refused:
        MultinodeLauncher("two-nodes", request)
    text = str(refused.value)
    assert f" use {used} GPU(s); the allocation is 2 node(s) x 4 GPU(s) = 8: " in text
    assert wrong in text


@pytest.mark.parametrize("size", ["0", "-4", "4.0", "four", "", "True"])
def test_refusal_of_what_is_no_size(nothing_happens, size):
    request = nothing_happens.request(vllm_args=f"--tensor-parallel-size={size}")
    with pytest.raises(ParallelismError):
        MultinodeLauncher("two-nodes", request)


# ---------------------------------------------------------------- engine args

# vllm_args of the request, argv after the model
TYPED_ARGS = {
    "plain": ("--max-model-len=9", ["--max-model-len", "9"]),
    "flag": ("--enforce-eager", ["--enforce-eager"]),
    "short": ("-q=awq", ["--quantization", "awq"]),
    "underscores": ("--max_model_len=9", ["--max-model-len", "9"]),
    "spaces": ("  --seed = 1 , --enforce-eager ", ["--seed", "1", "--enforce-eager"]),
    "empty items": (",--seed=1,,", ["--seed", "1"]),
    "JSON with commas": (
        '--limit-mm-per-prompt={"image": 2, "video": 1},--seed=1',
        ["--limit-mm-per-prompt", '{"image": 2, "video": 1}', "--seed", "1"],
    ),
    "JSON with braces and quotes in text": (
        r'--chat-template-kwargs={"a": "}, \" {", "b": [1, 2]},--seed=1',
        ["--chat-template-kwargs", r'{"a": "}, \" {", "b": [1, 2]}', "--seed", "1"],
    ),
    "equals sign": ("--hf-overrides={'a=b': 1}", ["--hf-overrides", "{'a=b': 1}"]),
    "value with spaces": ("--tokenizer=a b  c", ["--tokenizer", "a b  c"]),
    "quotes are data": ("--tokenizer='a'\"b", ["--tokenizer", "'a'\"b"]),
    "shell is data": ("--tokenizer=$(id)`id`;id", ["--tokenizer", "$(id)`id`;id"]),
    "leading dash": ("--tokenizer=-x", ["--tokenizer=-x"]),
    "negative number": ("--seed=-1", ["--seed", "-1"]),
    "level": ("-O3", ["--compilation-config", "3"]),
    "level as JSON": (
        '-O{"level": 3, "x": 1}',
        ["--compilation-config", '{"level": 3, "x": 1}'],
    ),
    "dotted": ("--compilation-config.level=3", ["--compilation-config.level", "3"]),
    "typed wins": ("--seed=1,--seed=2", ["--seed", "2"]),
}


@pytest.mark.parametrize("typed, argv", TYPED_ARGS.values(), ids=TYPED_ARGS)
def test_typed_args_reach_vllm_exactly(login, typed, argv):
    launcher = MultinodeLauncher("two-nodes", login.request(vllm_args=typed))
    sizes = (plan.TENSOR, "4", plan.PIPELINE, "2")
    found = MultinodeScriptGenerator(launcher.params).plan.engine_args
    assert found == (*argv, *sizes)


@pytest.mark.parametrize(
    "value, argv",
    [
        (True, ["--x"]),
        (False, []),
        (None, []),
        (0, ["--x", "0"]),
        (1.5, ["--x", "1.5"]),
        ("", ["--x", ""]),
        ("True", ["--x", "True"]),
        ("-", ["--x=-"]),
        ("--y", ["--x=--y"]),
        (-1, ["--x", "-1"]),
        ({"a": [1, {"b": "c, d=e"}]}, ["--x", '{"a": [1, {"b": "c, d=e"}]}']),
        (["a b", "c"], ["--x", "a b", "c"]),
        ([], ["--x"]),
    ],
)
def test_catalog_args_reach_vllm_exactly(value, argv):
    assert list(plan.engine_argv({"--x": value})) == argv


@pytest.mark.parametrize("text", ["seed=1", "--seed=1,eager", "-=1", "1", "=1", "--"])
def test_refusal_of_what_is_no_option(nothing_happens, text):
    with pytest.raises(PlanError):
        MultinodeLauncher("two-nodes", nothing_happens.request(vllm_args=text))


# ---------------------------------------------------------------- deployment env


def test_env_reaches_the_plan_exactly(login):
    env_file = login.root / "deployment.env"
    env_file.write_text("# a comment\n\nLIST=a,b c\nEQUALS=a=b\nQUOTES='\"$HOME`id`\n")
    request = login.request(env=f"A=1=2, B = x y ,VLLM_PORT=1,{env_file}")
    launcher = MultinodeLauncher("two-nodes-sized", request)
    found = MultinodeScriptGenerator(launcher.params).plan
    assert dict(found.env) == {
        "NCCL_DEBUG": "WARN",
        "A": "1=2",
        "B": "x y",
        "LIST": "a,b c",
        "EQUALS": "a=b",
        "QUOTES": "'\"$HOME`id`",
    }
    assert found.left_out_env == ("VLLM_PORT",)
    # the job JSON still records the env as given
    assert launcher.params["env"]["VLLM_PORT"] == "1"


def test_a_line_of_an_env_file_that_is_no_variable(login, recwarn):
    env_file = login.root / "deployment.env"
    env_file.write_text("A=1\nno variable\n")
    request = login.request(env=str(env_file))
    MultinodeLauncher("two-nodes", request)
    assert [str(w.message) for w in recwarn] == ["Could not parse line 2 of item 1"]


def test_refusal_of_an_env_file_that_is_not_there(nothing_happens):
    request = nothing_happens.request(env="A=1,/no/such/file")
    with pytest.raises(EnvFileError) as refused:
        MultinodeLauncher("two-nodes", request)
    assert isinstance(refused.value, FileNotFoundError)


@pytest.mark.parametrize("name", ["1A", "A-B", "A B", "A.B", "", "é", "A$(id)"])
def test_refusal_of_an_env_name(nothing_happens, name):
    request = nothing_happens.request(env=f"OK=1,{name}=x")
    with pytest.raises(PlanError, match="is not the name of a variable"):
        MultinodeLauncher("two-nodes", request)


# ---------------------------------------------------------------- knobs

DEFAULTS = {
    "server_timeout": 1800,
    "rank_start_timeout": 300,
    "hsn_iface": "hsn",
    "nccl_socket_ifname": None,
    "rdzv_port": 29500,
    "port_scan_max": 64,
    "symm_mem": "0",
    "ready_probe": "completion",
    "stall_timeout": 300,
    "idle_probe": 0,
    "max_restarts": 0,
    "failures": None,
}
# a value other than the default, as text and as read
GOOD = {
    "server_timeout": ("0", 0),
    "rank_start_timeout": (" 60 ", 60),
    "hsn_iface": ("ib", "ib"),
    "nccl_socket_ifname": ("=hsn0,hsn1", "=hsn0,hsn1"),
    "rdzv_port": ("20000", 20000),
    "port_scan_max": ("1", 1),
    "symm_mem": ("1", "1"),
    "ready_probe": ("health", "health"),
    "stall_timeout": ("0", 0),
    "idle_probe": ("600", 600),
    "max_restarts": ("3", 3),
    "failures": (" /dev/null ", "/dev/null"),
}
BAD = {
    "server_timeout": ["-1", "1.5", "soon", "1h", "1e3", "inf"],
    "rank_start_timeout": ["0", "-1", "x"],
    "hsn_iface": ["hsn*", "a b", "$(id)", "0", "=hsn", "x" * 16, "hsn0;id", "a/b"],
    "nccl_socket_ifname": ["hsn0 hsn1", "$(id)", "=", "a;b", "a`b`"],
    "rdzv_port": ["80", "65536", "-1", "http"],
    "port_scan_max": ["0", "-1", "99999", "x"],
    "symm_mem": ["2", "true", "yes"],
    "ready_probe": ["none", "Health"],
    "stall_timeout": ["-1", "x"],
    "idle_probe": ["-1", "0.5"],
    "max_restarts": ["-1", "always"],
    "failures": ["/no/such/file", "/etc", "/etc/passwd", "/bin/sh"],
}


@pytest.mark.parametrize("environ", [{}, {"LLMHUB_MN_RDZV_PORT": " "}])
def test_defaults(environ):
    assert MultinodeSettings.from_environ(environ).model_dump() == DEFAULTS


def test_every_knob_has_a_case():
    assert GOOD.keys() == BAD.keys() == MultinodeSettings.model_fields.keys()


@pytest.mark.parametrize("field", GOOD)
@pytest.mark.parametrize("prefix", ["LLMHUB_MN_", "LLMFLUX_"])
def test_a_knob_is_read(field, prefix):
    text, value = GOOD[field]
    found = MultinodeSettings.from_environ({prefix + field.upper(): text})
    assert found.model_dump() == {**DEFAULTS, field: value}


def test_the_own_name_wins_over_the_alias():
    both = {"LLMHUB_MN_RDZV_PORT": "20000", "LLMFLUX_RDZV_PORT": "30000"}
    assert MultinodeSettings.from_environ(both).rdzv_port == 20000
    empty = {"LLMHUB_MN_RDZV_PORT": "", "LLMFLUX_RDZV_PORT": "30000"}
    assert MultinodeSettings.from_environ(empty).rdzv_port == 30000


@pytest.mark.parametrize(
    "field, text", [(field, text) for field, texts in BAD.items() for text in texts]
)
@pytest.mark.parametrize("prefix", ["LLMHUB_MN_", "LLMFLUX_"])
def test_a_bad_knob_is_named(field, text, prefix):
    variable = prefix + field.upper()
    with pytest.raises(SettingsError) as refused:
        MultinodeSettings.from_environ({variable: text})
    assert isinstance(refused.value, ValueError)
    lines = str(refused.value).splitlines()
    assert [line.split(" cannot be used: ")[0] for line in lines] == [
        f"{variable}={text!r}"
    ]


def test_every_bad_knob_is_named():
    environ = {"LLMHUB_MN_RDZV_PORT": "x", "LLMFLUX_SYMM_MEM": "2"}
    with pytest.raises(SettingsError) as refused:
        MultinodeSettings.from_environ(environ)
    named = [line.split("=")[0] for line in str(refused.value).splitlines()]
    assert sorted(named) == ["LLMFLUX_SYMM_MEM", "LLMHUB_MN_RDZV_PORT"]


def test_ports_beyond_the_last(nothing_happens, monkeypatch):
    monkeypatch.setenv("LLMHUB_MN_RDZV_PORT", "65500")
    with pytest.raises(SettingsError) as refused:
        MultinodeLauncher("two-nodes", nothing_happens.request())
    assert str(refused.value).startswith("LLMHUB_MN_RDZV_PORT='65500' cannot be used")


def test_a_bad_knob_does_not_touch_single_node_launches(login, monkeypatch):
    monkeypatch.setenv("LLMHUB_MN_RDZV_PORT", "x")
    options = LaunchOptions(**login.request())
    assert launch_model(VecInfClient(), "one-node", options).slurm_job_id == "42"


def test_knobs_are_read_at_submit(login, monkeypatch):
    monkeypatch.setenv("LLMHUB_MN_SERVER_TIMEOUT", "7200")
    launch_model(VecInfClient(), "two-nodes", LaunchOptions(**login.request()))
    script = login.logs / "family/two-nodes.42/two-nodes.42.sbatch"
    assert "\nPLAN_SERVER_TIMEOUT=7200\n" in script.read_text()


# ---------------------------------------------------------------- refusals

OWNED = ["--nnodes=2", "-n=2", "-n 2", "--node-rank=0", "--node_rank=0", "-r=0"]
OWNED += ["--master-addr=a", "--master_addr=a", "--master-port=1", "--master_port=1"]
OWNED += ["--headless", "--distributed-executor-backend=ray", "--host=h", "--port=1"]
OWNED += ["--distributed_executor_backend=mp", "--headless=True"]
OWNED += ["--api-key=secret", "--api_key=secret", "--api-key secret"]
# vLLM's parser reads --option.key=value as a key of the option's JSON
OWNED += ["--nnodes.x=2", "--api-key.a=secret", "--no-headless.x=1"]
# vLLM's parser takes any unambiguous beginning of an option for the option
OWNED += ["--node-ra=0", "--master-p=1", "--distributed-exec=ray", "--api-k=secret"]


@pytest.mark.parametrize("typed", OWNED)
def test_refusal_of_owned_args(nothing_happens, typed):
    request = nothing_happens.request(vllm_args=f"--seed=1,{typed}")
    with pytest.raises(OwnedArgError) as refused:
        MultinodeLauncher("two-nodes", request)
    assert "secret" not in str(refused.value)


def test_refusal_of_owned_args_in_the_catalog(nothing_happens, monkeypatch):
    entry = copy.deepcopy(support.MODELS["two-nodes-sized"])
    entry["vllm_args"]["--distributed-executor-backend"] = "ray"
    config = nothing_happens.root / "models.yaml"
    config.write_text(json.dumps({"models": {"two-nodes-sized": entry}}))
    request = nothing_happens.request(config=str(config))
    with pytest.raises(OwnedArgError):
        MultinodeLauncher("two-nodes-sized", request)


TEXT_FIELDS = ["model_family", "model_variant", "partition", "resource_type", "time"]
TEXT_FIELDS += ["mem_per_node", "account", "work_dir", "qos", "exclude", "nodelist"]
TEXT_FIELDS += ["bind", "data_type", "log_dir"]
CARRIED = {"vllm_args": "--tokenizer=a{}b", "env": "A=a{}b"}
BREAKS = {"LF": "\n", "CR": "\r", "CRLF": "\r\n", "NUL": "\0", "NEL": "\x85"}
BREAKS |= {"LS": "\u2028", "VT": "\v", "last LF": "\n#SBATCH --uid=0\n"}


@pytest.mark.parametrize("broken", BREAKS.values(), ids=BREAKS)
@pytest.mark.parametrize("field", [*TEXT_FIELDS, *CARRIED])
def test_refusal_of_a_line_break(nothing_happens, field, broken):
    value = CARRIED.get(field, "a{}b").format(broken)
    request = nothing_happens.request(**{field: value})
    with pytest.raises(UnsafeValueError) as refused:
        MultinodeLauncher("two-nodes", request)
    text = str(refused.value)
    assert text.startswith(field.replace("vllm_args", "engine_args"))
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize("field", ["model_weights_parent_dir", "venv", "hf_model"])
@pytest.mark.parametrize("broken", ["\n", "\0"])
def test_refusal_of_a_line_break_elsewhere(nothing_happens, field, broken):
    request = nothing_happens.request(model_weights_parent_dir="/none", hf_model="a/b")
    request["env"] = "HF_HOME=/cache"
    request[field] = f"/a{broken}b"
    with pytest.raises(PlanError):
        MultinodeLauncher("two-nodes", request)


@pytest.mark.parametrize("end", ["\n", "\r"])
def test_refusal_of_a_line_break_at_the_end(nothing_happens, end):
    with pytest.raises(UnsafeValueError):
        MultinodeLauncher("two-nodes", nothing_happens.request(account=f"lab{end}"))


@pytest.mark.parametrize("name", ["a b", "a/b", "../b", "a\nb", "a;b", "$(id)"])
def test_refusal_of_a_model_name(nothing_happens, name):
    request = nothing_happens.request(
        num_nodes=2, hf_model="org/name", env="HF_HOME=/c"
    )
    # vec-inf itself refuses most of them
    with pytest.raises(ValueError):
        MultinodeLauncher(name, request)


@pytest.mark.parametrize("venv", ["/opt/venv", "singularity", "Apptainer"])
def test_refusal_without_the_container(nothing_happens, venv):
    with pytest.raises(ContainerError) as refused:
        MultinodeLauncher("two-nodes", nothing_happens.request(venv=venv))
    assert str(refused.value) == (
        f"venv is {venv!r}; a multi-node job runs in the container. Leave venv out or "
        "set it to 'apptainer'."
    )


def on_singularity(root):
    """Run in a fresh interpreter, on a site with another container module."""
    login = support.Login(support.Path(root))
    before = login.tree()
    try:
        MultinodeLauncher("two-nodes", login.request())
    except ContainerError as err:
        return [str(err), login.calls(), login.tree() == before]


def test_refusal_of_another_container(login, tmp_path):
    module = {
        "module_name": "singularity",
        "module_load_cmd": "module load singularity",
    }
    site = support.write_site(
        tmp_path / "site",
        {"containerization": module, "default_args": {"venv": "singularity"}},
        support.MODELS,
    )
    call = support.Call(
        f"{HERE}:on_singularity", {**login.environ, **site}, {"root": str(login.root)}
    )
    (found,) = support.run_fresh([call], tmp_path / "fresh")
    assert found == [
        "The site's container module is 'singularity'; multi-node jobs speak apptainer "
        "only. Set containerization.module_name to apptainer in vec-inf's "
        "environment.yaml, or serve on one node.",
        [],
        True,
    ]


@pytest.mark.parametrize("way", ["function", "client"])
def test_refusal_of_an_engine_that_nothing_serves(nothing_happens, way):
    request = nothing_happens.request(num_nodes=2, engine="tgi")
    options = LaunchOptions(**request)
    with pytest.raises(UnsupportedEngineError) as refused:
        if way == "function":
            launch_model(VecInfClient(), "one-node", options)
        else:
            MultinodeClient().launch_model("one-node", options)
    assert str(refused.value) == (
        "Engine 'tgi' cannot serve one-node over 2 nodes: vllm, sglang can. Ask for "
        "one node or another engine."
    )


def test_refusal_of_a_percent_sign_in_a_path(nothing_happens):
    request = nothing_happens.request(log_dir=f"{nothing_happens.logs}/%u")
    with pytest.raises(UnsafeValueError):
        MultinodeLauncher("two-nodes", request)


# ---------------------------------------------------------------- quoting

HOSTILE = ["", " ", "a b", "'", '"', "\\", "\\'", "$(id)", "`id`", "$HOME", "${HOME}"]
HOSTILE += [
    ";id",
    "|id",
    "&",
    "#",
    "!",
    "*",
    "~",
    "{a,b}",
    "<(id)",
    "-n",
    "=",
    "é",
    "\t",
]
HOSTILE += ["LLMHUB_END_OF_RANK_SCRIPT", "'; id; '", "\\\\n", "%s", "\x1b[0m"]


def through_bash(text, *names):
    """Let bash read assignments and print the variables, NUL after each item."""
    shown = "; ".join(f'printf "%s\\0" "${{{name}[@]}}"' for name in names)
    run = subprocess.run(
        ["/bin/bash", "-c", f"{text}\n{shown}"],
        capture_output=True,
        env={"LC_ALL": "C.UTF-8", "PATH": "/nowhere"},
        timeout=10,
        check=True,
    )
    assert run.stderr == b""
    return os.fsdecode(run.stdout).split("\0")[:-1]


@pytest.mark.parametrize("value", HOSTILE)
def test_assignments_are_data(value):
    text = "\n".join(
        [render.assign("ONE", value), render.assign_array("ALL", [value, "x", value])]
    )
    assert through_bash(text, "ONE", "ALL") == [value, value, "x", value]


LINES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))


@settings(max_examples=25, deadline=None)
@given(st.lists(LINES, min_size=1, max_size=20))
def test_assignments_are_data_whatever_they_hold(values):
    assert through_bash(render.assign_array("ALL", values), "ALL") == values


@pytest.mark.parametrize(
    "value, written",
    [
        ("lab-account_1", "lab-account_1"),
        ("gpu:h100:4", "gpu:h100:4"),
        ("node[1-3,7]", "node[1-3,7]"),
        ("/logs/%j/x.%j.out", "/logs/%j/x.%j.out"),
        ("a b", '"a b"'),
        ('a"b', '"a\\"b"'),
        ("a\\b", '"a\\\\b"'),
        ("a #b", '"a \\#b"'),
        ("a --uid=0", '"a --uid=0"'),
        ("'", '"\'"'),
        ("$(id)", '"$(id)"'),
    ],
)
def test_sbatch_values(value, written):
    assert render.sbatch_value(value) == written


@pytest.mark.parametrize("value", [v for v in HOSTILE if v.strip() and v != "\x1b[0m"])
def test_a_request_value_adds_no_directive(login, value):
    request = login.request(account=value, partition=value, bind=value)
    params = MultinodeLauncher("two-nodes", request).params
    script = MultinodeScriptGenerator(params)._generate_script_content()
    plain = MultinodeScriptGenerator(
        {**params, "account": "x", "partition": "x", "bind": "x"}
    )._generate_script_content()

    def lines_but(text, *starts):
        return [x for x in text.splitlines() if not x.startswith(starts)]

    starts = ("#SBATCH --account=", "#SBATCH --partition=", "PLAN_BIND=")
    assert lines_but(script, *starts) == lines_but(plain, *starts)
    bind = re.findall(r"^PLAN_BIND=.*", script, re.M)
    assert through_bash("\n".join(bind), "PLAN_BIND") == [value]


# ---------------------------------------------------------------- submission

SECRET = "hf_secret"


@pytest.fixture
def launch(login):
    """Return a call that launches two-nodes with a secret in its env."""
    request = login.request(env=f"HF_TOKEN={SECRET}")
    return lambda: launch_model(VecInfClient(), "two-nodes", LaunchOptions(**request))


def files_of(login):
    """Names of everything in the log directory."""
    root = login.logs
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


JOB_FILES = [
    "family",
    "family/two-nodes.42",
    "family/two-nodes.42/two-nodes.42.json",
    "family/two-nodes.42/two-nodes.42.sbatch",
]


def test_a_launch(login, launch):
    response = launch()
    assert asdict(response)["slurm_job_id"] == "42"
    submit, release = login.calls()
    assert (submit[:2], release) == (
        ["sbatch", "--hold"],
        ["scontrol", "release", "42"],
    )
    assert re.fullmatch(
        rf"{login.logs}/family/launch_two-nodes_\d{{8}}_\d{{6}}_\w+\.sbatch", submit[2]
    )
    assert files_of(login) == JOB_FILES
    modes = {
        path.suffix: path.stat().st_mode & 0o777
        for path in login.logs.glob("family/*/*")
    }
    assert modes == {".json": 0o600, ".sbatch": 0o600}
    job_json = json.loads(login.logs.joinpath(JOB_FILES[2]).read_text())
    assert job_json == response.config
    assert (job_json["env"], job_json["venv"], job_json["slurm_job_id"]) == (
        {"HF_TOKEN": SECRET},
        "/images/vllm.sif",
        "42",
    )


# what sbatch says on stdout and on stderr though the job is queued
WORDS = {
    "warning": ("Submitted batch job 42", "sbatch: warning: the account is low"),
    "banner": ("Welcome to the cluster 7\nSubmitted batch job 42", ""),
    "cluster name": ("Submitted batch job 42 on cluster alps", ""),
    "all of them": (
        "Quota 10 of 20\nSubmitted batch job 42 on cluster alps 2",
        "sbatch: info: Submitted batch job soon\nsbatch: lua: 17",
    ),
}


@pytest.mark.parametrize("out, err", WORDS.values(), ids=WORDS)
def test_a_queued_job_is_not_lost(login, launch, out, err):
    login.answer("sbatch.out", out)
    if err:
        login.answer("sbatch.err", err)
    assert launch().slurm_job_id == "42"
    assert [call[0] for call in login.calls()] == ["sbatch", "scontrol"]
    assert files_of(login) == JOB_FILES


@pytest.mark.parametrize("status", ["1", "0"])
def test_sbatch_refuses(login, launch, status):
    words = "sbatch: error: Batch job submission failed: Invalid account"
    login.answer("sbatch.err", words)
    login.answer("sbatch.out", "")
    login.answer("sbatch.status", status)
    with pytest.raises(SlurmJobError) as refused:
        launch()
    assert words in str(refused.value)
    assert [call[0] for call in login.calls()] == ["sbatch"]
    assert files_of(login) == ["family"]


def test_sbatch_is_not_there(login, launch):
    login.path.joinpath("sbatch").unlink()
    with pytest.raises(SlurmJobError):
        launch()
    assert files_of(login) == ["family"]


def test_release_fails(login, launch):
    login.answer("scontrol.err", "slurm_suspend error: Access denied")
    login.answer("scontrol.status", "1")
    with pytest.raises(SubmitError) as refused:
        launch()
    assert isinstance(refused.value, SlurmJobError)
    assert isinstance(refused.value, MultinodeError)
    assert str(refused.value) == (
        "Job 42 was queued but could not be released, so it was cancelled: "
        "slurm_suspend error: Access denied"
    )
    assert login.calls()[1:] == [["scontrol", "release", "42"], ["scancel", "42"]]


def test_a_job_that_could_not_be_recorded_is_cancelled(login):
    """Of one node too: it runs, and nobody would know of it."""

    def full_disk(job_id):
        raise OSError("no space left")

    for name in ("one-node", "two-nodes"):
        options = LaunchOptions(**login.request())
        before = login.calls().count(["scancel", "42"])
        with pytest.raises(OSError, match="no space"):
            MultinodeClient().launch_model(name, options, on_submitted=full_disk)
        assert login.calls().count(["scancel", "42"]) == before + 1


def test_a_warning_of_scontrol_is_no_failure(login, launch):
    login.answer("scontrol.err", "scontrol: warning: the controller is slow")
    assert launch().slurm_job_id == "42"
    assert [call[0] for call in login.calls()] == ["sbatch", "scontrol"]


def test_scontrol_fails_without_a_word(login, launch):
    login.answer("scontrol.status", "1")
    with pytest.raises(SubmitError):
        launch()
    assert login.calls()[-1] == ["scancel", "42"]


def test_a_launch_that_breaks_after_sbatch_leaves_no_held_job(login, launch):
    # vec-inf cannot move the script into a directory that is not writable
    blocked = login.logs / "family/two-nodes.42/two-nodes.42.sbatch"
    blocked.mkdir(parents=True)
    blocked.joinpath("in-the-way").touch()
    with pytest.raises(OSError):
        launch()
    assert login.calls()[-1] == ["scancel", "42"]


def test_an_outer_job_is_not_passed_on(login, launch, monkeypatch):
    for name in ("SLURM_JOB_ID", "SLURM_MEM_PER_CPU", "SLURM_CPU_BIND", "SRUN_X"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    launch()
    environ = login.stub_dir.joinpath("sbatch.environ").read_text()
    found = re.findall(r"\b(SLURM_\w+|SRUN_\w+)=", environ)
    assert found == ["SLURM_CONF"]


def test_no_secret_on_a_command_line(login, launch):
    launch()
    assert [call for call in login.calls() if SECRET in "".join(call)] == []


def test_odd_places(login):
    logs = login.root / "it's a $(log) dir"
    request = login.request(log_dir=str(logs))
    launcher = MultinodeLauncher("two-nodes", request)
    assert launcher.launch().slurm_job_id == "42"
    assert sorted(path.name for path in logs.glob("family/*/*")) == [
        "two-nodes.42.json",
        "two-nodes.42.sbatch",
    ]


def test_nothing_of_the_caller_is_changed(login):
    request = login.request(env="A=1", vllm_args="--seed=1", bind="/a:/a")
    before = copy.deepcopy(request)
    options = LaunchOptions(**request)
    for _ in range(2):
        MultinodeLauncher("two-nodes", request).launch()
        launch_model(VecInfClient(), "two-nodes", options)
        MultinodeClient().launch_model("two-nodes", options=options)
    assert request == before
    assert options == LaunchOptions(**before)


def test_two_launches_of_one_launcher_class_share_nothing(login):
    first = MultinodeLauncher("two-nodes", login.request(env="A=1"))
    second = MultinodeLauncher("two-nodes", login.request(vllm_args="--seed=1"))
    assert (first.params["env"], second.params["env"]) == ({"A": "1"}, {})
    assert "--seed" not in first.params["engine_args"]


# ---------------------------------------------------------------- status

FAILURE = json.dumps({"message": "rank 1 on nid002 exited with status 1", "rank": 1})
CAUSE = "LLMHUB-ERROR: rank 1 on nid002 exited with status 1"
# state of the job, failure.json, status and reason where they are not vec-inf's own
STATES = {
    "failed": ("FAILED", FAILURE, ("FAILED", CAUSE)),
    "failed without a cause": ("FAILED", None, None),
    "completed": ("COMPLETED", None, None),
    "half written": ("FAILED", FAILURE[:10], None),
    "no object": ("FAILED", "[]", None),
    "requeued": ("PENDING", FAILURE, None),
    "of vec-inf's own job": ("CANCELLED", None, None),
}


@pytest.mark.parametrize("state, failure, ours", STATES.values(), ids=STATES)
def test_status(login, state, failure, ours):
    job_dir = login.logs / "family/two-nodes.42"
    job_dir.mkdir(parents=True)
    if failure is not None:
        job_dir.joinpath("failure.json").write_text(failure)
    login.answer(
        "scontrol.out",
        f"JobId=42 JobName=two-nodes-vec-inf JobState={state} Reason=None "
        f"StdOut={job_dir}/two-nodes.42.out",
    )
    wanted = asdict(VecInfClient().get_status("42"))
    if ours:
        wanted["server_status"], wanted["failed_reason"] = ours
    assert asdict(MultinodeClient().get_status("42")) == wanted


@pytest.mark.parametrize(
    "health, wanted",
    [(200, ("READY", None)), (503, ("FAILED", 503)), (None, ("FAILED", "refused"))],
)
def test_health_of_a_node_whose_name_has_v1(login, monkeypatch, health, wanted):
    """vec-inf takes the v1 of gpuv100-001 for that of the address."""
    import requests

    asked = []

    def get(url, timeout=None):
        asked.append((url, timeout))
        if "gpuv100-001" not in url:
            raise requests.ConnectionError("no such host")
        if health is None:
            raise requests.ConnectionError("refused")
        return SimpleNamespace(status_code=health)

    monkeypatch.setattr(requests, "get", get)
    job_dir = login.logs / "family/two-nodes.42"
    job_dir.joinpath("attempt-0").mkdir(parents=True)
    address = "http://gpuv100-001:8080/v1"
    job = job_dir / "two-nodes.42"
    job.with_suffix(".42.json").write_text(json.dumps({"server_address": address}))
    job.with_suffix(".42.err").write_text("INFO:     Application startup complete.\n")
    job.with_suffix(".42.out").touch()
    login.answer(
        "scontrol.out",
        "JobId=42 JobName=two-nodes-vec-inf JobState=RUNNING Reason=None "
        f"StdOut={job_dir}/two-nodes.42.out",
    )
    status = MultinodeClient().get_status("42")
    assert (status.server_status, status.failed_reason) == wanted
    assert (status.base_url == address) == (health == 200)
    assert asked[-1] == ("http://gpuv100-001:8080/health", 10)


@pytest.mark.parametrize(
    "asked",
    [
        {"vllm_args": "-t=2"},
        {"vllm_args": "-pc 2"},
        {"vllm_args": "-n3"},
        {"vllm_args": "--hf-token=secret"},
        {"vllm_args": "-dpr=0"},
        {"vllm_args": "-dpl=2"},
        {"hf_model": "--config=/x.yaml", "model_weights_parent_dir": "/none"},
        {"resource_type": "a100:8,gpu:a100"},
        {"gpus_per_node": -4},
    ],
    ids=str,
)
def test_refusal_of_a_way_round(nothing_happens, asked):
    request = nothing_happens.request(env="HF_HOME=/cache", **asked)
    with pytest.raises(PlanError) as refused:
        MultinodeLauncher("two-nodes", request)
    assert "secret" not in str(refused.value)


def test_sizes_come_last(login):
    params = MultinodeLauncher(
        "two-nodes", login.request(vllm_args="-pp=2,--seed=1")
    ).params
    assert list(params["engine_args"])[-2:] == [plan.TENSOR, plan.PIPELINE]


@pytest.mark.parametrize("form", ["-asc=4", "--api-server-count=4"])
def test_api_servers_are_rank_0s(login, form):
    params = MultinodeLauncher("two-nodes", login.request(vllm_args=form)).params
    made = MultinodeScriptGenerator(params).plan
    assert made.head_args == ("--api-server-count", "4")
    assert "--api-server-count" not in made.engine_args


def test_a_catalog_that_only_the_slow_loader_takes(tmp_path):
    text = (
        "models:\n  odd:\n    model_family: odd\n    model_type: LLM\n"
        "    gpus_per_node: 1\n    num_nodes: 2\n    vocab_size: 9\n"
        '    vllm_args: {--x: "\\ud83d\\ude00"}\n'
    )
    path = tmp_path / "models.yaml"
    path.write_text(text)
    # in an interpreter of its own: this one's yaml has the fast loader only
    code = (
        "import sys; from app.utils.vec_inf_multinode import launcher; "
        "entry = launcher._catalog_entry(None, 'odd', {'config': sys.argv[1]}); "
        "print(entry.engine, entry.num_nodes)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        cwd=support.TREE,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "vllm 2\n"


def test_a_catalog_that_cannot_be_read_is_not_passed_on(login):
    called = []
    client = SimpleNamespace(launch_model=lambda *a, **k: called.append(a))
    options = LaunchOptions(config="/no/such/models.yaml")
    with pytest.raises(FileNotFoundError):
        launch_model(client, "two-nodes", options)
    assert called == []
