"""T2: what is not multi-node vLLM stays vec-inf's, to the byte.

vec-inf's whole catalog is launched twice on several sites, through vec-inf's client and
through the adapter, and everything that the two leave behind is compared.
"""

import re
import warnings
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pydantic
import pytest
import support
import yaml

HERE = "test_multinode_t2_single_node"
CATALOG_FILE = Path(pydantic.__file__).parents[1] / "vec_inf/config/models.yaml"
CATALOG = yaml.safe_load(CATALOG_FILE.read_text())["models"]

MULTI_NODE = {name for name, entry in CATALOG.items() if entry["num_nodes"] > 1}
SGLANG = {name for name in MULTI_NODE if CATALOG[name].get("engine") == "sglang"}
OURS = sorted(MULTI_NODE - SGLANG)
VEC_INFS = sorted(set(CATALOG) - set(OURS))
# where the container is not used, a sample is enough
SAMPLE = [*VEC_INFS[::15], *SGLANG]

PLAIN = {"resource_type": "", "model_weights_parent_dir": "~/../weights"}
SITES = {
    # vec-inf's own configuration
    "packaged": None,
    # vec-inf warns at every launch that there is no models.yaml
    "no-module-command": {
        "containerization": {"module_load_cmd": "", "module_name": "apptainer"},
        "default_args": PLAIN,
    },
    "binds": {
        "required_args": {"account": "VEC_INF_ACCOUNT"},
        "default_args": {
            **PLAIN,
            "bind": "$SLURM_TMPDIR:$HOME/.cache,/scratch:/scratch",
            "partition": "gpu",
            "qos": "normal",
            "resource_type": "h100",
        },
    },
    "venv": {
        "required_args": {"account": "VEC_INF_ACCOUNT"},
        "default_args": {**PLAIN, "venv": "/opt/venv"},
    },
}


def launch_all(root, names, options):
    """Run in a fresh interpreter: launch models both ways.

    Returns what each way left, said and answered, by model.
    """
    from vec_inf.client import LaunchOptions, VecInfClient

    import app.utils.vec_inf_multinode as adapter

    login = support.Login(Path(root))
    given = []

    class Recorder(VecInfClient):
        def launch_model(self, model_name, options=None):
            given.append((model_name, options))
            return super().launch_model(model_name, options)

    def outcome(launch, name, passed):
        login.wipe()
        before = None if passed is None else asdict(passed)
        found = {}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                found["response"] = asdict(launch(name, passed))
            except Exception as err:
                found["error"] = [type(err).__name__, str(err)]
        found["warnings"] = [[w.category.__name__, str(w.message)] for w in caught]
        found["calls"] = [
            [re.sub(r"\d{8}_\d{6}", "TIME", item) for item in call]
            for call in login.calls()
        ]
        found["tree"] = login.tree()
        found["options-unchanged"] = before == (
            None if passed is None else asdict(passed)
        )
        return found

    def through_adapter(name, passed):
        return adapter.launch_model(Recorder(), name, passed)

    found = {}
    for name in names:
        passed = None if options is None else LaunchOptions(**options)
        given.clear()
        found[name] = {
            "adapter": outcome(through_adapter, name, passed),
            "passed-on": [[got, it is passed] for got, it in given],
            "stock": outcome(VecInfClient().launch_model, name, passed),
        }
    return found


@pytest.fixture(scope="module")
def launches(request, tmp_path_factory):
    """Return both ways' outcomes by site and model."""
    tmp_path = tmp_path_factory.mktemp("t2")
    sites = support.selected(request, "site")
    calls = []
    for site in sites:
        login = support.Login(tmp_path / "login" / site)
        support.make_weights(login.weights, CATALOG)
        environ = {**login.environ, "VEC_INF_ACCOUNT": "lab"}
        options = None
        if site == "packaged":
            environ["VEC_INF_WORK_DIR"] = str(login.work)
            options = {"model_weights_parent_dir": str(login.weights)}
        else:
            environ |= support.write_site(tmp_path / site, SITES[site])
        if site == "binds":
            no_models = tmp_path / "no-models.yaml"
            no_models.write_text("models: {}\n")
            environ["VEC_INF_MODEL_CONFIG"] = str(no_models)
        arguments = {
            "root": str(login.root),
            "names": [*SAMPLE, *OURS] if site == "venv" else list(CATALOG),
            "options": options,
        }
        calls.append(support.Call(f"{HERE}:launch_all", environ, arguments))
    return dict(zip(sites, support.run_fresh(calls, tmp_path / "fresh")))


def script_of(launch, name):
    """Text of the batch script that a launch left in the job directory."""
    (text,) = [
        text
        for path, text in launch["tree"].items()
        if path.split()[0].endswith(f"/{name}.42/{name}.42.sbatch")
    ]
    return text


