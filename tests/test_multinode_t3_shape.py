"""T3: the shape of the batch script.

Whole scripts are compared with ``golden/*.sbatch``. To write these anew:
``pytest tests/test_multinode_t3_shape.py --regenerate-golden`` (or with
``REGENERATE_GOLDEN=1``), then read the difference.
"""

import re
import subprocess

import pytest
import support
from vec_inf.client import VecInfClient

from app.utils.vec_inf_multinode import (
    MultinodeClient,
    MultinodeLauncher,
    MultinodeScriptGenerator,
)

GOLDEN = support.TESTS / "golden"

# Places as on a cluster: a golden file holds nothing of this machine.
PLACES = {
    "log_dir": "/logs/family",
    "work_dir": "/users/user",
    "src_dir": "/opt/vec_inf",
    "model_weights_parent_dir": "/model-weights",
    "out_file": "/logs/family/NAME.%j/NAME.%j.out",
    "err_file": "/logs/family/NAME.%j/NAME.%j.err",
    "json_file": "/logs/family/NAME.$SLURM_JOB_ID/NAME.$SLURM_JOB_ID.json",
}
CASES = {
    "two-nodes": ("two-nodes-sized", {}),
    "eight-nodes": (
        "one-node",
        {
            "num_nodes": 8,
            "gpus_per_node": 4,
            "account": "lab account",
            "partition": "gpu",
            "bind": "/scratch:/scratch",
            "env": "HF_TOKEN=it's a $ecret,VLLM_PORT=1,"
            "CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES",
            "vllm_args": "--max-model-len=32768,--enforce-eager,"
            '--limit-mm-per-prompt={"image": 2, "text": "a b"}',
        },
    ),
}


def params_of(login, name, given):
    """Params that vec-inf resolves for a request, at places of a cluster."""
    params = MultinodeLauncher(name, login.request(**given)).params
    places = {key: text.replace("NAME", name) for key, text in PLACES.items()}
    return {**params, **places}


@pytest.fixture(params=CASES)
def case(request):
    """Return each golden case's name."""
    return request.param


@pytest.fixture
def script(login, case):
    """Return the text of a case's batch script."""
    params = params_of(login, *CASES[case])
    return MultinodeScriptGenerator(params)._generate_script_content()


@pytest.fixture
def rank_script(script):
    """Return the rank script that the batch script holds."""
    found = re.findall(r"cat <<'(\w+)'\n(.*?\n)\1\n", script, re.S)
    assert len(found) == 1
    return found[0][1]


def code_of(script):
    """Lines of a script that are run: no comments, no directives."""
    lines = (line for line in script.splitlines() if not line.lstrip().startswith("#"))
    return "\n".join(re.sub(r"\s# .*", "", line) for line in lines)


def test_golden(script, case, pytestconfig):
    path = GOLDEN / f"{case}.sbatch"
    if pytestconfig.getoption("--regenerate-golden"):
        path.write_text(script)
    assert path.exists(), "missing; see the docstring of this file"
    assert script == path.read_text()


def test_every_golden_has_a_case():
    found = sorted(path.name for path in GOLDEN.iterdir())
    assert found == sorted(f"{case}.sbatch" for case in CASES)


@pytest.mark.parametrize("path", sorted(GOLDEN.iterdir()), ids=lambda path: path.stem)
def test_a_golden_holds_nothing_of_this_machine(path, login):
    text = path.read_text()
    here = (str(login.root), str(support.TREE), "/home/", "site-packages")
    assert [place for place in here if place in text] == []
    assert re.findall(r"20\d{6}_\d{6}|20\d\d-\d\d-\d\d[ T]\d\d:", text) == []


def test_bash_can_read_it(script, rank_script):
    for text in (script, rank_script):
        subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=10)


def test_no_ray(script):
    assert re.findall(r"(?i)\bray\b", script) == []


def test_one_step_of_one_task_per_node(script):
    starts = re.findall(r"\bsrun\s+-[^\\\n]*(?:\\\n[^\\\n]*)*", code_of(script))
    assert len(starts) == 1
    options = re.findall(r"(?<!\S)--[\w-]+(?:=\S+)?", starts[0])
    wanted = [
        '--nodes="$PLAN_NNODES"',
        '--ntasks="$PLAN_NNODES"',
        "--ntasks-per-node=1",
        "--kill-on-bad-exit=1",
    ]
    assert [option for option in wanted if option not in options] == []
    assert 'bash "$script"' in starts[0]
    assert re.search(
        r"^    local script=\$LLMHUB_ATTEMPT_DIR/rank\.sh\b.*\n"
        r'    llmhub_rank_script >"\$script" \|\|$',
        script,
        re.M,
    )
    assert "LLMHUB_ATTEMPT_DIR=$LLMHUB_JOB_DIR/attempt-$number\n" in script
    assert "LLMHUB_JOB_DIR=$PLAN_LOG_DIR/$PLAN_MODEL_NAME.$SLURM_JOB_ID\n" in script


