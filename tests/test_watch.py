"""What a job is doing, told from Slurm's fields and the job's own files."""

import itertools
import subprocess
import sys
import threading
import time
from dataclasses import FrozenInstanceError, replace
from datetime import datetime

import pytest
import support
from terminal import JOB, READY_SIGNATURE
from vec_inf.client import ModelStatus, StatusResponse, VecInfClient
from vec_inf.client._exceptions import ServerError, SlurmJobError

from app.utils.vec_inf_multinode import MultinodeClient, launcher, slurm, watch
from app.utils.vec_inf_multinode.jobdir import JobDirectory

T0 = 1_800_000_000
URL = "http://nid001:8080/v1"
GONE = "slurm_load_jobs error: Invalid job id specified"


@pytest.fixture
def told(job):
    """Return what is told of the job, 100 s after it was submitted."""
    job.submitted = T0
    job.make()

    def tell(state, server="LAUNCHING", now=T0 + 100, reason=None, **fields):
        line = job.slurm_line(state, **fields)
        status = StatusResponse(
            model_name=job.model,
            log_dir=str(job.directory),
            server_status=ModelStatus(server),
            job_state=state,
            raw_output=line,
            base_url=URL,
            failed_reason=reason,
        )
        directory = JobDirectory(job.directory)
        fields = slurm.parse_job(line)
        return watch.progress(status, directory, fields, now, READY_SIGNATURE)

    return tell


def at(seconds):
    """One of Slurm's times, seconds after the submission."""
    return datetime.fromtimestamp(T0 + seconds).isoformat()


def test_a_queued_job_has_slurms_reason(told):
    assert told("PENDING", "PENDING", Reason="Priority", StartTime=at(5000)) == (
        watch.Progress("queued", "Priority", 100, 100)
    )


@pytest.mark.parametrize("state", sorted(slurm.WAITING))
def test_every_state_without_nodes_is_queued(told, state):
    """A requeued job is queued again, whatever it has left behind."""
    assert told(state, "UNAVAILABLE").stage == "queued"


def test_ranks_are_counted_while_they_start(told, job):
    job.mark("started on nid[001-002]", at=T0 + 41)
    assert told("RUNNING", StartTime=at(40)).detail == "0 of 2 ranks up"
    job.mark("rank 1 up on nid002", at=T0 + 45)
    assert told("RUNNING", StartTime=at(40)) == (
        watch.Progress("starting", "1 of 2 ranks up", 60, 100, (("queued", 40),))
    )


def test_a_job_of_ours_starts_before_it_has_left_a_mark(told):
    assert told("RUNNING", StartTime=at(99)).stage == "starting"


def test_the_last_word_of_rank_0_while_it_loads(told, job):
    job.mark("started on x", "rank 0 up on a", at=T0 + 41)
    job.mark("rank 1 up on b", at=T0 + 43)
    job.rank_says("first\nLoading  10%\rLoading  80%\r\n\n")
    job.rank_says("of another\n", rank=1)
    assert told("RUNNING", StartTime=at(40)) == watch.Progress(
        "loading", "Loading  80%", 57, 100, (("queued", 40), ("starting", 3))
    )


def test_a_ready_job_has_its_address_and_the_time_of_every_stage(told, job):
    job.mark("started on x", "rank 0 up on a", "rank 1 up on b", at=T0 + 43)
    job.mark("ready", at=T0 + 90)
    passed = (("queued", 40), ("starting", 3), ("loading", 47))
    assert told("RUNNING", "READY", StartTime=at(40)) == (
        watch.Progress("ready", URL, 10, 100, passed)
    )


def test_a_failed_job_has_its_cause(told, job):
    job.mark("started on x", "rank 0 up on a", at=T0 + 41)
    job.fail("rank 1 died", time=T0 + 70)
    found = told("COMPLETING", "FAILED", reason="LLMHUB-ERROR: rank 1 died")
    assert (found.stage, found.detail) == ("failed", "rank 1 died")
    assert (found.stage_seconds, found.seconds) == (30, 70)


