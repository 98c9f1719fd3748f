"""What must stay small, by count: no time is measured here.

The numbers behind the limits are those of ``make bench``.
"""

import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import support
import yaml
from tracing import serve_for, traced, wait_for

from app.utils.vec_inf_multinode import launch_model, launcher

FEW, MANY = 2, 6
WINDOW = 3


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Jobs of few and of many nodes: that served, and whose last rank stayed away."""
    root = tmp_path_factory.mktemp("traced")
    with ThreadPoolExecutor() as pool:
        found = {
            (nodes, absent): pool.submit(
                traced,
                root / f"{nodes}-{absent}",
                nodes,
                wait_for(WINDOW, nodes - 1) if absent else serve_for(WINDOW),
                absent,
            )
            for nodes in (FEW, MANY)
            for absent in (False, True)
        }
    return {key: run.result() for key, run in found.items()}


@pytest.fixture
def served(runs):
    """Runs that served for a while, by their number of nodes."""
    return {nodes: run for (nodes, absent), run in runs.items() if not absent}


@pytest.fixture
def waited(runs):
    """Runs whose last rank was late, by their number of nodes."""
    return {nodes: run for (nodes, absent), run in runs.items() if absent}


def test_file_operations_grow_with_the_nodes(served):
    """From start to ready: a constant, and some 24 for each node."""
    windows = {
        nodes: run.window(run.notes["started"], run.notes["ready"])
        for nodes, run in served.items()
    }
    calls = {nodes: window.calls - window.looks for nodes, window in windows.items()}
    assert calls[FEW] < 130
    assert calls[MANY] - calls[FEW] < 30 * (MANY - FEW)


def test_few_processes_on_each_node(served):
    """The rank script, what ends a container that it leaves, and the log's writer."""
    for run in served.values():
        for node, lines in run.notes["processes"].items():
            assert 0 < len(lines) <= 3, f"{node}: {lines}"


def test_serving_takes_no_file_operations(served):
    """A job that serves leaves the shared file system alone."""
    for run in served.values():
        assert run.window(run.notes["ready"], run.notes["end"]).calls == 0


def test_waiting_does_not_grow_with_the_nodes(waited):
    """While a rank is late only the directory of markers is looked at."""
    for run in waited.values():
        window = run.window(run.notes["waiting"], run.notes["end"])
        assert 0 < window.calls < 25 * window.seconds


def launch(login, model):
    """One launch by the hub's call, with the number of YAML texts that it parsed."""
    from vec_inf.client import LaunchOptions, VecInfClient

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        launch_model(VecInfClient(), model, LaunchOptions(**login.request()))


@pytest.mark.parametrize("model", ["one-node", "two-nodes"])
def test_a_catalog_is_parsed_once(login, model, monkeypatch):
    """Our own look at the catalog is one parse for each text, not for each launch."""
    parses = []
    parse = yaml.load

    def load(stream, Loader):
        parses.append(Loader)
        return parse(stream, Loader=Loader)

    launcher._parsed.cache_clear()
    monkeypatch.setattr(yaml, "load", load)
    launch(login, model)
    assert yaml.CSafeLoader in parses
    parses.clear()
    launch(login, model)
    assert set(parses) == {yaml.SafeLoader}, "vec-inf itself, and nothing else"


def test_the_import_brings_nothing_slow():
    """What vec-inf's client has not imported: only what a launch is made of."""
    code = (
        "import sys, vec_inf.client; before = set(sys.modules); "
        "import app.utils.vec_inf_multinode; print(*set(sys.modules) - before)"
    )
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        timeout=support.TIME_LIMIT,
        check=True,
        cwd=support.TREE,
    )
    own = "app.utils.vec_inf_multinode"
    needed = ("errors", "launcher", "plan", "render", "seam", "settings", "slurm")
    ours = {"app", "app.utils", own, *(f"{own}.{name}" for name in needed)}
    assert set(found.stdout.split()) - {"shlex"} == ours
