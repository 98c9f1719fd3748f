"""The shell, read by its linter: what is shipped, what is generated, the stand-ins."""

import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import support
from node import rank_script

SCRIPTS = sorted(support.PACKAGE.joinpath("scripts").iterdir())
GOLDENS = sorted(p for p in support.TESTS.joinpath("golden").iterdir() if p.is_file())


def is_shell(path: Path) -> bool:
    """Tell whether a file is a shell script, or a part of one."""
    first = path.read_bytes().split(b"\n", 1)[0]
    return path.suffix == ".sh" or re.fullmatch(rb"#!/bin/(ba)?sh", first) is not None


STUBS = sorted(
    path
    for top in (support.TESTS / "stubs", support.TESTS / "lab")
    for path in top.rglob("*")
    if path.is_file() and is_shell(path)
)


def name_of(path: Path) -> str:
    """Name of a file for a test's id."""
    return str(path.relative_to(support.TREE))


def lint(path: Path, *options: str) -> str:
    """Return what shellcheck says, empty if nothing."""
    shellcheck = shutil.which("shellcheck")
    assert shellcheck, "shellcheck is not installed: apt-get install shellcheck"
    run = subprocess.run(
        [shellcheck, "-x", *options, str(path)],
        capture_output=True,
        text=True,
        cwd=support.TREE,
        timeout=support.TIME_LIMIT,
        check=False,
    )
    assert run.returncode in (0, 1), run.stderr
    return run.stdout


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    """Start a shellcheck of every file; a generated rank script is one of them."""
    directory = tmp_path_factory.mktemp("shell")
    with ThreadPoolExecutor(os.cpu_count()) as executor:
        started = {path: executor.submit(lint, path) for path in (*SCRIPTS, *STUBS)}
        for golden in GOLDENS:
            script = rank_script(golden.read_text(), directory / golden.name)
            started[golden] = executor.submit(lint, golden, "-S", "warning")
            # some of the values are for the batch script only
            options = ("-S", "warning", "-e", "SC2034")
            started["rank", golden] = executor.submit(lint, script, *options)
        yield started


@pytest.mark.parametrize("path", [*SCRIPTS, *STUBS], ids=name_of)
def test_shellcheck(path, verdicts):
    """Nothing to say about what people write."""
    assert verdicts[path].result() == ""


def test_there_are_goldens():
    """An empty directory would make the next tests pass."""
    assert GOLDENS


@pytest.mark.parametrize("path", GOLDENS, ids=name_of)
def test_shellcheck_generated(path, verdicts):
    """Nothing serious to say about a batch script, or about the rank script in it."""
    assert verdicts[path].result() == ""
    assert verdicts["rank", path].result() == ""


@pytest.mark.parametrize("path", [*SCRIPTS, *STUBS, *GOLDENS], ids=name_of)
def test_bash_reads_it(path):
    """Bash finds no error of syntax."""
    run = subprocess.run(
        ["/bin/bash", "-n", str(path)],
        capture_output=True,
        text=True,
        timeout=support.TIME_LIMIT,
        check=False,
    )
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.parametrize("path", [*SCRIPTS, *STUBS], ids=name_of)
def test_every_exception_has_a_reason(path):
    """A check is switched off for one place, and the place says why."""
    text = path.read_text()
    for line in re.findall(r"^.*\bshellcheck\s+disable=.*$", text, re.MULTILINE):
        assert re.fullmatch(r"\s*# shellcheck disable=SC[\d,SC]+ # \S.{8,}", line), line
