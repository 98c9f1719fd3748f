"""The shell, read by its linter: what is shipped, what is generated, the stand-ins."""

import json
import re
import shutil
import subprocess
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


def lint(paths: list[Path], *options: str) -> dict[Path, list[str]]:
    """Return what shellcheck says of each file; one process reads them all."""
    shellcheck = shutil.which("shellcheck")
    assert shellcheck, "shellcheck is not installed: apt-get install shellcheck"
    run = subprocess.run(
        [shellcheck, "-x", "-f", "json1", *options, *map(str, paths)],
        capture_output=True,
        text=True,
        cwd=support.TREE,
        timeout=support.TIME_LIMIT,
        check=False,
    )
    assert run.returncode in (0, 1), run.stderr
    said = {path: [] for path in paths}
    for remark in json.loads(run.stdout)["comments"]:
        line = "{file}:{line}: SC{code}: {message}".format(**remark)
        said[Path(remark["file"])].append(line)
    return said


@pytest.fixture(scope="module")
def written():
    """What shellcheck says of the files that people write."""
    return lint([*SCRIPTS, *STUBS])


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    """What shellcheck says of each batch script and of the rank script in it."""
    directory = tmp_path_factory.mktemp("shell")
    ranks = {g: rank_script(g.read_text(), directory / g.name) for g in GOLDENS}
    said = lint(GOLDENS, "-S", "warning")
    # some of the values are for the batch script only
    said_of_ranks = lint([*ranks.values()], "-S", "warning", "-e", "SC2034")
    return {g: said[g] + said_of_ranks[ranks[g]] for g in GOLDENS}


@pytest.mark.parametrize("path", [*SCRIPTS, *STUBS], ids=name_of)
def test_shellcheck(path, written):
    """Nothing to say about what people write."""
    assert written[path] == []


def test_there_are_goldens():
    """An empty directory would make the next tests pass."""
    assert GOLDENS


@pytest.mark.parametrize("path", GOLDENS, ids=name_of)
def test_shellcheck_generated(path, generated):
    """Nothing serious to say about a batch script, or about the rank script in it."""
    assert generated[path] == []


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
