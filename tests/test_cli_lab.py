"""The console script on the one-machine cluster: a real model, served and asked."""

import functools
import json
import re
import signal
import sys
from pathlib import Path

import pytest
import support
from terminal import Running, wait_until

sys.path.insert(0, str(support.TESTS / "lab"))

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]

KEY = 'sk-\'$1 "quoted" `id`'
READY_WITHIN = 240


@pytest.fixture(scope="module")
def installed(lab):
    """Put the console script on the cluster."""
    lab.hub_install(support.TREE / "app")


@pytest.fixture(scope="module")
def env_file(lab):
    """Return a file of the ordinary user with an API key."""
    path = lab.home / "serve.env"
    make = 'umask 077 && printf "VLLM_API_KEY=%s\\n" "$1" >"$2"'
    assert lab.run(["sh", "-c", make, "sh", KEY, path], timeout=20).returncode == 0
    yield path
    path.unlink()


@pytest.fixture(scope="module")
def serving(lab, installed, env_file):
    """Return a ``serve`` of the ordinary user whose model is ready, and its job."""
    words = ["vec-inf-multinode", "serve", "tiny-llama", "--num-nodes", "2"]
    words += ["--time", "00:20:00", "--env", env_file]
    running = Running(functools.partial(lab.popen, words, text=False))
    try:
        running.wait_for("running, 0 waiting", READY_WITHIN)
        (job,) = re.findall(r"^Job +(\d+)$", running.printed, re.M)
        yield running, job
    finally:
        running.close()
        lab.run(["scancel", f"--user={lab.user}", "--me"], timeout=20)


@pytest.fixture(scope="module")
def pasted(lab, serving):
    """Return what a second person's ``connect`` says, as JSON."""
    words = ["vec-inf-multinode", "connect", serving[1], "--json-mode"]
    done = lab.run(words, timeout=30)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def openai_python(lab):
    """Return a Python that has OpenAI's own client."""
    from lab_provision import CANNOT_RUN, LabError, ensure_openai

    try:
        return ensure_openai(lab.cache)
    except LabError as err:
        if err.code != CANNOT_RUN:
            raise
        pytest.skip(str(err))


def shell(lab, words, **options):
    """Run words in the ordinary user's shell; what they printed."""
    done = lab.run(["bash", "-c", words], timeout=90, **options)
    print(f"$ {words}\n{done.stdout}{done.stderr}")
    assert done.returncode == 0
    return done.stdout


def test_the_stages_were_shown(serving):
    running, _ = serving
    stages = re.findall(r"^ *[\d.]+ s  (\w+)", running.said, re.M)
    assert stages == ["queued", "starting", "loading", "ready"]
    assert "API key   needed" in running.printed
    assert KEY not in running.printed + running.said


def test_the_pasted_curl_line_is_answered(lab, pasted):
    answer = json.loads(shell(lab, pasted["curl"]))
    assert answer["choices"][0]["finish_reason"] == "length"


def test_the_pasted_python_is_answered(lab, pasted, openai_python):
    assert shell(
        lab, f'exec {openai_python} -c "$CODE"', env={"CODE": pasted["python"]}
    )


def test_without_the_key_nothing_is_answered(lab, pasted):
    """So the two before were answered because of it."""
    url = pasted["base_url"] + "/models"
    assert shell(lab, f"curl -s -o /dev/null -w '%{{http_code}}' {url}") == "401"


def test_the_env_lines_are_all_that_openais_client_needs(lab, serving, openai_python):
    code = "import openai; print(openai.OpenAI().models.list().data[0].id)"
    words = (
        f'eval "$(vec-inf-multinode connect {serving[1]} --env)" && '
        f"exec {openai_python} -c '{code}'"
    )
    assert shell(lab, words) == "tiny-llama\n"


def test_how_busy_it_is_is_shown(lab, serving, pasted):
    """In a terminal's line; here, what the server counts."""
    from app.utils.vec_inf_multinode.cli import load

    found = load.fetch(pasted["base_url"])
    assert found and found.generation_tokens > 0 and found.prompt_tokens > 0


def test_ctrl_c_leaves_no_job_and_no_process(lab, serving):
    """The last test of this module: it ends what the others use."""
    running, job = serving
    running.interrupt(signal.SIGINT)
    assert running.ended(90) == 130
    print(running)
    shown = lab.run(["scontrol", "show", "job", job, "--oneliner"], timeout=20).stdout
    assert "JobState=CANCELLED" in shown
    left = wait_until(
        lambda: [] if any(map(lab.node_processes, lab.nodes)) else ["none"],
        "the end of every process",
        limit=10,
    )
    assert left == ["none"]
    directory = Path(re.findall(r"^Directory +(.+)$", running.printed, re.M)[0])
    assert not directory.joinpath("failure.json").exists()
