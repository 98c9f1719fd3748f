"""T6: the whole stack on one machine: real Slurm, Apptainer, vLLM (CPU) and vec-inf."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time

import pytest
import support

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]

PROMPT = "The quick brown fox"
KEY, SECRET = "key-a8f1c3", "s3cr3t value"


def greedy(hub, url, key=None):
    """One greedy completion's token ids."""
    code, body = hub.request(
        "POST",
        f"{url}/completions",
        json={
            "model": "tiny-llama",
            "prompt": PROMPT,
            "max_tokens": 12,
            "temperature": 0,
            "return_token_ids": True,
        },
        headers={"Authorization": f"Bearer {key}"} if key else {},
    )
    return code, body["choices"][0]["token_ids"] if code == 200 else body


@pytest.fixture(scope="module")
def pipeline(hub):
    """A READY PP=2 job with an API key and a secret in its env."""
    job = hub.launch(env=f"VLLM_API_KEY={KEY},MY_SECRET={SECRET}", time="00:30:00")
    try:
        job.ready()
        yield job
    finally:
        job.cancel()
        job.wait_gone()


@pytest.fixture(scope="module")
def pipeline_tokens(hub, pipeline):
    """What the PP=2 job answers to the prompt."""
    code, tokens = greedy(hub, pipeline.status()["url"], KEY)
    assert code == 200
    return tokens


def test_a_completion_comes_back(pipeline_tokens):
    """The served model answers a real request."""
    assert len(pipeline_tokens) == 12


def test_a_chat_completion_comes_back(hub, pipeline):
    """The chat endpoint answers too."""
    code, body = hub.request(
        "POST",
        pipeline.status()["url"] + "/chat/completions",
        json={
            "model": "tiny-llama",
            "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": 4,
        },
        headers={"Authorization": f"Bearer {KEY}"},
    )
    assert code == 200 and body["choices"][0]["message"]["content"]


def test_one_step_spans_every_node(lab, pipeline):
    """Slurm has one step of the job, with a task on each node."""
    shown = lab.run(["scontrol", "show", "step"], timeout=20).stdout
    steps = re.findall(rf"StepId={pipeline.number}\.(\S+)", shown)
    assert [step for step in steps if step not in ("batch", "extern")] == ["0"]
    own = lab.run(["scontrol", "show", "step", f"{pipeline.number}.0"], timeout=20)
    assert re.search(r"\bNodes=2\b.*\bTasks=2\b", own.stdout)


def test_err_holds_the_ready_signature_and_nothing_else(pipeline):
    """No line of a rank reached what vec-inf decides from."""
    assert pipeline.log("err") == "INFO:     Application startup complete.\n"


def test_out_names_topology_and_stages(lab, pipeline):
    """The first move of an operator, `grep LLMHUB-`, tells the story."""
    lines = pipeline.log("out").splitlines()
    first, *more = (line for line in lines if line.startswith("LLMHUB-TOPOLOGY"))
    assert re.fullmatch(
        r"LLMHUB-TOPOLOGY: nnodes=2 tp=1 pp=2 world=2 master=10\.77\.0\.1:295\d\d",
        first,
    )
    assert more[:2] == [
        "LLMHUB-TOPOLOGY: iface hsn0 10.77.0.1/24",
        "LLMHUB-TOPOLOGY: nccl_socket_ifname==hsn0",
    ]
    budget = int(re.fullmatch(r".*: readiness_budget=(\d+)s", more[2]).group(1))
    assert 1600 <= budget <= 1620  # nine tenths of what is left of 30 minutes
    assert f"LLMHUB-TOPOLOGY: vllm {lab.vllm_version}+cpu" in more
    assert "LLMHUB-STAGE-A: rank 1 up on nid002" in lines
    assert "LLMHUB-STAGE-A: all 2 ranks launched" in lines


def test_each_rank_has_its_logs(pipeline):
    """stdout and stderr of every rank stand whole in files of their own."""
    names = sorted(path.name for path in (pipeline.log_dir / "ranks").iterdir())
    assert names == [
        "rank-0.nid001.err",
        "rank-0.nid001.out",
        "rank-1.nid002.err",
        "rank-1.nid002.out",
    ]
    assert re.search(r"^1: .*vllm|^1: .*INFO", pipeline.log("out"), re.M)


def test_the_key_is_asked_for(hub, pipeline):
    """401 without the key, 200 with it."""
    url = pipeline.status()["url"]
    assert greedy(hub, url)[0] == 401
    assert greedy(hub, url, KEY)[0] == 200


def test_no_secret_is_in_a_process_list(pipeline):
    """No command line on any node holds a value of the env."""
    lines = [line for _, _, line in pipeline.processes()]
    assert sum("vllm serve" in line for line in lines) == 2
    assert not [line for line in lines if KEY in line or SECRET in line]


