"""``render``: what would be submitted, shown; and the options that vec-inf's has."""

import dataclasses
import json
import os
import re
import subprocess

import pytest
import support
from vec_inf.cli._cli import launch as vec_infs_launch
from vec_inf.client import LaunchOptions

from app.utils.vec_inf_multinode import MultinodeClient, preview
from app.utils.vec_inf_multinode.cli.main import cli

KEY, TOKEN = "sk-very-secret-key", "hf_0123456789"
LAUNCHING = ("render", "launch", "serve")


@pytest.fixture
def no_slurm(login):
    """Take every command of Slurm away: a laptop."""
    for command in login.path.iterdir():
        command.unlink()


def everything(login):
    """Every file and directory of the machine: what, how and when."""
    return {
        os.path.join(directory, name): (state.st_mode, state.st_size, state.st_mtime_ns)
        for directory, folders, files in os.walk(login.root)
        for name in (*folders, *files)
        if (state := os.lstat(os.path.join(directory, name)))
    }


@pytest.mark.parametrize("command", LAUNCHING)
def test_the_options_are_vec_infs(command):
    """Every option of vec-inf's launch, by the same names and types."""
    own = {tuple(p.opts): p for p in cli.commands[command].params}
    for param in vec_infs_launch.params:
        assert own[tuple(param.opts)].type == param.type
        assert own[tuple(param.opts)].nargs == param.nargs


def test_every_option_reaches_the_launch():
    """No option of vec-inf's is one that its own launch options do not have."""
    names = {param.name for param in vec_infs_launch.params}
    fields = {field.name for field in dataclasses.fields(LaunchOptions)}
    assert names - fields == {"model_name", "json_mode"}


@pytest.mark.parametrize("model", ["two-nodes-sized", "one-node", "two-nodes-sglang"])
@pytest.mark.parametrize("more", [[], ["--script"], ["--json-mode", "--script"]])
def test_nothing_is_written_and_no_slurm_is_needed(
    terminal, login, no_slurm, request_words, model, more
):
    before = everything(login)
    shown = terminal.run("render", *request_words(model, env=f"K={KEY}"), *more)
    assert shown.status == 0, shown
    assert everything(login) == before
    assert model in shown.printed and shown.said == ""


def test_nothing_is_written_by_a_refusal(terminal, login, no_slurm, request_words):
    before = everything(login)
    shown = terminal.run("render", *request_words(vllm_args="-tp=3"))
    assert shown.status == 3
    assert "GPU(s) would be billed idle" in shown.said
    assert (shown.printed, everything(login)) == ("", before)


def test_the_log_directory_is_not_made(login):
    """Neither through the command nor through the library."""
    request = login.request(log_dir=str(login.root / "new" / "logs"))
    found = MultinodeClient().preview_model("two-nodes", LaunchOptions(**request))
    assert f"--output={login.root}/new/logs/family/two-nodes.%j/" in found.script
    assert not login.root.joinpath("new").exists()


