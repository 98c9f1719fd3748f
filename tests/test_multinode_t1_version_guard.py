"""T1: another vec-inf gets no multi-node job, and keeps its single-node ones.

The other vec-infs are the installed one, copied, with one name changed everywhere in
it, so that each still works by itself.
"""

import re
import shutil
from dataclasses import asdict
from pathlib import Path

import pydantic
import pytest
import support

from app.utils.vec_inf_multinode import seam

HERE = "test_multinode_t1_version_guard"
SITE_PACKAGES = Path(pydantic.__file__).parents[1]
VEC_INF = SITE_PACKAGES / "vec_inf"

# case: {name in vec-inf: its new name}
RENAMED = {
    "method": {"_process_env_vars": "_parse_env_vars"},
    "status-method": {"get_status": "fetch_status"},
    "launcher-class": {"ModelLauncher": "Launcher"},
    "generator-class": {"SlurmScriptGenerator": "ScriptGenerator"},
    "generator-method": {"write_to_log_dir": "write_script"},
    "template": {"SLURM_SCRIPT_TEMPLATE": "SCRIPT_TEMPLATE"},
    "template-key": {"find_server_port": "find_port"},
    "module": {"_slurm_vars": "_cluster_vars"},
    "function": {"run_bash_command": "run_command"},
    "catalog-function": {"load_config": "read_config"},
    "constant": {"MODEL_READY_SIGNATURE": "READY_SIGNATURE"},
    "engines": {"SUPPORTED_ENGINES": "ENGINES"},
    "exception": {"SlurmJobError": "JobError"},
    "parameter": {"engine_choice": "engine_name"},
    "two": {
        "_validate_resource_allocation": "_check_allocation",
        "ENGINE_SHORT_TO_LONG_MAP": "SHORT_TO_LONG",
    },
}


def look_at(root):
    """Run in a fresh interpreter: what each kind of launch does."""
    from vec_inf.client import LaunchOptions, VecInfClient

    import app.utils.vec_inf_multinode as adapter

    login = support.Login(Path(root))
    kwargs = login.request(num_nodes=2, vllm_args="-tp=1,-pp=2")
    one, two = LaunchOptions(**login.request()), LaunchOptions(**kwargs)

    def outcome(launch):
        login.wipe()
        before = login.tree()
        error = None
        try:
            launch()
        except Exception as err:
            error = {
                "type": type(err).__name__,
                "is_multinode_error": isinstance(err, adapter.MultinodeError),
                "is_runtime_error": isinstance(err, RuntimeError),
                "text": str(err),
            }
        calls = login.calls()
        after = login.tree()
        return {"error": error, "calls": len(calls), "before": before, "after": after}

    client, ours = VecInfClient(), adapter.MultinodeClient()
    multi = {
        "request": lambda: adapter.launch_model(client, "one-node", two),
        "catalog": lambda: adapter.launch_model(client, "two-nodes-sized", one),
        "launcher": lambda: adapter.MultinodeLauncher("one-node", kwargs).launch(),
        "client": lambda: ours.launch_model("two-nodes-sized", one),
        "client-request": lambda: ours.launch_model("one-node", two),
    }
    single = {
        "stock": lambda: client.launch_model("one-node", one),
        "function": lambda: adapter.launch_model(client, "one-node", one),
        "client": lambda: ours.launch_model("one-node", options=one),
    }
    return {
        "report": asdict(adapter.check_vec_inf()),
        "multi": {name: outcome(launch) for name, launch in multi.items()},
        "single": {name: outcome(launch) for name, launch in single.items()},
    }


def import_only():
    """Run in a fresh interpreter: import, and launch the one way that is left."""
    import app.utils.vec_inf_multinode as adapter

    try:
        adapter.MultinodeLauncher("one-node", {"num_nodes": 2})
    except adapter.SeamError as err:
        return {"report": asdict(adapter.check_vec_inf()), "text": str(err)}


def altered_vec_inf(directory, names):
    """Copy the installed vec-inf and change names in it, file names too."""
    copy = directory / "vec_inf"
    shutil.copytree(VEC_INF, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for old, new in names.items():
        found = 0
        for source in copy.rglob("*.py"):
            text, count = re.subn(rf"\b{old}\b", new, source.read_text())
            found += count
            source.write_text(text)
            if source.stem == old:
                source.rename(source.with_stem(new))
        assert found, f"vec-inf has no {old}"
    return str(directory)


def other_version(directory, version):
    """Metadata of another vec-inf, to be found before the real one."""
    metadata = directory / f"vec_inf-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vec-inf\nVersion: {version}\n")
    return str(directory)


