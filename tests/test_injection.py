"""Every field of a request, with values that try to be more than a value.

Each launch either is refused, with nothing submitted, or the value arrives as data: no
command runs while it is submitted or when bash reads the job's block of values, and the
script has the lines and directives that it would have with a harmless value.
"""

import subprocess

import pytest
import support
from test_quoting import sbatch_tokens
from vec_inf.client import LaunchOptions, VecInfClient

from app.utils.vec_inf_multinode import launch_model

CANARY = "ran"
PAYLOADS = [
    f"$(:>{CANARY})",
    f"`:>{CANARY}`",
    f"; :>{CANARY};",
    f"x' ; :>{CANARY} ; '",
    f'x" ; :>{CANARY} ; "',
    f"x && :>{CANARY}",
    f"x | tee {CANARY}",
    f"x\n#SBATCH --uid=0\n:>{CANARY}",
    f"x\r:>{CANARY}",
    "x --wrap=id --uid=0",
    f"${{x:=$(:>{CANARY})}}",
    f"x) ; :>{CANARY} ; (",
    f"\\'; :>{CANARY} #",
    f"LLMHUB_END_OF_RANK_SCRIPT\n:>{CANARY}",
    f"<(:>{CANARY})",
    "x # comment",
]

# field: how the payload is carried in it
FIELDS = {
    "partition": "{}",
    "account": "{}",
    "qos": "{}",
    "time": "{}",
    "exclude": "{}",
    "nodelist": "{}",
    "bind": "{}",
    "resource_type": "{}",
    "cpus_per_task": "{}",
    "mem_per_node": "{}",
    "hf_model": "{}",
    "work_dir": "{root}/work/{}",
    "log_dir": "{root}/logs/{}",
    "model_family": "{}",
    "model_variant": "{}",
    "data_type": "{}",
    "venv": "{}",
    "model_weights_parent_dir": "{}",
    "env": "A={}",
    "env name": "{}=1",
    "vllm_args": "--tokenizer={}",
    "vllm_args name": "--{}=1",
    "model_name": "{}",
}


def script_of(login):
    """The one script that was submitted."""
    (path,) = login.root.rglob("*.sbatch")
    return path.read_text("utf-8")


def directives(script):
    """Every directive of a script, as sbatch splits it."""
    lines = [line for line in script.split("\n") if line.startswith("#SBATCH")]
    return [sbatch_tokens(line[len("#SBATCH") :]) for line in lines]


def outline(script):
    """A script without the lines that hold values of the request."""
    # a model from a hub has no weights to bind
    lines = script.replace("${PLAN_WEIGHTS},", "").split("\n")
    return [line for line in lines if not line.startswith(("#SBATCH --", "PLAN_"))]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The outline and directives of a launch with harmless values."""
    patch = pytest.MonkeyPatch()
    login = support.Login(tmp_path_factory.mktemp("plain"))
    for name, value in login.environ.items():
        patch.setenv(name, value)
    support.make_weights(login.weights, support.MODELS)
    launch_model(VecInfClient(), "two-nodes", LaunchOptions(**login.request()))
    patch.undo()
    script = script_of(login)
    return outline(script), [words[0].partition("=")[0] for words in directives(script)]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("payload", PAYLOADS, ids=range(len(PAYLOADS)))
@pytest.mark.parametrize("field", FIELDS)
def test_a_field_is_data_or_refused(login, plain, monkeypatch, field, payload):
    monkeypatch.chdir(login.root)
    value = FIELDS[field].replace("{root}", str(login.root)).replace("{}", payload)
    request = login.request(**{field.partition(" ")[0]: value})
    if field in ("hf_model", "model_weights_parent_dir"):
        absent = {"model_weights_parent_dir": "/none", "hf_model": "a/b"}
        request = {**request, **absent, field: value, "env": "HF_HOME=/cache"}
    model = request.pop("model_name", "two-nodes")
    try:
        launch_model(VecInfClient(), model, LaunchOptions(**request))
    except Exception as refused:
        assert str(refused)
        assert login.calls() == []
    else:
        script = script_of(login)
        lines, names = plain
        assert outline(script) == lines
        found = directives(script)
        assert [len(words) for words in found] == [1] * len(found)
        extra = {words[0].partition("=")[0] for words in found} - set(names)
        assert extra <= {f"--{field}"}
        block = [line for line in script.split("\n") if line.startswith("PLAN_")]
        subprocess.run(
            ["/bin/bash", "-c", "\n".join(block)],
            cwd=login.root,
            env={"PATH": "/bin:/usr/bin"},
            timeout=20,
            check=True,
        )
    assert not list(login.root.rglob(CANARY))