def test_the_catalog():
    assert (len(CATALOG), len(VEC_INFS), len(OURS)) == (98, 90, 8)
    assert SGLANG == {"Llama-3.2-90B-Vision-Instruct"}


@pytest.mark.parametrize("site", SITES)
def test_everything_else_is_vec_infs(launches, site, subtests):
    for name in SAMPLE if site == "venv" else VEC_INFS:
        with subtests.test(name):
            found = launches[site][name]
            assert "error" not in found["stock"]
            assert len(script_of(found["stock"], name)) > 500
            assert found["adapter"] == found["stock"]
            assert found["passed-on"] == [[name, True]]
            assert found["adapter"]["options-unchanged"]


@pytest.mark.parametrize("site", ["packaged", "no-module-command", "binds"])
def test_multi_node_vllm_is_ours(launches, site, subtests):
    for name in OURS:
        with subtests.test(name):
            found = launches[site][name]
            ours = script_of(found["adapter"], name)
            assert "error" not in found["stock"]
            assert ours != script_of(found["stock"], name)
            assert re.search(r"\bray\b", ours, re.I) is None
            assert "LLMHUB" in ours
            assert found["passed-on"] == []
            assert found["adapter"]["warnings"] == found["stock"]["warnings"]
            assert found["adapter"]["options-unchanged"]


@pytest.mark.parametrize("site", ["venv"])
def test_multi_node_vllm_outside_the_container_is_refused(launches, site, subtests):
    for name in OURS:
        with subtests.test(name):
            adapter = launches[site][name]["adapter"]
            assert adapter["error"][0] == "ContainerError"
            assert adapter["calls"] == []


@pytest.mark.parametrize("site", ["no-module-command"])
def test_the_warnings_are_compared(launches, site):
    stock = launches[site]["CodeLlama-7b-hf"]["stock"]
    assert [category for category, _ in stock["warnings"]] == ["UserWarning"]


# request, and whether it is multi-node vLLM, None where vec-inf itself refuses it
ROUTES = [
    ("one-node", {}, False),
    ("one-node", {"num_nodes": 1}, False),
    ("one-node", {"num_nodes": 2, "vllm_args": "-tp=1,-pp=2"}, True),
    ("one-node", {"num_nodes": "2", "vllm_args": "-tp=1,-pp=2"}, True),
    ("one-node", {"num_nodes": 2, "engine": "vllm", "vllm_args": "-pp=2"}, True),
    ("one-node", {"num_nodes": 2, "engine": "sglang", "sglang_args": "--pp=2"}, False),
    ("one-node", {"vllm_args": "--max-model-len=9"}, False),
    ("one-node-sglang", {}, False),
    ("one-node-sglang", {"num_nodes": 2, "sglang_args": "--pp=2"}, False),
    ("one-node-sglang", {"num_nodes": 2, "engine": "vllm", "vllm_args": "-pp=2"}, True),
    ("two-nodes-sized", {}, True),
    ("two-nodes-sized", {"engine": "vllm"}, True),
    ("two-nodes-sized", {"vllm_args": "--max-model-len=9"}, True),
    ("two-nodes-sized", {"vllm_args": ""}, True),
    ("two-nodes-sized", {"engine": "sglang"}, False),
    ("two-nodes-sized", {"num_nodes": 1, "vllm_args": "-tp=4,-pp=1"}, False),
    ("two-nodes-sglang", {}, False),
    ("two-nodes-sglang", {"engine": "vllm", "vllm_args": "-tp=4,-pp=2"}, True),
    ("not-in-catalog", {}, False),
    ("not-in-catalog", {"num_nodes": 2, "vllm_args": "-pp=2"}, True),
    ("no-weights", {}, None),
    ("no-weights", {"hf_model": "org/name"}, False),
    ("no-weights", {"hf_model": "a/b", "num_nodes": 2, "vllm_args": "-pp=2"}, True),
    ("one-node", {"config": "custom.yaml"}, True),
    ("two-nodes-sized", {"config": "custom.yaml"}, False),
    ("custom", {"config": "custom.yaml"}, True),
    ("custom", {"config": "custom.yaml", "num_nodes": 1, "vllm_args": "-pp=1"}, False),
    # vec-inf takes the args of the engine that they name, and leaves engine as it is
    ("one-node", {"sglang_args": "--context-length=9"}, False),
    ("one-node-sglang", {"num_nodes": 2, "vllm_args": "-pp=2"}, False),
    ("two-nodes-sglang", {"vllm_args": "-tp=4,-pp=2"}, False),
    ("one-node", {"config": "absent.yaml"}, None),
    ("two-nodes-sized", {"engine": "sglang", "vllm_args": "-pp=2"}, None),
    ("two-nodes-sized", {"sglang_args": "--pp=2", "vllm_args": "-pp=2"}, None),
]
CUSTOM = {
    "one-node": {**support.MODELS["two-nodes-sized"], "engine": "vllm"},
    "two-nodes-sized": support.MODELS["one-node"],
    "custom": {**support.MODELS["two-nodes-sized"], "gpus_per_node": 1, "env": {}},
}
CUSTOM["custom"]["vllm_args"] = {"--pipeline-parallel-size": 2}


