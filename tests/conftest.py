"""Fixtures that every test module may use.

vec-inf reads its configuration when it is imported: the variables are set here, before
any test module is.
"""

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import support

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