def test_files_with_secrets_are_their_owners(pipeline):
    """Every file of the job that holds a secret is 0600 or tighter."""
    holders = [
        path
        for path in pipeline.log_dir.rglob("*")
        if path.is_file() and KEY.encode() in path.read_bytes()
    ]
    assert len(holders) >= 3  # the batch script, the JSON, the rank script
    loose = [path for path in holders if stat.S_IMODE(path.stat().st_mode) & 0o077]
    assert not loose


def test_the_job_json_is_vec_infs(pipeline):
    """The JSON has vec-inf's fields, the env as given and the address."""
    path = pipeline.log_dir / f"tiny-llama.{pipeline.number}.json"
    fields = json.loads(path.read_text())
    assert fields["env"]["MY_SECRET"] == SECRET
    assert fields["server_address"] == pipeline.status()["url"]
    assert fields["slurm_job_id"] == pipeline.number


def test_shutdown_leaves_nothing(hub, pipeline, pipeline_tokens):
    """vec-inf's shutdown ends every process on every node, without an error line."""
    assert hub.shutdown(pipeline.number) is True
    pipeline.wait_gone(limit=30)
    assert "LLMHUB-ERROR" not in pipeline.log("err") + pipeline.log("out")
    assert not (pipeline.log_dir / "failure.json").exists()
    assert pipeline.state() == "CANCELLED"


def test_tensor_parallel_gives_the_same_tokens(hub, pipeline_tokens):
    """TP=2 across the nodes serves too, and a greedy prompt gives the same tokens."""
    job = hub.launch(vllm_args="-tp=2,-pp=1,--enforce-eager", time="00:30:00")
    try:
        url = job.ready()["url"]
        assert "nnodes=2 tp=2 pp=1 world=2" in job.log("out")
        assert greedy(hub, url) == (200, pipeline_tokens)
    finally:
        job.cancel()
        job.wait_gone()


def test_a_single_node_model_is_vec_infs(hub, lab):
    """A single-node entry goes through vec-inf's own launch and serves."""
    job = hub.launch("tiny-llama-single", time="00:30:00")
    try:
        url = job.ready()["url"]
        assert "LLMHUB-" not in job.log("out") + job.log("err")
        code, _ = hub.request("GET", url.replace("/v1", "/health"))
        assert code == 200
    finally:
        job.cancel()
        job.wait_gone()


def test_real_apptainer_passes_values_exactly(lab):
    """The rank script's own export, through the real Apptainer's evaluation."""
    values = [
        "a,b",
        " two  spaces ",
        "q'uo\"te",
        "$(touch /tmp/never)",
        "`id`",
        "$HOME",
        "C:\\new\\table",
        "end\\",
        '\\"',
        "\\$x",
        "é✓",
        "",
        ";id",
        "*",
        "%s !x #c ~",
    ]
    source = (lab.hub / "app/utils/vec_inf_multinode/scripts/rank.sh").read_text()
    function = re.search(r"^export_to_container\(\) .*?^}", source, re.M | re.S).group()
    show = "import os; print(*(ascii(os.environ[f'T{i}']) for i in range(%d)))"
    script = function + (
        '\ni=0\nfor v in "${@:3}"; do export_to_container "T$i" "$v"; i=$((i + 1)); '
        'done\nexec apptainer exec --nv --containall "$1" /usr/bin/python3 -c "$2"'
    )
    done = lab.run(
        ["bash", "-c", script, "bash", lab.image, show % len(values), *values],
        timeout=60,
        env={"APPTAINER_BINDPATH": "/usr"},
    )
    assert done.stdout.strip() == " ".join(ascii(value) for value in values)
    assert not os.path.exists("/tmp/never")


@pytest.mark.parametrize("seconds", [1, 3, 12])
def test_an_interrupted_demo_leaves_nothing(lab, seconds):
    """Ctrl-C while it starts, while the ranks start, while the engine loads."""
    demo = subprocess.Popen(
        [sys.executable, support.TESTS / "lab" / "demo.py"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        time.sleep(seconds)
        os.killpg(demo.pid, signal.SIGINT)
        assert demo.wait(timeout=90) == 130
    finally:
        demo.kill()
    queue = ["squeue", "-h", f"--user={lab.user}", "-o", "%T"]
    deadline = time.monotonic() + 30
    while states := lab.run(queue, timeout=20).stdout.split():
        assert set(states) == {"COMPLETING"} and time.monotonic() < deadline, states
        time.sleep(0.5)
    assert [lab.node_processes(node) for node in lab.nodes] == [[], []]
    assert lab.status()["up"]  # it was up before
