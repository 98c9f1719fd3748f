"""``launch``: submitted, and with --wait its stages until it serves or fails."""

import json
import os
import re
import signal
import time

import pytest
import screen
from terminal import JOB, READY_SIGNATURE, StandinJob

KEY = "sk-very-secret-key"
GONE = "slurm_load_jobs error: Invalid job id specified"


@pytest.fixture
def waiting(terminal, request_words, job):
    """Return what starts a launch that waits for a job in the queue."""

    def start(*more, tty=False, **options):
        job.slurm("PENDING", Reason="Priority")
        words = request_words(**options)
        running = terminal.start("launch", *words, "--wait", *more, tty=tty)
        running.wait_for("queued: Priority")
        return running

    return start


def test_a_job_is_submitted(shell, request_words, login, job):
    shown = shell("launch", *request_words(time="01:00:00"))
    assert (shown.status, shown.said) == (0, "")
    assert shown.printed == f"Job         42\nDirectory   {job.directory}\n"
    assert [call[0] for call in login.calls()] == ["sbatch", "scontrol"]
    assert "#SBATCH --time=01:00:00\n" in job.file("sbatch").read_text()


def test_what_is_vec_infs_goes_to_vec_inf(shell, request_words, login):
    shown = shell("launch", *request_words("one-node"))
    assert shown.status == 0, shown.said
    ((name, script),) = login.calls()
    assert name == "sbatch" and script.endswith(".sbatch")


def test_json_is_vec_infs_config_without_values_of_env(shell, request_words, job):
    words = request_words(env=f"VLLM_API_KEY={KEY},HF_HOME=/s3cr3t")
    shown = shell("launch", *words, "--json-mode")
    found = json.loads(shown.printed)
    kept = json.loads(job.file("json").read_text())
    assert found == {**kept, "env": {"VLLM_API_KEY": "***", "HF_HOME": "***"}}
    assert kept["env"]["VLLM_API_KEY"] == KEY


@pytest.mark.parametrize(
    "more, kind, status",
    [
        ({"vllm_args": "-tp=3"}, "ParallelismError", 3),
        ({"model": "no-such"}, "ModelConfigurationError", 3),
        ({"env": "/no/such/file"}, "EnvFileError", 3),
        ({"engine": "sglang", "vllm_args": "--a"}, "ValueError", 3),
        ({"config": "/no/such.yaml"}, "FileNotFoundError", 3),
    ],
)
def test_a_refusal_is_3(shell, request_words, login, more, kind, status):
    shown = shell("launch", *request_words(**more), "--json-mode")
    error = json.loads(shown.printed)["error"]
    assert (shown.status, error["kind"], error["exit_code"]) == (status, kind, status)
    assert login.calls() == []
    shown = shell("launch", *request_words(**more))
    assert (shown.status, shown.printed) == (status, "")
    assert error["message"] in shown.said and "Traceback" not in shown.said


def test_a_submission_that_slurm_refuses_is_3(shell, request_words, login):
    login.answer("sbatch.err", "sbatch: error: invalid partition specified: x")
    login.answer("sbatch.status", "1")
    shown = shell("launch", *request_words())
    assert shown.status == 3 and "invalid partition specified: x" in shown.said


def test_a_job_that_cannot_be_released_is_4(shell, request_words, login):
    login.answer("scontrol.err", "slurm_update error: no permission")
    login.answer("scontrol.status", "1")
    shown = shell("launch", *request_words())
    assert shown.status == 4
    assert login.calls()[-1] == ["scancel", JOB]


# The wait


def test_the_stages_are_shown_as_they_happen(waiting, job):
    """Plain lines where there is no terminal."""
    running = waiting()
    job.slurm("RUNNING")
    job.mark("started on x", "rank 1 up on nid002")
    running.wait_for("starting: 1 of 2 ranks up")
    job.mark("rank 0 up on nid001")
    job.rank_says("Loading safetensors\n")
    running.wait_for("loading: Loading safetensors")
    job.rank_says("Capturing graphs\n")
    url = job.serve()
    assert running.ended() == 0, running
    lines = running.said.splitlines()
    stages = [re.sub(r"^ *[\d.]+ s  ", "", line).strip() for line in lines]
    assert stages == [
        "queued: Priority",
        "queued",
        "starting: 1 of 2 ranks up",
        "starting",
        "loading: Loading safetensors",
        "loading",
        f"ready  {url}",
        "To reach it: vec-inf-multinode connect 42",
    ]
    assert "\x1b" not in running.said


def test_markup_of_a_log_is_text(waiting, job):
    running = waiting()
    job.slurm("RUNNING")
    job.mark("started on x", "rank 0 up on nid001", "rank 1 up on nid002")
    job.rank_says("[bold]12%[/bold] [/no] \x1b[31mred\n")
    running.wait_for("loading: [bold]12%[/bold] [/no] red\n")


