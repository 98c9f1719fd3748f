"""``serve``: a model as long as the command runs, and no longer."""

import json
import os
import re
import signal
import time

import pytest
import screen
from terminal import JOB, StandinJob

from app.utils.vec_inf_multinode.cli import load, signals

KEY = "sk-very-secret-key"


@pytest.fixture
def serving(terminal, request_words, job, login):
    """Return what starts a serve whose model is ready."""

    def start(*more, tty=False, env="", **environ):
        job.slurm("RUNNING")
        login.answer("scancel.then", job.slurm_line("CANCELLED"))
        words = request_words(**({"env": env} if env else {}))
        running = terminal.start("serve", *words, *more, tty=tty, **environ)
        running.wait_for("0 of 2 ranks up")
        job.serve(running=2, moving=True)
        running.wait_for("2 running, 0 waiting")
        return running

    return start


def cancelled(login):
    """How often the job was cancelled."""
    return login.calls().count(["scancel", JOB])


def test_it_says_how_to_reach_the_model_and_how_busy_it_is(serving, shell):
    running = serving(env=f"VLLM_API_KEY={KEY}")
    assert shell("connect", JOB).printed in running.printed
    assert KEY not in running.printed + running.said
    line = next(x for x in running.said.splitlines() if "2 running" in x)
    assert re.search(r"2 running, 0 waiting, [78]:\d\d:\d\d left$", line)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interruption_stops_the_job(serving, login, number):
    """Ctrl-C, TERM, and HUP: of a lost connection, GPUs would be billed for nobody."""
    running = serving()
    running.interrupt(number)
    assert running.ended() == 130, running
    assert cancelled(login) == 1
    assert "job 42 is stopped" in running.said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_keep_leaves_the_job(serving, login, number):
    running = serving("--keep")
    running.interrupt(number)
    assert running.ended() == 130
    assert cancelled(login) == 0
    assert "job 42 goes on. To stop it: scancel 42" in running.said


def test_it_waits_until_slurm_says_that_the_job_is_gone(serving, login, job):
    running = serving()
    login.answer("scancel.then", job.slurm_line("COMPLETING"))
    running.interrupt()
    running.wait_for("Stopping job 42")
    with pytest.raises(Exception):
        running.process.wait(2.5)
    job.slurm("CANCELLED")
    assert running.ended() == 130
    assert cancelled(login) == 1


def interrupted_by(number):
    """Whether a signal to this process raises."""
    try:
        os.kill(os.getpid(), number)
        time.sleep(0.05)
    except KeyboardInterrupt:
        return True
    return False


def test_one_interruption_is_enough():
    """What it sets off is not cut short by the next, until that is allowed."""
    with signals.interruptible():
        assert interrupted_by(signal.SIGTERM)
        assert not any(map(interrupted_by, signals.STOPPING))
        signals.allow_another()
        assert interrupted_by(signal.SIGINT)


def test_what_is_ignored_stays_so():
    """nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals.interruptible():
            assert not interrupted_by(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_ctrl_c_does_not_undo_the_first(serving, login, job):
    """Pressed twice at once: the job is cancelled all the same."""
    running = serving()
    login.answer("scancel.then", job.slurm_line("COMPLETING"))
    running.interrupt()
    running.interrupt()
    running.wait_for("Stopping job 42")
    running.interrupt()
    assert running.ended() == 130
    assert cancelled(login) == 1


def test_a_cancellation_that_fails_is_tried_again(serving, login, job):
    running = serving()
    login.answer("scancel.err", "scancel: error: Unable to contact slurm controller")
    running.interrupt()
    running.wait_for("Stopping job 42")
    login.stub_dir.joinpath("scancel.err").unlink()
    assert running.ended() == 130
    assert cancelled(login) >= 2


def test_a_job_that_fails_while_it_serves(serving, job, login):
    running = serving()
    job.fail("rank 1 on nid002 exited with status 0 after 84s, while serving", rank=1)
    job.slurm("FAILED")
    assert running.ended() == 4
    assert "Job 42 failed: rank 1 on nid002 exited with status 0" in running.said
    assert cancelled(login) == 0


def test_a_moment_without_an_answer_stops_nothing(serving, job, login):
    """Of the server, and of Slurm's controller."""
    running = serving(tty=True)
    job.answers(health=503)
    running.wait_for("the server does not answer: 503")
    login.answer("scontrol.err", "Unable to contact slurm controller")
    time.sleep(6)
    login.stub_dir.joinpath("scontrol.err").unlink()
    job.answers(running=7)
    running.wait_for("7 running")
    assert cancelled(login) == 0


