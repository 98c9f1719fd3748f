"""``connect``: how to reach a model; what is pasted must work, and no key is shown."""

import ast
import json
import subprocess

import pytest
from terminal import JOB

KEY = "sk-very-secret-key"
HOSTILE = [
    "plain",
    "two words",
    'it\'s "quoted"',
    "$1 `id` $(touch ran)",
    "a;b&c|d>e<f",
    "back\\slash\\",
    "line\nbreak",
    "*?[x]~#!",
    "é✓",
    "-n",
]


@pytest.fixture
def ready(job):
    """Return a job that is ready, made with these facts."""

    def make(**facts):
        job.make(**facts)
        key = (facts.get("env") or {}).get("VLLM_API_KEY")
        return job.serve(key=key)

    return make


def test_it_says_how_to_reach_the_model(shell, ready):
    url = ready()
    shown = shell("connect", JOB)
    assert (shown.status, shown.said) == (0, "")
    lines = shown.printed.splitlines()
    assert f"Address   {url}" in lines
    assert "Model     two-nodes" in lines
    assert "API key   none needed" in lines
    port = url.split(":")[2].removesuffix("/v1")
    (tunnel,) = (line for line in lines if line.startswith("ssh "))
    assert tunnel.startswith(f"ssh -N -L 8000:127.0.0.1:{port} ") and "@" in tunnel


def test_a_key_is_shown_only_when_asked_for(shell, ready, job):
    ready(env={"VLLM_API_KEY": KEY})
    for mode in ([], ["--json-mode"]):
        shown = shell("connect", JOB, *mode)
        assert shown.status == 0 and KEY not in shown.printed + shown.said
        assert f"jq -r .env.VLLM_API_KEY {job.file('json')}" in shown.printed
        assert KEY in shell("connect", JOB, *mode, "--show-secrets").printed


def paste(words, environ, cwd):
    """Run what a person pastes into a shell; what it printed."""
    done = subprocess.run(
        ["/bin/bash", "-c", words],
        env=environ,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def curl_of(printed):
    """The curl command, of one line or two."""
    return printed.split("From here, with curl:\n\n")[1].split("\n\n")[0]


@pytest.mark.parametrize("key", [None, KEY, 'it\'s "$HOME" \\ `id`'])
def test_the_curl_line_works_as_pasted(shell, ready, job, key, tmp_path):
    """With jq's help the key is on no command line."""
    ready(env={} if key is None else {"VLLM_API_KEY": key})
    line = curl_of(shell("connect", JOB).printed)
    environ = {"PATH": "/usr/bin:/bin", "HOME": "/", "no_proxy": "*"}
    assert json.loads(paste(line, environ, tmp_path)) == {"object": "stub"}
    requests = job.login.root.joinpath("engine/http.jsonl").read_text().splitlines()
    last = json.loads(requests[-1])
    assert last["path"] == "/v1/completions"
    assert json.loads(last["body"])["model"] == "two-nodes"
    assert last["headers"].get("authorization") == (key and f"Bearer {key}")


@pytest.mark.parametrize(
    "model_type, path",
    [
        ("LLM", "/v1/completions"),
        ("VLM", "/v1/completions"),
        ("Text_Embedding", "/v1/embeddings"),
        ("Reward_Modeling", "/v1/models"),
        ("Audio", "/v1/models"),
    ],
)
def test_the_request_is_one_that_the_type_answers(shell, ready, model_type, path):
    ready(model_type=model_type, env={"VLLM_API_KEY": KEY})
    found = json.loads(shell("connect", JOB, "--json-mode").printed)
    assert found["base_url"] + path.removeprefix("/v1") in found["curl"]
    assert found["model_type"] == model_type
    ast.parse(found["python"])


def test_the_key_of_a_single_node_job_may_be_an_engine_arg(shell, ready, tmp_path):
    ready(engine_args={"--api-key": KEY})
    assert KEY not in shell("connect", JOB).printed
    found = json.loads(shell("connect", JOB, "--json-mode").printed)
    environ = {"PATH": "/usr/bin:/bin"}
    assert paste(found["api_key"]["command"], environ, tmp_path) == KEY + "\n"


@pytest.mark.parametrize("key", HOSTILE)
def test_the_env_lines_survive_eval(ready, shell, tmp_path, key):
    """Every byte of the key and of the address."""
    url = ready(env={"VLLM_API_KEY": key})
    shown = shell("connect", JOB, "--env")
    assert shown.status == 0, shown
    environ = {"LINES_OF": shown.printed, "PATH": "/usr/bin:/bin"}
    words = 'eval "$LINES_OF"; env -0'
    empty = tmp_path / "empty"
    empty.mkdir()
    pairs = paste(words, environ, empty).split("\0")
    assert f"OPENAI_BASE_URL={url}" in pairs
    assert f"OPENAI_API_KEY={key}" in pairs
    assert not list(empty.iterdir())  # nothing ran


def test_without_a_key_the_libraries_get_one_that_is_none(shell, ready):
    url = ready()
    assert shell("connect", JOB, "--env").printed == (
        f"export OPENAI_BASE_URL={url}\nexport OPENAI_API_KEY=EMPTY\n"
    )


def test_a_key_that_only_the_node_knows_is_not_made_up(shell, ready):
    ready(env={"VLLM_API_KEY": "$MY_KEY"})
    shown = shell("connect", JOB, "--env")
    assert (shown.status, shown.printed) == (4, "")
    assert "refers to a variable" in shown.said


@pytest.mark.parametrize("mode", [[], ["--env"], ["--json-mode"]])
def test_a_job_that_is_not_ready_is_4(shell, job, mode):
    job.make()
    job.slurm("PENDING", Reason="Priority")
    shown = shell("connect", JOB, *mode)
    assert shown.status == 4
    assert "Job 42 is not ready: queued: Priority" in shown.said + shown.printed
    if mode == ["--json-mode"]:
        error = json.loads(shown.printed)["error"]
        assert (error["stage"], error["slurm_job_id"]) == ("queued", JOB)
    else:
        assert shown.printed == ""  # nothing for eval


def test_a_job_that_has_failed_says_why(shell, job):
    job.make()
    job.fail("rank 1 died [bold]\x1b[31m")
    job.slurm("FAILED")
    shown = shell("connect", JOB)
    assert shown.status == 4
    assert shown.said == "Error: Job 42 is not ready: failed: rank 1 died [bold]\n"


def test_a_job_that_is_gone_is_4(shell, login, job):
    job.make()
    login.answer("scontrol.err", "slurm_load_jobs error: Invalid job id specified")
    shown = shell("connect", JOB)
    assert shown.status == 4
    assert "Slurm does not know job 42, or not any more" in shown.said


def test_a_job_of_another_user_is_4(shell, ready, job):
    ready()
    job.file("json").unlink()
    job.file("json").mkdir()  # cannot be read, not even by root
    shown = shell("connect", JOB)
    assert shown.status == 4 and "Job 42 cannot be read: " in shown.said


def test_no_slurm_at_all_is_4(shell, login, job):
    login.path.joinpath("scontrol").unlink()
    shown = shell("connect", JOB)
    assert shown.status == 4 and "Slurm does not tell of job 42" in shown.said


@pytest.mark.parametrize("job_id", ["x", "1;id", "-1", "1 2", ""])
def test_what_is_no_job_id_is_2_and_reaches_no_shell(shell, login, job_id):
    assert shell("connect", "--", job_id).status == 2
    assert login.calls() == []


def test_two_forms_at_once_are_2(shell):
    assert shell("connect", JOB, "--env", "--json-mode").status == 2