def test_a_terminal_gets_a_live_line(waiting, job):
    """It is gone in the end; the stages stay."""
    running = waiting(tty=True)
    job.slurm("RUNNING")
    job.mark("started on x", "rank 0 up on nid001", "rank 1 up on nid002")
    job.rank_says("[bold]12%[/bold] \x1b]0;title\x07\x1b[2Jloading\n")
    running.wait_for("loading: [bold]12%[/bold] loading")
    url = job.serve()
    assert running.ended() == 0, running
    assert "\x1b]0;" not in running.said and "\x1b[2J" not in running.said
    assert "\x07" not in running.said
    shown = [re.sub(r"^ *[\d.]+ s  ", "", line) for line in screen.left(running.said)]
    assert shown[:4] == ["queued", "starting", "loading", f"ready  {url}"]
    assert shown[4:] == ["To reach it: vec-inf-multinode connect 42"]
    assert "\x1b[?25h" in running.said  # the cursor is back


def test_json_with_the_wait_has_the_status(waiting, job):
    running = waiting("--json-mode", env=f"VLLM_API_KEY={KEY}")
    job.slurm("RUNNING")
    url = job.serve(key=KEY)
    assert running.ended() == 0, running
    found = json.loads(running.printed)
    assert found["slurm_job_id"] == JOB and KEY not in running.printed
    assert (found["status"]["stage"], found["status"]["base_url"]) == ("ready", url)
    assert [stage for stage, _ in found["status"]["passed"]] == [
        "queued",
        "starting",
        "loading",
    ]


def test_a_failure_names_rank_node_and_cause(waiting, job):
    running = waiting()
    job.mark("started on x", "rank 0 up on nid001", "rank 1 up on nid002")
    job.fail(
        "rank 1 on nid002 exited with status 1 after 9s: out of GPU memory [x]\x1b[2J",
        rank=1,
        node="nid002",
        log="/x/ranks/rank-1.nid002.err",
    )
    job.slurm("FAILED")
    assert running.ended() == 4, running
    error = running.said[running.said.index("Error:") :]
    assert error == (
        "Error: Job 42 failed: rank 1 on nid002 exited with status 1 after 9s: out of "
        "GPU memory [x]\n"
        "rank  1\n"
        "node  nid002\n"
        "log   /x/ranks/rank-1.nid002.err\n"
        "More: vec-inf-multinode diagnose 42\n"
    )


def test_a_failure_as_json(waiting, job):
    running = waiting("--json-mode")
    job.fail("rank 1 died", rank=1, node="nid002")
    job.slurm("COMPLETING")
    assert running.ended() == 4, running
    error = json.loads(running.printed)["error"]
    assert (error["stage"], error["cause"]) == ("failed", "rank 1 died")
    assert (error["rank"], error["node"], error["slurm_job_id"]) == (1, "nid002", JOB)
    assert "Slurm has it still; should it not end: scancel 42" in error["message"]


def test_a_job_that_is_cancelled_while_it_is_waited_for(waiting, job):
    running = waiting()
    job.slurm("CANCELLED")
    assert running.ended() == 4
    assert "Error: Job 42 stopped: the job was cancelled\n" in running.said


def test_a_job_that_slurm_forgets_is_lost(waiting, login):
    running = waiting()
    login.answer("scontrol.err", GONE)
    assert running.ended() == 4
    assert "Error: Job 42 lost" in running.said and GONE in running.said


def test_ctrl_c_leaves_the_job(waiting, login):
    running = waiting()
    running.interrupt()
    assert running.ended() == 130
    assert "job 42 goes on. To stop it: scancel 42" in running.said
    assert not [call for call in login.calls() if call[0] == "scancel"]


def test_ctrl_c_as_json(waiting):
    running = waiting("--json-mode")
    running.interrupt()
    assert running.ended() == 130
    assert json.loads(running.printed)["error"]["slurm_job_id"] == JOB


@pytest.mark.parametrize("command", ["launch", "serve"])
@pytest.mark.parametrize("model", ["two-nodes", "one-node"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupted_while_it_is_submitted_nothing_is_left(
    terminal, request_words, login, job, command, model, number
):
    """sbatch is not cut short: it could have queued a job whose id nobody knows."""
    fifo = login.stub_dir / "sbatch.hold"
    os.mkfifo(fifo)
    job.slurm("PENDING")
    login.answer("scancel.then", job.slurm_line("CANCELLED"))
    running = terminal.start(command, *request_words(model))
    with fifo.open("w") as hold:  # opens when sbatch reads
        running.interrupt(number)
        time.sleep(0.3)
        assert running.process.poll() is None
        hold.write("go\n")
    assert running.ended() == 130, running
    assert [call for call in login.calls() if call[0] == "scancel"] == [
        ["scancel", JOB]
    ]


def test_a_job_of_vec_infs_own_can_be_waited_for(terminal, request_words, login):
    job = StandinJob(login, "one-node")
    job.slurm("RUNNING")
    running = terminal.start("launch", *request_words("one-node"), "--wait")
    running.wait_for("loading")
    job.file("err").write_text("(APIServer) INFO weights\n")
    try:
        url = job.serve()
        assert running.ended() == 0, running
    finally:
        job.close()
    assert f"ready  {url}" in running.said
    assert READY_SIGNATURE in job.file("err").read_text()