@pytest.mark.parametrize(
    "state, stage, said",
    [
        ("TIMEOUT", "stopped", "the walltime is over"),
        ("CANCELLED", "stopped", "the job was cancelled"),
        ("PREEMPTED", "stopped", "the job was preempted"),
        ("DEADLINE", "stopped", "the job's deadline has passed"),
        ("REVOKED", "stopped", "the job was revoked"),
        ("COMPLETED", "stopped", "the job ended by itself"),
        ("NODE_FAIL", "failed", "Slurm says NODE_FAIL, exit code 1:0"),
        ("FAILED", "failed", "Slurm says FAILED, exit code 1:0"),
        ("OUT_OF_MEMORY", "failed", "Slurm says OUT_OF_MEMORY, exit code 1:0"),
        ("BOOT_FAIL", "failed", "Slurm says BOOT_FAIL, exit code 1:0"),
    ],
)
def test_a_job_that_has_ended_is_over(told, state, stage, said):
    found = told(state, "UNAVAILABLE", EndTime=at(60), ExitCode="1:0")
    assert (found.stage, found.detail) == (stage, said)
    assert (found.stage_seconds, found.seconds) == (40, 60)


def test_every_end_is_known():
    assert set(watch._STOPPED_BY) < slurm.ENDED


def test_the_last_line_of_err_is_shown_where_nothing_else_is_known(told, job):
    job.file("err").write_text("one\nbash: vllm: command not found\n")
    found = told("FAILED", "UNAVAILABLE", ExitCode="127:0")
    assert found.detail.endswith("of its .err: bash: vllm: command not found")


def test_a_job_that_is_ending_is_not_judged_yet(told, job):
    """TIMEOUT or CANCELLED is known only after COMPLETING."""
    found = told("COMPLETING", "UNAVAILABLE")
    assert (found.stage, found.detail) == ("starting", "Slurm is ending the job")


def test_a_job_of_vec_infs_own_has_its_last_line(told, job):
    job.file("sbatch").write_text("#!/bin/bash\nvllm serve\n")
    job.file("err").write_text("(EngineCore) INFO loading weights\n")
    assert told("RUNNING", StartTime=at(10)) == watch.Progress(
        "loading", "(EngineCore) INFO loading weights", 90, 100, (("queued", 10),)
    )


def test_a_step_that_is_started_again_counts_afresh(told, job):
    job.mark("started on x", "rank 0 up on a", "rank 1 up on b", "ready", at=T0 + 41)
    job.mark("started on x", "rank 0 up on a", attempt=1, at=T0 + 5000)
    assert told("RUNNING", StartTime=at(40), now=T0 + 5007) == (
        watch.Progress("starting", "1 of 2 ranks up", 7, 5007)
    )


def test_clocks_that_differ_give_no_negative_time(told, job):
    job.mark("started on x", "rank 0 up on a", "rank 1 up on b", "ready", at=T0 + 300)
    found = told("RUNNING", "READY", StartTime=at(400))
    assert min(found.stage_seconds, *(s for _, s in found.passed)) >= 0


