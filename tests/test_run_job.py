"""The job of a run: waited for, judged, taken back, stopped."""

import json
import os
from contextlib import closing

import pytest
from batch import MODEL, a_cluster
from endpoint import Endpoint

from app.utils.vec_inf_multinode import slurm
from app.utils.vec_inf_multinode.cli import run_job
from app.utils.vec_inf_multinode.cli.run_job import (
    Job,
    JobLost,
    api_keys,
    end_of,
    look,
    wait_ready,
)
from app.utils.vec_inf_multinode.errors import SlurmJobError
from app.utils.vec_inf_multinode.jobdir import JobDirectory
from app.utils.vec_inf_multinode.launcher import MultinodeClient
from app.utils.vec_inf_multinode.results import Output

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Return a cluster, with this process on its submitting machine."""
    monkeypatch.setattr(run_job, "POLL", 0.02)
    with a_cluster(tmp_path) as machine:
        for name, value in machine.login.environ.items():
            monkeypatch.setenv(name, value)
        yield machine


@pytest.fixture
def said(cluster):
    """Return what is said while a job is waited for; each item may change the job."""

    class Said(list):
        then = {}

        def __call__(self, text):
            self.append(text)
            self.then.get(text, lambda: None)()

    return Said()


def timeline(cluster, text):
    attempt = cluster.directory("42") / "attempt-0"
    attempt.mkdir(parents=True, exist_ok=True)
    attempt.joinpath("timeline").write_text(text)


def test_a_job_in_the_queue_is_waited_for(cluster, said):
    cluster.show("42", "PENDING", "Priority")
    said.then = {
        "Job 42 is queued (Priority)": lambda: cluster.show(
            "42", "PENDING", "Resources"
        ),
        "Job 42 is queued (Resources)": lambda: cluster.show("42", "CONFIGURING"),
        "Job 42 is starting": lambda: cluster.start("42"),
    }
    status = wait_ready(MultinodeClient(), "42", said)
    assert status.base_url == f"{cluster.endpoint.root}/v1"
    assert said == list(said.then)


def test_a_reason_that_is_none_is_not_said(cluster, said):
    cluster.show("42", "PENDING", "None")
    said.then = {"Job 42 is queued": lambda: cluster.start("42")}
    wait_ready(MultinodeClient(), "42", said)
    assert said == ["Job 42 is queued"]


@pytest.mark.parametrize("state", sorted(slurm.ENDED))
def test_a_job_that_has_ended(cluster, said, state):
    cluster.show("42", state)
    with pytest.raises(JobLost, match=f"Slurm says {state}"):
        wait_ready(MultinodeClient(), "42", said)


def test_a_job_that_failed_gives_its_cause(cluster, said):
    cluster.start("42")
    cluster.fail("42", "rank 1 is gone")
    with pytest.raises(JobLost, match="LLMHUB-ERROR: rank 1 is gone"):
        wait_ready(MultinodeClient(), "42", said)


def test_a_job_that_slurm_has_forgotten(cluster):
    cluster.login.answer("scontrol.err", "slurm_load_jobs error: Invalid job id given")
    cluster.login.answer("scontrol.out", "")
    with pytest.raises(JobLost, match="does not know it"):
        look(MultinodeClient(), "42")


def test_slurm_may_be_away_for_a_while(cluster, monkeypatch):
    cluster.login.answer("scontrol.err", "Unable to contact slurm controller")
    cluster.show("42", "RUNNING")
    monkeypatch.setattr(run_job, "SLURM_PATIENCE", 0.2)
    with pytest.raises(SlurmJobError, match="Unable to contact"):
        look(MultinodeClient(), "42")
    assert cluster.calls("scontrol", "show") > 2


def test_a_requeued_job_comes_again(cluster, said):
    cluster.show("42", "COMPLETING")
    said.then = {
        "Job 42 is starting": lambda: cluster.show("42", "PENDING", "BeginTime"),
        "Job 42 is queued (BeginTime)": lambda: cluster.start("42"),
    }
    assert wait_ready(MultinodeClient(), "42", said).server_status == "READY"


def test_a_server_that_does_not_answer_is_given_up(cluster, said, monkeypatch):
    monkeypatch.setattr(run_job, "SERVER_PATIENCE", 0.2)
    cluster.start("42")
    cluster.endpoint.healthy = False
    with pytest.raises(JobLost, match="does not answer: 503"):
        wait_ready(MultinodeClient(), "42", said)


@pytest.mark.parametrize("text", ["1 ready\n2 restart rank 1 died\n", "1 started\n"])
def test_a_server_that_is_loading_again_is_not(cluster, said, monkeypatch, text):
    monkeypatch.setattr(run_job, "SERVER_PATIENCE", 0.0)
    cluster.start("42")
    timeline(cluster, text)
    cluster.endpoint.healthy = False
    said.then = {
        "Job 42 does not answer (503)": lambda: setattr(
            cluster.endpoint, "healthy", True
        )
    }
    assert wait_ready(MultinodeClient(), "42", said).server_status == "READY"


def test_no_end_while_it_is_well(cluster):
    cluster.start("42")
    assert end_of(MultinodeClient().get_status("42")) is None


# ------------------------------------------------------------------ taken back


@pytest.fixture
def job(cluster, said):
    """Return a job object whose output remembers job 42."""
    output = Output(cluster.output, "abc", MODEL)
    with output:
        output.record_job("42")
        yield Job(MultinodeClient(), MODEL, output, said)


@pytest.mark.parametrize("state", ["PENDING", "CONFIGURING", "RUNNING", "SUSPENDED"])
def test_a_job_that_is_there_is_taken_back(cluster, job, state):
    cluster.show("42", state)
    assert job.take_back() and job.id == "42"
    assert cluster.calls("scontrol", "release") == 0


def test_a_held_job_is_released(cluster, job):
    cluster.starts = False
    cluster.show("42", "PENDING", "JobHeldUser")
    assert job.take_back() and cluster.calls("scontrol", "release", "42") == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"UserId": f"other({os.getuid() + 1})"},
        {"JobName": "llama-vec-inf"},
        {"JobState": "TIMEOUT"},
    ],
)
def test_a_job_that_is_not_ours_or_over_is_not(cluster, job, fields):
    cluster.show("42", fields.pop("JobState", "RUNNING"), **fields)
    assert not job.take_back() and job.id is None
    assert cluster.calls("scancel") == 0


def test_a_job_that_is_ending_may_come_again(cluster, job, monkeypatch):
    cluster.show("42", "COMPLETING")
    looks = []

    def counted(client, job_id):
        looks.append(job_id)
        if len(looks) == 3:
            cluster.show("42", "PENDING", "BeginTime")
        return look(client, job_id)

    monkeypatch.setattr(run_job, "look", counted)
    assert job.take_back() and len(looks) == 3


def test_a_job_that_does_not_end_is_not_waited_for(cluster, job, monkeypatch):
    monkeypatch.setattr(run_job, "SERVER_PATIENCE", 0.1)
    cluster.show("42", "COMPLETING")
    assert not job.take_back()


# ------------------------------------------------------------------ stopped


def test_a_stopped_job_is_forgotten(cluster, job):
    job.id = "42"
    job.stop()
    assert cluster.calls("scancel", "42") == 1 and job.output.job_id is None


@pytest.mark.parametrize("words", run_job.GONE)
def test_a_job_that_is_gone_needs_no_stop(cluster, job, said, words):
    cluster.change("scancel", "if ", f"echo 'scancel: error: {words}' >&2\nif ")
    job.id = "42"
    job.stop()
    assert said == [] and job.output.job_id is None


def test_a_job_that_cannot_be_stopped_is_told_and_remembered(cluster, job, said):
    cluster.change("scancel", "if ", "echo 'scancel: error: Access denied' >&2\nif ")
    job.id = "42"
    job.stop()
    assert "Access denied. 'scancel 42' ends it." in said[0]
    assert job.output.job_id == "42"


def test_a_failed_job_is_stopped_too(cluster, job):
    """Slurm may have requeued it: pending, with its failure.json still there."""
    cluster.start("42")
    job.id = "42"
    job.wait()
    cluster.fail("42", "rank 1 died")
    job.stop()
    assert cluster.calls("scancel", "42") == 1 and job.output.job_id is None


def test_one_outage_is_one_for_every_request(cluster, job, said):
    """Requests that failed in an outage are all sent again, not the first alone."""
    cluster.start("42")
    job.id = "42"
    job.wait()
    assert not job.was_away(0)
    cluster.endpoint.healthy = False
    timeline(cluster, "1 ready\n2 restart\n")
    said.then = {
        "Job 42 does not answer (503)": lambda: setattr(
            cluster.endpoint, "healthy", True
        )
    }
    before = run_job.time.monotonic()
    assert job.was_away(before) and job.was_away(before)
    assert not job.was_away(run_job.time.monotonic())


def test_a_requeued_job_has_another_address(cluster, job):
    cluster.start("42")
    job.id = "42"
    assert job.wait() and job.root == cluster.endpoint.root
    with closing(Endpoint(MODEL)) as elsewhere:
        cluster.endpoint = elsewhere
        cluster.start("42")
        assert job.was_away(run_job.time.monotonic()) and job.root == elsewhere.root
        assert not job.was_away(run_job.time.monotonic())


# ------------------------------------------------------------------ the key


def keys(directory, env, **shell):
    directory.mkdir(parents=True, exist_ok=True)
    facts = {} if env is None else {"env": env}
    (directory / f"{directory.name}.json").write_text(json.dumps(facts))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("VLLM_API_KEY", "OPENAI_API_KEY"):
            patch.delenv(name, raising=False)
        for name, value in shell.items():
            patch.setenv(name, value)
        return api_keys(JobDirectory(directory))


@pytest.mark.parametrize(
    "env, shell, wanted",
    [
        ({"VLLM_API_KEY": "k"}, {"VLLM_API_KEY": "other"}, ["k"]),
        ({"VLLM_API_KEY": "$K-${K}"}, {"K": "x"}, ["x-x"]),
        ({"VLLM_API_KEY": "a$1b$é${2}"}, {"1b": "x"}, ["a$1b$é${2}"]),
        ({}, {"VLLM_API_KEY": "v", "OPENAI_API_KEY": "o"}, [None, "v", "o"]),
        (None, {"OPENAI_API_KEY": "o"}, [None, "o"]),
        (None, {}, [None]),
    ],
)
def test_keys(tmp_path, env, shell, wanted):
    assert keys(tmp_path / f"{MODEL}.7", env, **shell) == wanted


def test_a_job_without_a_directory_has_no_key(tmp_path):
    assert api_keys(JobDirectory(tmp_path / "no.7"))[0] is None
