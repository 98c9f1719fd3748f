"""Every removal of `removals.py` is noticed."""

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import support
from removals import REMOVALS

pytestmark = pytest.mark.removals

TIME_LIMIT = 180
# for the named tests of all rows together
CONTROL_LIMIT = 1500
WORKERS = 2
# pytest's exit statuses
PASSED, FAILED = 0, 1
COPIED = ("app", "tests", "pyproject.toml")


def copy_of_tree(directory):
    """Copy what the tests need."""
    directory.mkdir()
    ignore = shutil.ignore_patterns("__pycache__", "lab", "removals.py")
    for name in COPIED:
        source = support.TREE / name
        if source.is_dir():
            shutil.copytree(source, directory / name, ignore=ignore)
        else:
            shutil.copy(source, directory)
    return directory


def take_out(tree, removal):
    """Apply a removal to a copy."""
    path = tree / "app/utils/vec_inf_multinode" / removal.file
    text = path.read_text()
    assert text.count(removal.old) == 1, "not found exactly once"
    path.write_text(text.replace(removal.old, removal.new))
    if path.suffix == ".sh":
        check = ["bash", "-n", str(path)]
        subprocess.run(check, check=True, timeout=10)
    elif path.suffix == ".py":
        compile(path.read_text(), str(path), "exec")


def run_tests(tree, tests, limit=TIME_LIMIT):
    """Run tests of a copy: exit status, and what pytest said.

    The copy's own conftest refuses to test another tree's package.
    """
    options = ["-q", "-p", "no:cacheprovider", *(["-x"] if len(tests) == 1 else [])]
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            *options,
            *(f"tests/{test}" for test in tests),
        ],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )
    return run.returncode, run.stdout + run.stderr


def unnoticed(said, tests):
    """Return those of the tests that pytest's summary does not call failed."""
    lines = re.findall(r"^(?:SUBFAILED.*?|FAILED|ERROR) tests/(.*)$", said, re.M)
    return [
        test
        for test in tests
        if not any(re.match(re.escape(test) + r"(?:[\[ ]|$)", line) for line in lines)
    ]


def notice(directory, removal):
    """Take something out of a copy and run the named tests."""
    tree = copy_of_tree(directory)
    take_out(tree, removal)
    found = run_tests(tree, removal.tests)
    shutil.rmtree(tree)
    return found


def control(directory, removals):
    """Run the named tests of an untouched copy."""
    tests = dict.fromkeys(test for removal in removals for test in removal.tests)
    return run_tests(copy_of_tree(directory), tests, CONTROL_LIMIT)


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """Return a future for each selected row, and for the control."""
    top = tmp_path_factory.mktemp("removals")
    rows = support.selected(request, "removal")
    with ThreadPoolExecutor(WORKERS) as executor:
        futures = {
            row.name: executor.submit(notice, top / str(number), row)
            for number, row in enumerate(rows)
        }
        if any(item.get_closest_marker("slow") for item in request.session.items):
            futures[control] = executor.submit(control, top / "control", REMOVALS)
        yield futures
        executor.shutdown(cancel_futures=True)


@pytest.mark.parametrize("removal", REMOVALS, ids=lambda removal: removal.name)
def test_a_removal_is_noticed(results, removal):
    status, said = results[removal.name].result()
    assert status == FAILED, said
    assert unnoticed(said, removal.tests) == [], said


@pytest.mark.slow  # make test runs them all on the tree itself
def test_the_named_tests_pass_when_nothing_is_taken_out(results):
    status, said = results[control].result()
    assert status == PASSED, said


def test_names_are_unique():
    assert len({removal.name for removal in REMOVALS}) == len(REMOVALS)


def test_a_copy_is_what_is_tested(tmp_path):
    tree = copy_of_tree(tmp_path / "tree")
    source = Path("app/utils/vec_inf_multinode/__init__.py")
    tree.joinpath(source).unlink()
    status, said = run_tests(tree, ["test_plan.py::test_defaults"])
    assert status not in (PASSED, FAILED)
    assert "the tests would import" in said