def test_plan_nodes(script, case):
    nodes = {"two-nodes": 2, "eight-nodes": 8}[case]
    assert f"#SBATCH --nodes={nodes}\n#SBATCH " in script
    assert "\n#SBATCH --ntasks-per-node=1\n" in script
    assert set(re.findall(r"^PLAN_NNODES=.*", script, re.M)) == {f"PLAN_NNODES={nodes}"}


ENV = {"HF_TOKEN": "it's, a $ecret=1", "VLLM_LOGGING_LEVEL": "DEBUG"}
ENGINE_ARGS = {
    "--tensor-parallel-size": 4,
    "--pipeline-parallel-size": 2,
    "--enforce-eager": True,
    "--limit-mm-per-prompt": '{"image": 2, "text": "a b"}',
}


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Return a two-node job that came up, served and was cancelled."""
    import node

    case = node.JobCase(
        params={"env": ENV, "engine_args": ENGINE_ARGS}, during=node.when_ready
    )
    return case.start(tmp_path_factory.mktemp("t3") / "job")


@pytest.fixture
def job_rank_script(job):
    """Return the rank script's path in the job directory."""
    return job.job_dir / "attempt-0" / "rank.sh"


def test_the_step_as_it_was_started(job, job_rank_script):
    (step,) = job.node.calls("srun", "batch")
    assert step.text == [
        "--nodes=2",
        "--ntasks=2",
        "--ntasks-per-node=1",
        "--kill-on-bad-exit=1",
        "--distribution=block",
        "--cpus-per-task=16",
        "--cpu-bind=none",
        "--export=ALL",
        "--label",
        "bash",
        str(job_rank_script),
    ]


def test_the_rank_script_lies_in_the_job_directory(job, job_rank_script):
    held = re.search(r"cat <<'(\w+)'\n(.*?\n)\1\n", job.script.read_text(), re.S)
    assert job_rank_script.read_text() == held[2]
    assert job_rank_script.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("rank", [0, 1])
def test_the_engine_of_each_rank(job, rank):
    import node

    container = ["exec", "--nv", "--containall", node.IMAGE]
    serve = ["env", "-u", "FI_LOG_LEVEL", "vllm", "serve"]
    own = {
        0: ["--served-model-name", node.MODEL, "--host", "0.0.0.0"]
        + ["--port", str(job.node.server_port)],
        1: ["--headless"],
    }
    sizes = ["--tensor-parallel-size", "4", "--pipeline-parallel-size", "2"]
    engine = ["--enforce-eager", "--limit-mm-per-prompt"]
    engine += [ENGINE_ARGS["--limit-mm-per-prompt"]]
    native = ["--nnodes", "2", "--node-rank", str(rank)]
    native += ["--master-addr", node.MASTER, "--master-port", str(job.master_port)]
    native += ["--distributed-executor-backend", "mp"]
    weights = f"{job.params['model_weights_parent_dir']}/{node.MODEL}"
    assert job.node.container(rank).text == [
        *container,
        *serve,
        weights,
        *own[rank],
        *sizes,
        *engine,
        *native,
    ]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_deployment_env_of_each_rank(job, rank):
    container = job.node.container(rank)
    wanted = dict(ENV, HF_TOKEN="it's, a =1")  # $ecret is a reference, and unset
    assert {name: container.container_env(name) for name in ENV} == wanted


@pytest.mark.parametrize("rank", [0, 1])
def test_nccl_debug_goes_to_files(job, rank):
    container = job.node.container(rank)
    names = ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE")
    assert [container.container_env(name) for name in names] == [
        "INFO",
        "INIT,NET",
        f"{job.job_dir}/nccl-debug/%h.%p",
    ]


def test_the_written_script(login):
    params = MultinodeLauncher("two-nodes", login.request()).params
    generator = MultinodeScriptGenerator(params)
    path = generator.write_to_log_dir()
    assert path.read_text() == generator._generate_script_content()
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent == login.logs / "family"
    assert re.fullmatch(r"launch_two-nodes_\d{8}_\d{6}_\w+\.sbatch", path.name)


def test_two_scripts_of_one_second(login):
    params = MultinodeLauncher("two-nodes", login.request()).params
    paths = {MultinodeScriptGenerator(params).write_to_log_dir() for _ in range(3)}
    assert len(paths) == 3


def test_the_client_and_the_generator_write_one_script(login):
    from vec_inf.client import LaunchOptions

    options = LaunchOptions(**login.request())
    response = MultinodeClient().launch_model("two-nodes", options)
    job_dir = login.logs / "family" / "two-nodes.42"
    text = job_dir.joinpath("two-nodes.42.sbatch").read_text()
    assert isinstance(MultinodeClient(), VecInfClient)
    assert response.slurm_job_id == "42"
    params = MultinodeLauncher("two-nodes", login.request()).params
    # where the sizes come from is the one thing that params alone do not tell
    rendered = MultinodeScriptGenerator(params)._generate_script_content()
    origin = re.compile(r"^PLAN_ORIGINS=.*$", re.M)
    assert origin.sub("", text) == origin.sub("", rendered)
    assert set(origin.findall(text)) == {"PLAN_ORIGINS='tp derived, pp derived'"}