def site_packages_without(directory, pattern):
    """Every installed package but those that match, as links."""
    directory.mkdir()
    for entry in SITE_PACKAGES.iterdir():
        if not re.fullmatch(pattern, entry.name) and entry.suffix != ".pth":
            directory.joinpath(entry.name).symlink_to(entry)
    return str(directory)


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    """Return what every other vec-inf did, by case."""
    tmp_path = tmp_path_factory.mktemp("t1")
    site = support.write_site(tmp_path / "site", {}, support.MODELS)
    broken = tmp_path / "broken"
    broken.mkdir()
    broken.joinpath("environment.yaml").write_text("paths: {}\n")
    paths = {
        "as-installed": [],
        "version": [other_version(tmp_path / "version", "0.9.1")],
        "version-and-method": [
            other_version(tmp_path / "both", "1.0.0"),
            altered_vec_inf(tmp_path / "both", RENAMED["method"]),
        ],
        **{
            name: [altered_vec_inf(tmp_path / name, names)]
            for name, names in RENAMED.items()
        },
    }
    installed = (str(SITE_PACKAGES),)
    no_metadata = site_packages_without(tmp_path / "links", r"vec_inf-.*")
    paths["no-metadata"] = [no_metadata]
    calls = {}
    for name, path in paths.items():
        login = support.Login(tmp_path / "login" / name)
        support.make_weights(login.weights, support.MODELS)
        calls[name] = support.Call(
            f"{HERE}:look_at",
            {**login.environ, **site},
            {"root": str(login.root)},
            tuple(path),
            installed if name == "no-metadata" else (),
        )
    nothing = site_packages_without(tmp_path / "empty", r"vec_inf.*")
    calls["no-vec-inf"] = support.Call(
        f"{HERE}:import_only", {}, path=(nothing,), without=installed
    )
    calls["broken-site"] = support.Call(
        f"{HERE}:import_only", {"VEC_INF_CONFIG_DIR": str(broken)}
    )
    order = support.selected(request, "case")
    results = support.run_fresh([calls[name] for name in order], tmp_path / "fresh")
    return dict(zip(order, results))


def names_of(missing):
    """Member names of a report, without what is wrong with each."""
    return sorted({re.match(r"[\w.]+", item).group() for item in missing})


def renamed_members(*names):
    """Members that a rename takes away."""
    return sorted(
        {
            member.name
            for member in seam.MEMBERS
            if set(names) & set(f"{member.module}.{member.path}".split("."))
            or set(names) & {part for key in member.keys for part in key.split(".")}
            or set(names) & set(member.parameters or ())
        }
    )


REFUSING = {
    "version": ("0.9.1", []),
    "version-and-method": ("1.0.0", renamed_members("_process_env_vars")),
    "no-metadata": (None, []),
    **{name: ("0.9.0", renamed_members(*names)) for name, names in RENAMED.items()},
}


@pytest.mark.parametrize("case", ["as-installed"])
def test_the_required_vec_inf_is_accepted(outcomes, case):
    found = outcomes[case]
    assert found["report"] == {
        "installed": "0.9.0",
        "required": "0.9.0",
        "missing": [],
    }
    assert {
        name: (launch["error"], launch["calls"])
        for name, launch in found["multi"].items()
    } == {
        "request": (None, 2),
        "catalog": (None, 2),
        "launcher": (None, 2),
        "client": (None, 2),
        "client-request": (None, 2),
    }


@pytest.mark.parametrize("case", REFUSING)
def test_the_report_names_every_missing_member(outcomes, case):
    installed, missing = REFUSING[case]
    report = outcomes[case]["report"]
    assert report["installed"] == installed
    assert report["required"] == "0.9.0"
    assert names_of(report["missing"]) == missing


@pytest.mark.parametrize("case", REFUSING)
def test_no_multi_node_launch(outcomes, case, subtests):
    report = outcomes[case]["report"]
    for way, launch in outcomes[case]["multi"].items():
        with subtests.test(way):
            assert launch["error"] is not None, "the launch went through"
            text = launch["error"].pop("text")
            assert launch["error"] == {
                "type": "SeamError",
                "is_multinode_error": True,
                "is_runtime_error": True,
            }
            wanted = ["0.9.0", report["installed"] or "none", *report["missing"]]
            assert [words for words in wanted if words not in text] == []
            assert launch["calls"] == 0
            assert launch["after"] == launch["before"]


@pytest.mark.parametrize("case", REFUSING)
def test_single_node_launches_as_before(outcomes, case):
    single = outcomes[case]["single"]
    stock = single["stock"]
    assert (stock["error"], stock["calls"]) == (None, 1)
    assert len(stock["after"]) > len(stock["before"])
    assert single["function"] == stock
    assert single["client"] == stock


@pytest.mark.parametrize("case", ["no-vec-inf", "broken-site"])
def test_import_without_a_usable_vec_inf(outcomes, case):
    found = outcomes[case]
    installed = {"no-vec-inf": None, "broken-site": "0.9.0"}[case]
    assert found["report"]["installed"] == installed
    lost = {member.name for member in seam.MEMBERS}
    if case == "broken-site":
        # of these vec-inf reads no configuration
        lost -= renamed_members_of_modules("_exceptions", "_client_vars")
    assert set(names_of(found["report"]["missing"])) == lost
    assert [m for m in found["report"]["missing"] if m not in found["text"]] == []


def renamed_members_of_modules(*modules):
    """Names of the members of these modules."""
    return {m.name for m in seam.MEMBERS if m.module.split(".")[-1] in modules}
