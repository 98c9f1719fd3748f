"""Odd values go all the way: plan, rendered script, bash, the container's start.

What is compared is what the stand-in for apptainer really got, byte for byte.
"""

import os
import re
import subprocess
from itertools import count

import node
import pytest
import support
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from node import RankCase, resolved_params

from app.utils.vec_inf_multinode import (
    MultinodeScriptGenerator,
    MultinodeSettings,
    render,
)

# Variables of the host, one hostile itself: its text must not be looked at again.
HOST = {"NAME": "$(:>ran) `:>ran` ${HOME} $HOME \\ ' \" * é,=", "HOME": "/no such"}

ODD = (
    "a,b",
    " a  b ",
    "'",
    '"',
    "a'b\"c",
    "\\'",
    '\\"',
    '\\\\"',
    "=",
    "a=b=c",
    "$(:>ran)",
    "`:>ran`",
    '"$(:>ran)"',
    "'$(:>ran)'",
    "'; :>ran; '",
    '"; :>ran; "',
    "${NAME",
    "$",
    "$$",
    "$1",
    "$?",
    "$((1+1))",
    "${NAME:-x}",
    "${!NAME}",
    "$[1+1]",
    "; :>ran",
    "| :>ran",
    "& :>ran &",
    ">ran",
    "<(:>ran)",
    "\\",
    "\\\\",
    "a\\nb",
    "\\$HOME",
    "\\`:>ran\\`",
    "é世界🦙",
    "\N{NO-BREAK SPACE}",
    "-",
    "--",
    "-x",
    "--x=y",
    "-5",
    "-0.5",
    "",
    " ",
    "*",
    "?[a-z]*",
    "~",
    "~root",
    "{a,b}",
    "!",
    "!!",
    "%s%d%j",
    "#",
    "a #b",
    "\t",
    "\x01",
    "\x7f",
    "\x01\x7f\x1b[0m",
    "LLMHUB_END_OF_RANK_SCRIPT",
    '{"a": [1, "b c"]}',
    "(a)",
    ")",
    "^",
    "$NAME",
    "${NAME}",
    "<$NAME>${NAME}<",
    "\\$NAME",
    "$NO_SUCH_NAME_HERE",
    "$NAME$NAME",
)

_FRAGMENTS = st.sampled_from(
    [*"'\"`\\$;&|<>(){}[]*?!%#~^=,-: \t", "$(", "${", "}", "$NAME", "${NAME}", "\\n"]
)
_LINES = st.text(
    st.characters(
        codec="utf-8", exclude_characters="\0\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
    ),
    max_size=5,
)


def odd_text():
    """Return single lines with many characters that mean something to a shell."""
    return st.lists(st.one_of(_FRAGMENTS, _FRAGMENTS, _LINES), max_size=8).map("".join)


def expanded(value):
    """Return a value with references to variables replaced, and nothing else."""
    reference = r"\$(?:\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*))"
    return re.sub(reference, lambda x: HOST.get(x.group(1) or x.group(2), ""), value)


def start_rank(root, env_values, arg_values, locale="C.UTF-8"):
    """Return what a rank's container got for these values."""
    env = {f"V{number}": value for number, value in enumerate(env_values)}
    args = {f"--v{number}": value for number, value in enumerate(arg_values)}
    rank = RankCase(
        rank=1,
        params={"env": env, "engine_args": args},
        environ={**HOST, "LC_ALL": locale},
    )
    run = rank.start(root)
    assert list(run.root.rglob("ran")) == []
    return run.container


def read_args(argv, number):
    """Read the values of --v0, --v1, ... back from vllm's own part of the argv."""
    start, end = argv.index("--headless") + 1, argv.index("--nnodes")
    items = iter(argv[start:end])
    found = []
    for index in range(number):
        name, glued, value = next(items).partition("=")
        assert name == f"--v{index}"
        if not glued:
            value = next(items)
            # argparse would take it for the next option, unless it is a number
            assert not re.match(r"-(?!\d+(\.\d+)?$)", value)
        found.append(value)
    sizes = ["--tensor-parallel-size", "4", "--pipeline-parallel-size", "2"]
    assert list(items) == sizes
    return found