def test_the_end_of_the_walltime_is_said(serving, job):
    running = serving()
    job.slurm("TIMEOUT")
    assert running.ended() == 4
    assert "Error: Job 42 stopped: the walltime is over\n" in running.said


def test_a_job_that_vec_inf_alone_calls_failed_is_stopped(
    terminal, request_words, login
):
    """Slurm would let it run, and bill it, to the end of its walltime."""
    job = StandinJob(login, "one-node")
    job.slurm("RUNNING")
    login.answer("scancel.then", job.slurm_line("CANCELLED"))
    running = terminal.start("serve", *request_words("one-node"))
    running.wait_for("loading")
    job.file("err").write_text("Failed to import a plugin\n")
    assert running.ended() == 4, running
    assert "Failed to import a plugin" in running.said
    assert cancelled(login) == 1


def test_an_error_of_its_own_stops_the_job(terminal, request_words, login, job):
    """Here: nobody reads what it prints."""
    job.slurm("RUNNING")
    login.answer("scancel.then", job.slurm_line("CANCELLED"))
    running = terminal.start("serve", *request_words(), deaf=True)
    assert running.ended() not in (0, None)
    assert cancelled(login) == 1


def test_json_is_a_document_when_ready_and_one_at_the_end(serving, shell):
    running = serving("--json-mode")
    running.interrupt()
    assert running.ended() == 130
    decoder = json.JSONDecoder()
    first, end = decoder.raw_decode(running.printed)
    second, _ = decoder.raw_decode(running.printed[end:].lstrip())
    assert first["slurm_job_id"] == JOB and first["base_url"].startswith("http")
    assert second["error"]["exit_code"] == 130


def test_a_terminal_gets_one_live_line(serving):
    running = serving(tty=True)
    running.interrupt()
    assert running.ended() == 130
    # of the live line nothing is left
    assert screen.left(running.said)[-2:] == [
        "Stopping job 42; Ctrl-C to leave before it has ended.",
        "Interrupted; job 42 is stopped.",
    ]


# How busy it is

METRICS = """# HELP vllm:num_requests_running x
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
vllm:prompt_tokens_total{engine="0",model_name="m {x} 1"} 100.0
vllm:generation_tokens_total{engine="0",model_name="m"} 1e3
vllm:generation_tokens_created{engine="0"} 9e9
other 7
"""


def test_the_engines_are_added_up():
    assert load.parse(METRICS, 5.0) == load.Load(5.0, 3, 4, 100.0, 1000.0)


def test_no_metrics_are_no_load():
    assert load.parse("other 1\n", 5.0) is None
    assert load.describe(None, None) == "no metrics"
    assert load.fetch("http://127.0.0.1:1/v1") is None


def test_tokens_per_second_are_those_since_the_last_look():
    before = load.Load(10.0, 0, 0, 100.0, 1000.0)
    now = load.Load(12.0, 1, 2, 110.0, 1100.0)
    assert load.describe(None, now) == "1 running, 2 waiting"
    assert load.describe(before, now) == (
        "1 running, 2 waiting, 5.0 prompt and 50.0 generated tokens/s"
    )
    # a server that was started again counts from 0
    again = load.Load(14.0, 1, 0, 0.0, 8.0)
    assert load.describe(now, again).endswith("0.0 prompt and 0.0 generated tokens/s")