@pytest.mark.parametrize("model", ["two-nodes-sized", "one-node", "two-nodes-sglang"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_script_is_the_one_that_is_submitted(login, model):
    """To the byte, with its secrets."""
    options = LaunchOptions(
        **login.request(env=f"K={KEY},HF_HOME=/scratch/hf", bind="/a:/b", time="1:0:0")
    )
    found = MultinodeClient().preview_model(model, options, show_secrets=True)
    MultinodeClient().launch_model(model, options)
    (script,) = login.logs.glob("family/*.42/*.sbatch")
    assert found.script == script.read_text()


def rows(printed):
    """Cells of the rows of a table, by the first cell."""
    lines = [line.split("│") for line in printed.splitlines() if "│" in line]
    return {
        cells[1].strip(): tuple(c.strip() for c in cells[2:4])
        for cells in lines
        if len(cells) > 4
    }


def test_the_table_says_where_each_value_came_from(shell, request_words):
    more = dict(num_nodes="4", env="A=1,VLLM_PORT=5", vllm_args="-tp=2,-pp=8,--seed=1")
    words = request_words("two-nodes-sized", **more)
    shown = shell("render", *words, LLMHUB_MN_STALL_TIMEOUT="60")
    assert shown.status == 0, shown
    assert "two-nodes-sized: multi-node" in shown.printed
    assert "4 nodes (typed), engine vllm (site): one srun step" in shown.printed
    found = rows(shown.printed)
    assert found["nodes"] == ("4", "typed")
    assert found["GPUs per node"] == ("4", "catalog")
    assert found["walltime"] == ("08:00:00", "site")
    assert found["--tensor-parallel-size"] == ("2", "typed")
    assert found["--pipeline-parallel-size"] == ("8", "typed")
    assert found["world size"] == ("16", "derived")
    assert found["--max-model-len"] == ("32768", "catalog")
    assert found["--seed"] == ("1", "typed")
    assert found["env NCCL_DEBUG"] == ("***", "catalog")
    assert found["env A"] == ("***", "typed")
    assert found["env left out"] == ("VLLM_PORT", "set by each rank")
    assert found["LLMHUB_MN_STALL_TIMEOUT"] == ("60", "environment")
    assert found["container"][0].startswith("apptainer exec --nv --containall")


def test_derived_sizes_are_called_so(shell, request_words):
    found = rows(shell("render", *request_words("two-nodes")).printed)
    assert found["--tensor-parallel-size"] == ("4", "derived")


def test_a_launch_of_vec_infs_own_says_so(shell, request_words):
    shown = shell("render", *request_words("one-node"), "--script")
    assert "one-node: vec-inf's own launch" in shown.printed
    assert "1 node (catalog), engine vllm (site): vec-inf serves one" in shown.printed
    assert "vllm serve" in shown.printed and "llmhub" not in shown.printed
    shown = shell("render", *request_words("two-nodes-sglang"))
    assert "vec-inf serves sglang over several nodes itself" in shown.printed


def test_json_is_the_whole_plan(shell, request_words):
    words = request_words("two-nodes", env=f"K={KEY}")
    shown = shell("render", *words, "--json-mode")
    found = json.loads(shown.printed)
    fields = {field.name for field in dataclasses.fields(preview.Preview)}
    assert set(found) == fields - {"script"}
    assert {"name": "world size", "value": "8", "origin": "derived"} in (
        found["parallelism"]
    )
    shown = shell("render", *words, "--json-mode", "--script")
    assert json.loads(shown.printed)["script"].startswith("#!/bin/bash\n")


def test_json_of_a_refusal(shell, request_words):
    shown = shell("render", *request_words("no-such"), "--json-mode")
    assert shown.status == 3
    error = json.loads(shown.printed)["error"]
    assert error["kind"] == "ModelConfigurationError"
    assert error["exit_code"] == 3 and "no-such" in error["message"]


# Secrets


@pytest.mark.parametrize("mode", [[], ["--script"], ["--json-mode", "--script"]])
@pytest.mark.parametrize("model", ["two-nodes", "one-node"])
def test_no_secret_is_shown_unless_asked_for(shell, request_words, model, mode):
    env = f"VLLM_API_KEY={KEY},HF_TOKEN={TOKEN},HF_HOME=/scratch/s3cr3t"
    words = request_words(
        model,
        env=env,
        bind="/scratch/s3cr3t:/hf,/other",
        vllm_args=f"--tokenizer={TOKEN}/x,--seed=1",
        hf_model="org/model",
    )
    secrets = (KEY, TOKEN, "s3cr3t")
    shown = shell("render", *words, *mode)
    assert shown.status == 0, shown
    assert not [s for s in secrets if s in shown.printed + shown.said]
    shown = shell("render", *words, *mode, "--show-secrets")
    assert all(s in shown.printed for s in secrets)


def test_a_key_among_the_engine_args_is_a_secret(shell, request_words):
    words = request_words("one-node", vllm_args=f"--api-key={KEY}")
    shown = shell("render", *words, "--script")
    assert "--api-key ***" in shown.printed and KEY not in shown.printed


def test_the_mask_leaves_the_rest_of_the_script_alone(login):
    """Values that are also words of the script, with quotes, or almost nothing."""
    hostile = {
        "A": "bash",
        "B": "1",
        "C": "it's",
        "D": "$HOME/x",
        "E": "two-nodes",
        "F": "",
        "G": "llmhub_serve",
        "H": "'***'",
    }
    login.root.joinpath("env").write_text(
        "".join(f"{name}={value}\n" for name, value in hostile.items())
    )

    def script(show):
        options = LaunchOptions(**login.request(env=str(login.root / "env")))
        client = MultinodeClient()
        return client.preview_model("two-nodes", options, show_secrets=show).script

    hidden, whole = script(False).splitlines(), script(True).splitlines()
    differing = [(a, b) for a, b in zip(hidden, whole) if a != b]
    assert len(hidden) == len(whole)
    # in the batch script and in the rank script
    assert [a for a, _ in differing] == [
        "PLAN_ENV_VALUES=(" + " ".join(["'***'"] * len(hostile)) + ")"
    ] * 2
    check = subprocess.run(
        ["/bin/bash", "-n"], input="\n".join(hidden), text=True, timeout=10
    )
    assert check.returncode == 0


@pytest.mark.parametrize(
    "value, elsewhere",
    [
        pytest.param(KEY, "***", id="long"),
        # it may be a plain word there
        pytest.param("/hf", "/hf", id="short"),
    ],
)
def test_a_masked_request_is_changed_in_a_copy(value, elsewhere):
    """A value of env that stands elsewhere, and as a bind, where vec-inf puts it."""
    params = {"env": {"A": value}, "engine_args": {"--x": value}, "bind": value}
    assert preview.masked(params) == {
        "env": {"A": "***"},
        "engine_args": {"--x": elsewhere},
        "bind": "***",
    }
    assert params["env"] == {"A": value}


def test_a_short_value_is_masked_in_its_own_place_only(shell, request_words):
    words = request_words(env="OMP_NUM_THREADS=1", vllm_args="--max-model-len=1024")
    found = rows(shell("render", *words).printed)
    assert found["--max-model-len"][0] == "1024"
    assert found["env OMP_NUM_THREADS"][0] == "***"


# What hostile words do


def test_markup_and_escapes_of_a_request_are_text(shell, request_words):
    args = "--served=[bold red]x[/bold red],--y=\x1b]0;title\x07z"
    shown = shell("render", *request_words("one-node", vllm_args=args))
    assert "[bold red]x[/bold red]" in shown.printed
    assert "\x1b]" not in shown.printed and "\x07" not in shown.printed


def test_a_warning_of_vec_infs_is_one_line(shell, request_words):
    words = request_words("one-node", hf_model="org/model")
    shown = shell("render", *words)
    assert shown.status == 0
    assert re.fullmatch(r"Warning: Model weights found at .*\n", shown.said)


# The program


def test_help_has_an_example_of_every_command(shell, request_words):
    for command in cli.commands:
        shown = shell(command, "--help")
        assert shown.status == 0
        assert re.search(
            rf"Examples?:\n  \S*.*vec-inf-multinode {command}", shown.printed
        )


def test_help_points_to_vec_infs_own_commands(shell, request_words):
    shown = shell("--help")
    assert "list, status, metrics, shutdown and cleanup are vec-inf's" in shown.printed


@pytest.mark.parametrize(
    "words", [["nonsense"], ["render"], ["render", "x", "--num-nodes=two"]]
)
def test_bad_input_is_2(shell, request_words, words):
    assert shell(*words).status == 2


def test_another_vec_inf_is_refused(terminal, request_words, tmp_path):
    """The version, and what is missing, before any command."""
    info = tmp_path / "vec_inf-0.9.1.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text("Name: vec-inf\nVersion: 0.9.1\n")
    path = os.pathsep.join([str(tmp_path), str(support.TREE)])
    shown = terminal.run("render", *request_words(), "--json-mode", PYTHONPATH=path)
    assert shown.status == 3
    error = json.loads(shown.printed)["error"]
    assert "need vec-inf 0.9.0, found 0.9.1" in error["message"]


def test_the_shell_completes_commands_and_options(terminal):
    def completed(words):
        shown = terminal.run(
            _VEC_INF_MULTINODE_COMPLETE="bash_complete",
            COMP_WORDS=f"vec-inf-multinode {words}",
            COMP_CWORD=str(len(words.split())),
        )
        return shown.printed.split()

    assert completed("re") == ["plain,render"]
    assert completed("serve --num") == ["plain,--num-nodes"]