def check_values(container, env_values, arg_values):
    """Compare what a container got with what was asked for."""
    for number, value in enumerate(env_values):
        assert container.container_env(f"V{number}") == expanded(value), value
    assert read_args(container.text, len(arg_values)) == list(arg_values)


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_odd_values(tmp_path, locale):
    """Each value that is known to be trouble arrives as it is."""
    container = start_rank(tmp_path / "root", ODD, ODD, locale)
    check_values(container, ODD, ODD)


_numbers = count()


@settings(
    max_examples=4,
    deadline=None,
    derandomize=True,
    database=None,
    # many values in one example: what differs is named, and to shrink would take long
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(
    st.lists(odd_text(), min_size=30, max_size=40),
    st.lists(odd_text(), min_size=30, max_size=40),
    st.sampled_from(["C", "C.UTF-8"]),
)
def test_any_values(tmp_path_factory, env_values, arg_values, locale):
    """So does any other line of text."""
    root = tmp_path_factory.mktemp("quoting") / str(next(_numbers))
    check_values(
        start_rank(root, env_values, arg_values, locale), env_values, arg_values
    )


CACHES = ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME", "TORCH_HOME", "VLLM_CACHE_ROOT")


def test_odd_cache_paths(tmp_path):
    """A cache path is resolved, not evaluated."""
    values = ["/a b/c'd", "/$(:>ran)", '/`:>ran`"', "/-x;:>ran", "/é\\n*"]
    env = dict(zip(CACHES, values))
    run = RankCase(params={"env": env}).start(tmp_path / "root")
    assert {name: run.container.container_env(name) for name in CACHES} == env
    assert list(run.root.rglob("ran")) == []


def test_structures_are_json(tmp_path):
    """A value that the catalog has as YAML arrives as JSON, in one item."""
    args = {"--v0": {"a": ["b c", '"']}, "--v1": '{"x": "$HOME"}'}
    run = RankCase(rank=1, params={"engine_args": args}).start(tmp_path / "root")
    found = read_args(run.container.text, 2)
    assert found == ['{"a": ["b c", "\\""]}', '{"x": "$HOME"}']


# ---------------------------------------------------------------- the plan in bash


FIELDS = {
    "hf_model": "PLAN_MODEL",
    "bind": "PLAN_BIND",
    "work_dir": "PLAN_WORK_DIR",
    "src_dir": "PLAN_SRC_DIR",
}


@settings(max_examples=10, deadline=None, derandomize=True, database=None)
@given(st.fixed_dictionaries({name: odd_text() for name in FIELDS}))
def test_fields_are_data(tmp_path_factory, values):
    """A field of the request is one quoted value, whatever it holds."""
    # a file name of Slurm's, where '%' and a backslash are refused
    values["work_dir"] = values["work_dir"].replace("%", "").replace("\\", "")
    # an option of vLLM's, where a leading dash is refused
    values["hf_model"] = values["hf_model"].lstrip("-")
    root = tmp_path_factory.mktemp("fields")
    generator = MultinodeScriptGenerator(
        resolved_params(root, **values), settings=MultinodeSettings()
    )
    block = render.plan_block(generator.plan, ready_signature="ready")
    shown = " ".join(f'"${name}"' for name in FIELDS.values())
    run = subprocess.run(
        ["/bin/bash", "-c", f"{block}\nprintf '%s\\0' {shown}"],
        capture_output=True,
        cwd=root,
        env={"LC_ALL": "C.UTF-8"},
        timeout=support.TIME_LIMIT,
        check=True,
    )
    found = [os.fsdecode(item) for item in run.stdout.split(b"\0")[:-1]]
    weights = f"{root}/weights/{node.MODEL}"
    asked = {**values, "hf_model": values["hf_model"] or weights}
    assert found == [asked[name] for name in FIELDS]
    assert run.stderr == b""
    assert list(root.iterdir()) == []


# ---------------------------------------------------------------- #SBATCH lines


class SbatchError(Exception):
    """The line that sbatch would refuse."""


def sbatch_tokens(line, single_quotes=True, quoted_comment=False):
    """Split a ``#SBATCH`` line as sbatch does.

    Double and single quotes toggle; a backslash keeps the next character, inside
    quotes too; white space outside quotes ends an argument, after a backslash as
    well; an unescaped ``#`` outside quotes starts a comment.

    Parameters
    ----------
    line : str
        What follows ``#SBATCH``.
    single_quotes : bool
        Old releases take a single quote for a plain character.
    quoted_comment : bool
        Old releases start a comment inside quotes too.
    """
    tokens, i = [], 0
    while True:
        while i < len(line) and line[i] in " \t\n\v\f\r":
            i += 1
        if i == len(line) or line[i] == "#":
            return tokens
        token, quote, escaped = "", "", False
        while i < len(line) and (quote or line[i] not in " \t\n\v\f\r"):
            char = line[i]
            if escaped:
                escaped = False
                token += char
            elif char == "\\":
                escaped = True
            elif quote and char == quote:
                quote = ""
            elif not quote and (char == '"' or char == "'" and single_quotes):
                quote = char
            elif char == "#" and (not quote or quoted_comment):
                tokens.append(token)
                return tokens
            else:
                token += char
            i += 1
        if quote:
            raise SbatchError(f"unmatched {quote} in {line!r}")
        tokens.append(token)


NEW, OLD = {}, {"single_quotes": False, "quoted_comment": True}


@pytest.mark.parametrize(
    "line, tokens",
    [
        (" --a=b --c", ["--a=b", "--c"]),
        (' --a="b c"', ["--a=b c"]),
        (" --a='b c'", ["--a=b c"]),
        (' --a="b \\" c"', ['--a=b " c']),
        (" --a=b # c", ["--a=b"]),
        (" --a=b#c", ["--a=b"]),
        (" --a=b\\#c", ["--a=b#c"]),
        (' --a="b#c"', ["--a=b#c"]),
        (" --a=\\ b", ["--a=", "b"]),
    ],
)
def test_model_of_sbatch(line, tokens):
    """The model itself, on lines of Slurm's manual."""
    assert sbatch_tokens(line) == tokens


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(odd_text())
def test_sbatch_value(value):
    """One argument comes out, with the value that went in, whatever the release."""
    line = f" --account={render.sbatch_value(value)}"
    assert sbatch_tokens(line, **NEW) == [f"--account={value}"]
    assert sbatch_tokens(line, **OLD) == [f"--account={value}"]


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    st.fixed_dictionaries(
        {
            name: odd_text().filter(bool)
            for name in ("account", "partition", "qos", "nodelist", "exclude", "time")
        }
    )
)
def test_directives_of_the_script(tmp_path_factory, values):
    """No field can add a directive, a line or an argument."""
    root = tmp_path_factory.getbasetemp() / "never made"
    generator = MultinodeScriptGenerator(
        resolved_params(root, **values), settings=MultinodeSettings()
    )
    shebang, *lines = generator._generate_shebang().split("\n")
    assert shebang == "#!/bin/bash"
    assert all(line.startswith("#SBATCH ") for line in lines)
    tokens = [sbatch_tokens(line[len("#SBATCH") :]) for line in lines]
    assert all(len(items) == 1 for items in tokens)
    found = [items[0] for items in tokens]
    assert f"--job-name={node.MODEL}-vec-inf" in found
    for name, value in values.items():
        assert found.count(f"--{name}={value}") == 1
