"""Fixtures that every test module may use.

vec-inf reads its configuration when it is imported: the variables are set here, before
any test module is.
"""

import functools
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import support
import terminal as terminal_module

_SITE = Path(tempfile.mkdtemp(prefix="multinode-site-"))
_KNOBS = ("LLMHUB_MN_", "LLMFLUX_", "VEC_INF_", "SLURM_", "SRUN_")


def pytest_addoption(parser):
    """Add the one way to write golden files."""
    parser.addoption(
        "--regenerate-golden",
        action="store_true",
        default=os.environ.get("REGENERATE_GOLDEN") == "1",
        help="write tests/golden anew; read the difference before you commit it",
    )


def pytest_configure(config):
    """Give vec-inf its configuration, and clear what the caller's shell has set."""
    for name in list(os.environ):
        if name.startswith(_KNOBS) and name != "SLURM_CONF":
            del os.environ[name]
    support.fast_yaml()
    os.environ.update(support.write_site(_SITE / "config", {}, support.MODELS))


def pytest_unconfigure(config):
    """Remove the configuration."""
    shutil.rmtree(_SITE, ignore_errors=True)


def pytest_sessionstart(session):
    """Refuse to test another tree's package, an installed one for instance."""
    found = importlib.util.find_spec("app.utils.vec_inf_multinode")
    origin = Path(found.origin).parent if found and found.origin else None
    if origin != support.PACKAGE:
        raise pytest.UsageError(f"the tests would import {origin}")


@pytest.fixture
def login(tmp_path, monkeypatch):
    """Return a submitting machine with Slurm stand-ins, and put this process on it."""
    machine = support.Login(tmp_path / "login")
    support.make_weights(machine.weights, support.MODELS)
    for name, value in machine.environ.items():
        monkeypatch.setenv(name, value)
    return machine


@pytest.fixture
def terminal(login):
    """Return the console script on that machine."""
    started = terminal_module.Terminal(login)
    yield started
    started.close()


@pytest.fixture
def request_words(login):
    """Return what makes the words of a request."""
    return functools.partial(terminal_module.request_words, login)


@pytest.fixture
def shell(login, capfd, monkeypatch):
    """Return the program on that machine, in this process."""
    from app.utils.vec_inf_multinode.cli import main

    def run(*words, **environ):
        for name, value in {"COLUMNS": "120", **environ}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as end:
            main(list(words))
        done = capfd.readouterr()
        return SimpleNamespace(status=end.value.code, printed=done.out, said=done.err)

    return run


@pytest.fixture
def job(login):
    """Return a job to look at."""
    standin = terminal_module.StandinJob(login)
    yield standin
    standin.close()


LAB_REFUSAL = []


@pytest.fixture(scope="session")
def lab():
    """Return the one-machine cluster, up; taken down again if it was not up before."""
    sys.path.insert(0, str(support.TESTS / "lab"))
    from lab import CANNOT_RUN, Lab, LabError

    machine = Lab()
    was_up = machine.status()["up"]
    try:
        machine.up()
    except LabError as err:
        if getattr(err, "code", None) != CANNOT_RUN:
            raise
        LAB_REFUSAL.append(str(err))
        pytest.skip(f"the one-machine cluster cannot run here: {err}")
    yield machine
    machine.run(["scancel", f"--user={machine.user}"], timeout=30)
    if not was_up:
        machine.down()


@pytest.fixture(scope="session")
def hub(lab):
    """Return a hub's process on the cluster."""
    from hub import Hub

    process = Hub(lab)
    yield process
    process.close()


def pytest_terminal_summary(terminalreporter):
    """Say in the last lines what did not run, so that nobody takes it for passed."""
    for reason in LAB_REFUSAL[:1]:
        terminalreporter.section("THE CLUSTER TESTS (T6) DID NOT RUN", red=True)
        terminalreporter.line(reason)