@pytest.fixture
def catalogs(login, monkeypatch):
    """Return the machine, in a directory that holds custom catalogs."""
    login.weights.joinpath("not-in-catalog").mkdir()
    login.weights.joinpath("custom").mkdir()
    text = yaml.safe_dump({"models": CUSTOM})
    login.home.joinpath("custom.yaml").write_text(text)
    monkeypatch.chdir(login.home)
    return login


@pytest.fixture(params=["function", "client"])
def launch(request, monkeypatch):
    """Return one of the two ways to launch, and the calls that vec-inf's client got."""
    from vec_inf.client import VecInfClient

    import app.utils.vec_inf_multinode as adapter

    stock, calls = VecInfClient.launch_model, []

    def recorded(self, model_name, options=None):
        calls.append((model_name, options))
        return stock(self, model_name, options)

    monkeypatch.setattr(VecInfClient, "launch_model", recorded)
    if request.param == "client":
        return adapter.MultinodeClient().launch_model, calls
    return partial(adapter.launch_model, VecInfClient()), calls


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name, given, multi_node", ROUTES)
def test_routing_agrees_with_vec_inf(catalogs, launch, name, given, multi_node):
    from vec_inf.client import LaunchOptions
    from vec_inf.client._helper import ModelLauncher

    import app.utils.vec_inf_multinode as adapter

    call, stock_calls = launch
    kwargs = catalogs.request(**given)
    options = LaunchOptions(**kwargs)
    if multi_node is None:
        with pytest.raises(Exception) as vec_infs:
            ModelLauncher(name, dict(kwargs))
        with pytest.raises(vec_infs.type) as refused:
            call(name, options)
        assert str(refused.value) == str(vec_infs.value)
        assert catalogs.calls() == []
    else:
        params = ModelLauncher(name, dict(kwargs)).params
        assert adapter.is_multinode_vllm(params) is multi_node
        assert call(name, options).slurm_job_id == "42"
        assert stock_calls == ([] if multi_node else [(name, options)])
        assert all(passed is options for _, passed in stock_calls)
    assert options == LaunchOptions(**kwargs)


@pytest.mark.parametrize(
    "name, given",
    [
        ("one-node", {"num_nodes": 2, "sglang_args": "--pp=2"}),
        ("two-nodes-sized", {"sglang_args": "--context-length=9"}),
    ],
)
def test_args_of_another_engine_are_refused(catalogs, launch, name, given):
    """vec-inf would render vLLM with SGLang's args, over Ray."""
    from vec_inf.client import LaunchOptions

    import app.utils.vec_inf_multinode as adapter

    with pytest.raises(adapter.PlanError, match="set engine to 'sglang' too"):
        launch[0](name, LaunchOptions(**catalogs.request(**given)))
    assert catalogs.calls() == []


@pytest.mark.parametrize(
    "name, given",
    [
        ("one-node", {}),
        ("one-node", {"env": "A=1", "bind": "/a:/b"}),
        ("one-node", {"venv": "/opt/venv"}),
        ("one-node-sglang", {}),
        ("two-nodes-sglang", {}),
    ],
)
def test_the_generator_is_vec_infs_for_other_params(login, name, given):
    from vec_inf.client._helper import ModelLauncher
    from vec_inf.client._slurm_script_generator import SlurmScriptGenerator

    from app.utils.vec_inf_multinode import MultinodeScriptGenerator

    params = ModelLauncher(name, login.request(**given)).params
    path = MultinodeScriptGenerator(params).write_to_log_dir()
    text = path.read_bytes()
    mode = path.stat().st_mode
    stock = SlurmScriptGenerator(params).write_to_log_dir()
    assert (text, mode) == (stock.read_bytes(), stock.stat().st_mode)


@pytest.mark.parametrize(
    "name, given", [("one-node", {}), ("two-nodes-sglang", {"env": "A=1"})]
)
def test_the_launcher_is_vec_infs_for_other_params(login, name, given):
    from vec_inf.client._helper import ModelLauncher

    from app.utils.vec_inf_multinode import MultinodeLauncher

    found = []
    for launcher in (ModelLauncher, MultinodeLauncher):
        login.wipe()
        response = launcher(name, login.request(**given)).launch()
        found.append((asdict(response), login.tree(), len(login.calls())))
    assert found[0] == found[1]