@pytest.mark.parametrize(
    "line, shown",
    [
        ("\x1b[31mred\x1b[0m [bold]x[/bold]", "red [bold]x[/bold]"),
        ("\x1b]0;title\x07rest", "rest"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("a\tb\x00\x07\x08\x9b31m", "a b31m"),
        ("x\u202ey", "xy"),
        ("\x1b(B\x1bcdone\x1b", "done"),
    ],
)
def test_no_control_character_of_a_log_is_told(told, job, line, shown):
    job.mark("started on x", "rank 0 up on a", "rank 1 up on b", at=T0 + 41)
    job.rank_says(line + "\n")
    assert told("RUNNING", StartTime=at(40)).detail == shown


def test_a_huge_log_is_read_from_its_end(tmp_path):
    log = tmp_path / "log"
    log.write_text("x" * 10_000_000 + "\nlast\n")
    started = time.perf_counter()
    assert watch.last_line(log) == "last"
    assert time.perf_counter() - started < 0.1
    assert watch.last_line(tmp_path / "none") == ""


def test_a_progress_is_frozen(told):
    with pytest.raises(FrozenInstanceError):
        told("PENDING").stage = "ready"


# Slurm's answers


def test_fields_with_spaces_are_whole():
    line = "JobId=1 JobName=a JobState=RUNNING Comment=x JobState=FAILED WorkDir=/a b/c"
    assert slurm.parse_job(line + " NtasksPerN:B:S:C=1:0:*:* CPUs/Task=4\n") == {
        "JobId": "1",
        "JobName": "a",
        "JobState": "RUNNING",
        "Comment": "x",
        "WorkDir": "/a b/c",
        "NtasksPerN:B:S:C": "1:0:*:*",
        "CPUs/Task": "4",
    }


def test_a_job_is_asked_for(job, login):
    job.make()
    assert slurm.show_job(JOB)["JobState"] == "RUNNING"
    assert slurm.is_over(JOB) is False
    job.slurm("TIMEOUT")
    assert slurm.is_over(JOB) is True
    login.answer("scontrol.err", GONE)
    login.answer("scontrol.status", "1")
    assert (slurm.show_job(JOB), slurm.is_over(JOB)) == ({}, True)
    login.answer("scontrol.err", "Unable to contact slurm controller")
    assert (slurm.show_job(JOB), slurm.is_over(JOB)) == ({}, None)
    login.path.joinpath("scontrol").unlink()
    assert (slurm.show_job(JOB), slurm.is_over(JOB)) == ({}, None)


def test_a_command_that_hangs_is_unknown(login, monkeypatch):
    login.path.joinpath("scontrol").unlink()
    login.path.joinpath("scontrol").write_text("#!/bin/bash\nread -r -t 30 < <(:)\n")
    hang = "#!/bin/bash\nexec 3<> <(:)\nread -r -t 30 -u 3\n"
    login.path.joinpath("scontrol").write_text(hang)
    login.path.joinpath("scontrol").chmod(0o755)
    monkeypatch.setattr(slurm, "LIMIT", 0.3)
    assert slurm.is_over(JOB) is None


@pytest.mark.parametrize(
    "fields, left",
    [
        ({"EndTime": at(250)}, 150),
        ({"EndTime": at(50)}, 0),
        ({"EndTime": at(250), "TimeLimit": "UNLIMITED"}, None),
        ({"EndTime": "Unknown"}, None),
        ({}, None),
    ],
)
def test_time_left(fields, left):
    assert slurm.seconds_left(fields, T0 + 100) == left


# The wait


@pytest.fixture
def client(job):
    """Return a client and a job that runs."""
    job.make()
    return MultinodeClient()


def wait(client, look=lambda progress: None, **options):
    """Wait, with short pauses; what came of it, and what was told on the way."""
    told = []

    def on_progress(progress):
        told.append(progress)
        look(progress)

    settings = {"timeout_seconds": 20, "poll_interval_seconds": 0.01, **options}
    settings["on_progress"] = on_progress
    try:
        return client.wait_until_ready(JOB, **settings), told
    except Exception as err:
        return err, told


def test_a_wait_returns_vec_infs_status(client, job):
    url = job.serve()
    status, told = wait(client)
    assert status == VecInfClient().get_status(JOB)
    assert (status.base_url, told[-1].stage) == (url, "ready")


def test_a_queued_job_does_not_time_out(client, job):
    """The time counts only while the job runs; the queue may take hours."""
    job.slurm("PENDING", Reason="Priority")
    looks = itertools.count(1)

    def look(progress):
        if next(looks) == 20:
            job.slurm("CANCELLED")

    err, told = wait(client, timeout_seconds=0, look=look)
    assert [p.stage for p in told] == ["queued"] * 20 + ["stopped"]
    assert isinstance(err, ServerError)
    assert str(err).endswith("before it became ready: the job was cancelled")


def test_a_job_that_runs_times_out(client, job):
    err, told = wait(client, timeout_seconds=0.1)
    assert isinstance(err, ServerError)
    assert str(err) == (
        "Timed out waiting for model to become ready after 0.1 seconds; it is "
        "starting: 0 of 2 ranks up"
    )
    assert len(told) >= 2


def test_a_requeued_job_gets_its_time_again(client, job):
    """Its clock starts when it runs again."""
    states = iter(["RUNNING", "REQUEUED", "PENDING", "RUNNING", "CANCELLED"])

    def look(progress):
        job.slurm(next(states, "CANCELLED"))
        time.sleep(0.06)

    err, _ = wait(client, timeout_seconds=0.1, look=look)
    assert "cancelled" in str(err)


def test_a_failure_is_raised_with_its_cause(client, job):
    job.fail("rank 1 on nid002 exited with status 1 after 3s")
    job.slurm("FAILED")
    err, _ = wait(client)
    assert isinstance(err, ServerError)
    assert str(err) == (
        "Model failed to start: rank 1 on nid002 exited with status 1 after 3s"
    )


def test_a_wait_ends_when_slurm_forgets_the_job(client, login):
    def forget(progress):
        login.answer("scontrol.err", GONE)

    err, told = wait(client, look=forget)
    assert isinstance(err, SlurmJobError) and GONE in str(err)
    assert len(told) == 1


def test_a_wait_outlives_a_controller_that_restarts(client, job, login):
    job.serve()
    job.file("err").write_text("")

    def look(progress):
        login.answer("scontrol.err", "Unable to contact slurm controller")
        job.file("err").write_text(f"{READY_SIGNATURE}\n")
        back = threading.Timer(0.5, login.stub_dir.joinpath("scontrol.err").unlink)
        if progress.stage != "ready":
            back.start()

    status, told = wait(client, look=look)
    assert status.server_status == "READY", status
    assert [p.stage for p in told] == ["loading", "ready"]


def test_a_controller_that_stays_away_ends_the_wait(client, login, monkeypatch):
    monkeypatch.setattr(launcher, "SILENCE", 0.2)

    def look(progress):
        login.answer("scontrol.err", "Unable to contact slurm controller")

    err, told = wait(client, look=look)
    assert isinstance(err, SlurmJobError) and len(told) == 1


def test_a_wait_without_slurm_raises_at_once(client, login):
    login.path.joinpath("scontrol").unlink()
    err, told = wait(client)
    assert isinstance(err, SlurmJobError) and not told


def test_a_server_that_is_silent_for_a_moment_is_not_given_up(client, job):
    """vec-inf says FAILED at the first health check that is not answered."""
    job.serve(health=503)
    assert client.get_status(JOB).server_status == "FAILED"

    def look(progress):
        job.answers(health=200)

    status, told = wait(client, look=look)
    assert [p.stage for p in told] == ["loading", "ready"]
    assert told[0].detail == "the server does not answer: 503"


def test_a_failure_counts_all_the_same(client, job):
    """A record of the job's own, while Slurm has it running."""
    job.serve(health=503)
    job.fail("rank 1 died")
    assert str(wait(client)[0]) == "Model failed to start: rank 1 died"


def test_an_error_before_it_was_ready_fails_a_job_of_vec_infs(client, job):
    job.file("sbatch").write_text("vllm serve\n")
    job.file("err").write_text("RuntimeError: no device\n")
    assert str(wait(client)[0]) == "Model failed to start: RuntimeError: no device"


def test_the_library_brings_no_console():
    """Who imports the package in a web service gets neither click nor rich."""
    code = (
        "import sys, app.utils.vec_inf_multinode as package; package.check_vec_inf();"
        "print([name for name in ('click', 'rich', 'vec_inf.cli') "
        "if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=support.TREE,
        capture_output=True,
        text=True,
        timeout=support.TIME_LIMIT,
        check=True,
    )
    assert done.stdout == "[]\n"


def test_two_looks_at_the_same_facts_agree(told, job):
    """No clock of its own: who looks later sees the same times."""
    job.mark("started on x", "rank 0 up on a", "rank 1 up on b", at=T0 + 43)
    early, late = told("RUNNING", now=T0 + 50), told("RUNNING", now=T0 + 70)
    assert late.passed == early.passed
    assert replace(late, stage_seconds=7, seconds=50) == early
