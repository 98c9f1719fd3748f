"""``run`` as a program: end to end, killed and resumed, interrupted, refused."""

import json
import os
import random
import signal
import time

import batch
import pytest
from batch import MODEL, a_cluster, kill, wait_for

pytestmark = pytest.mark.timeout(180)

KEY = "key-5b1f"


@pytest.fixture
def cluster(tmp_path):
    """Return a cluster whose jobs serve at once."""
    with a_cluster(tmp_path) as machine:
        yield machine


def ids(results):
    return sorted(result["custom_id"] for result in results)


def test_a_batch_end_to_end(cluster):
    wanted = cluster.prompts(50)
    done = cluster.run("--json-mode")
    assert done.returncode == 0, done.stderr
    assert ids(cluster.results()) == sorted(wanted)
    first = next(r for r in cluster.results() if r["custom_id"] == "line-1")
    assert first["id"] and first["error"] is None
    assert first["response"]["status_code"] == 200
    assert first["response"]["request_id"] == "cmpl-p1"
    assert first["response"]["body"]["choices"][0]["text"] == "echo p1"
    summary = json.loads(done.stdout)
    assert summary.pop("seconds") > 0
    assert summary == {
        "job_id": "42",
        "output": str(cluster.output),
        "requests": 50,
        "done": 50,
        "failed": 0,
        "prompt_tokens": 100,
        "completion_tokens": 150,
    }
    assert cluster.calls("sbatch") == cluster.calls("scancel", "42") == 1
    assert 1 < cluster.endpoint.most_at_once <= 4


def test_a_finished_run_launches_nothing(cluster):
    cluster.prompts(3)
    cluster.run()
    before, text = cluster.login.calls(), cluster.output.read_text()
    again = cluster.run()
    assert again.returncode == 0
    assert "Finished before, nothing was launched" in again.stderr
    assert (cluster.login.calls(), cluster.output.read_text()) == (before, text)


def test_openai_batch_lines(cluster):
    urls = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings")
    bodies = (
        {"prompt": "a", "max_tokens": 7},
        {"messages": [{"role": "user", "content": "b"}], "model": MODEL},
        {"input": "c"},
    )
    lines = [
        json.dumps({"custom_id": url, "method": "POST", "url": url, "body": body})
        for url, body in zip(urls, bodies)
    ]
    cluster.source.write_text("\n\n".join(lines))
    assert cluster.run().returncode == 0
    assert ids(cluster.results()) == sorted(urls)
    posted = dict(cluster.endpoint.bodies)
    assert posted == {u: {**b, "model": MODEL} for u, b in zip(urls, bodies)}


@pytest.mark.parametrize("how", ["stopped", "keep", "another"])
def test_a_complete_output_whose_job_was_left(cluster, how):
    """Killed after the last result: the job is stopped, or its user told of it."""
    cluster.prompts(3)
    cluster.run("--keep")
    state = cluster.root / "results.jsonl.run.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "job_id": "42"}))
    options = ["--keep"] if how == "keep" else []
    done = cluster.run(*options, job="43" if how == "another" else None)
    assert done.returncode == 0, done.stderr
    assert cluster.calls("scancel", "42") == (how == "stopped")
    told = "42 was launched for this output before and is left alone; 'scancel 42' ends"
    assert (told in done.stderr) == (how != "stopped")
    assert "goes on" not in done.stderr or how == "stopped"


# ------------------------------------------------------------------ killed


@pytest.mark.parametrize("name", ["results.jsonl", "results.json"])
def test_killed_at_many_moments_and_resumed(cluster, name):
    """No result is lost, none is there twice, and one job is paid for."""
    count = 300 if name.endswith("l") else 100
    wanted = cluster.prompts(count)
    cluster.output = cluster.root / name
    cluster.endpoint.pause = 0.01
    for turn in range(15 if count == 300 else 5):
        process = cluster.start_program()
        enough = len(cluster.endpoint.bodies) + random.randrange(1, count // 15)
        if turn % 5:
            wait_for(lambda: len(cluster.endpoint.bodies) >= enough)
        else:
            wait_for(lambda: cluster.calls("sbatch") or process.poll() is not None)
        kill(process)
    done = cluster.run()
    assert done.returncode == 0, done.stderr
    text = cluster.output.read_text()
    results = json.loads(text) if name == "results.json" else cluster.results()
    assert ids(results) == sorted(wanted)
    if name == "results.json":
        assert [result["custom_id"] for result in results] == wanted
    # what was under way at a kill is asked for again, nothing else is
    assert sum(cluster.endpoint.asked.values()) <= count + 15 * 8
    assert cluster.calls("scancel", "42") == 1
    left = {path.name for path in cluster.root.glob("results*")}
    assert left == {name, name + ".run.json"}


@pytest.mark.parametrize("moment", ["held", "queued", "starting"])
def test_killed_before_the_job_serves(cluster, moment):
    """The next try takes the job that is there."""
    cluster.prompts(5)
    cluster.starts = False
    process = cluster.start_program()
    wait_for(lambda: cluster.calls("scontrol", "release"))
    kill(process)
    cluster.settle()
    reason = {"held": "JobHeldUser", "queued": "Priority", "starting": "None"}[moment]
    cluster.show("42", "RUNNING" if moment == "starting" else "PENDING", reason)
    cluster.starts = True
    again = cluster.start_program()
    if moment != "held":
        wait_for(lambda: cluster.calls("scontrol", "show", "job", "42") > 2)
        cluster.start("42")
    done = cluster.ended(again)
    assert done.returncode == 0, done.stderr
    assert cluster.calls("sbatch") == 1
    assert cluster.calls("scontrol", "release") == (2 if moment == "held" else 1)


def test_the_job_is_on_record_before_it_is_released(cluster):
    """A kill in between leaves a held job, which costs nothing."""
    cluster.prompts(2)
    cluster.change(
        "scontrol",
        '    "2:release "*) ;;',
        f"""    "2:release "*)
        while read -r line; do echo "$line"; done <{cluster.state_file} >$STUB_DIR/seen
        ;;""",
    )
    assert cluster.run().returncode == 0
    seen = cluster.login.stub_dir.joinpath("seen").read_text()
    assert json.loads(seen)["job_id"] == "42"


@pytest.mark.parametrize(
    "state", ["COMPLETED", "CANCELLED", "TIMEOUT", "failed", "forgotten", "other's"]
)
def test_a_job_that_is_no_good_any_more_is_replaced(cluster, state):
    cluster.prompts(20)
    cluster.endpoint.pause = 0.2
    process = cluster.start_program()
    wait_for(lambda: len(cluster.endpoint.bodies) > 8)
    kill(process)
    cluster.settle()
    if state == "failed":
        cluster.fail("42", "rank 1 died")
    elif state == "forgotten":
        cluster.login.answer("scontrol.err", "slurm_load_jobs error: Invalid job id")
    elif state == "other's":
        cluster.show("42", "RUNNING", UserId="root(0)" if os.getuid() else "x(5)")
    else:
        cluster.show("42", state)
    cluster.next_job("43")
    again = cluster.start_program()
    wait_for(lambda: cluster.calls("sbatch") == 2)
    cluster.login.stub_dir.joinpath("scontrol.err").unlink(missing_ok=True)
    assert cluster.ended(again).returncode == 0
    assert cluster.calls("scancel", "42") == 0
    assert cluster.calls("scancel", "43") == 1
    assert len(cluster.results()) == 20


# ------------------------------------------------------------------ interrupted


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_job_and_keeps_the_results(cluster, number):
    cluster.prompts(40)
    cluster.endpoint.pause = 0.1
    process = cluster.start_program()
    wait_for(lambda: cluster.output.exists() and len(cluster.results()) >= 8)
    os.killpg(process.pid, number)
    # an impatient user does not keep the job from being stopped
    os.killpg(process.pid, number)
    done = cluster.ended(process)
    assert done.returncode == 130, done.stderr
    assert "the same command goes on" in done.stderr
    assert cluster.calls("scancel", "42") == 1
    kept = ids(cluster.results())
    assert 8 <= len(kept) < 40
    cluster.next_job("43")
    assert cluster.run().returncode == 0
    assert len(set(ids(cluster.results()))) == len(cluster.results()) == 40
    assert set(kept) <= set(ids(cluster.results()))


def test_a_signal_during_the_launch_stops_the_job(cluster):
    """sbatch itself is not disturbed, or its job would be nobody's."""
    cluster.prompts(2)
    cluster.change("sbatch", "status=0\n", "read -r line <$STUB_DIR/pipe\nstatus=0\n")
    pipe = cluster.login.stub_dir / "pipe"
    os.mkfifo(pipe)
    process = cluster.start_program()
    with pipe.open("w") as hold:  # opens when sbatch reads
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.3)
        assert process.poll() is None
        hold.write("go on\n")
    done = cluster.ended(process)
    assert done.returncode == 130, done.stderr
    assert cluster.calls("scancel", "42") == 1
    assert cluster.state()["job_id"] is None


def test_under_nohup_a_hangup_is_nothing(cluster):
    cluster.prompts(40)
    cluster.endpoint.pause = 0.05
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = cluster.start_program()
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    wait_for(lambda: cluster.endpoint.bodies)
    os.killpg(process.pid, signal.SIGHUP)
    assert cluster.ended(process).returncode == 0


@pytest.mark.parametrize("how", ["done", "interrupted"])
def test_keep(cluster, how):
    cluster.prompts(20)
    cluster.endpoint.pause = 0.05
    process = cluster.start_program("--keep")
    if how == "interrupted":
        wait_for(lambda: len(cluster.endpoint.bodies) > 4)
        os.kill(process.pid, signal.SIGINT)
    done = cluster.ended(process)
    assert done.returncode == (0 if how == "done" else 130), done.stderr
    assert cluster.calls("scancel") == 0
    if how == "interrupted":
        assert cluster.run().returncode == 0
        assert cluster.calls("sbatch") == cluster.calls("scancel", "42") == 1


def test_a_full_disk_stops_the_job_too(cluster):
    long = [json.dumps({"prompt": f"{n} " + "long " * 4000}) for n in range(20)]
    cluster.source.write_text("\n".join(long))
    done = cluster.run(wrap="ulimit -f 200; trap '' XFSZ; exec \"$@\"")
    assert done.returncode == 4
    assert "Cannot write: No space left on device" in done.stderr
    assert cluster.calls("scancel", "42") == 1
    assert 0 < len(cluster.results()) < 20
    cluster.next_job("43")
    assert cluster.run().returncode == 0
    assert len(set(ids(cluster.results()))) == len(cluster.results()) == 20


# ------------------------------------------------------------------ the server


def test_the_servers_end_ends_the_run(cluster):
    """What has a result keeps it, and the same command goes on with a new job."""
    cluster.prompts(30)
    cluster.endpoint.answer("p12", "drop", "drop")
    cluster.endpoint.pause = 0.05
    process = cluster.start_program("--retries=1")
    wait_for(lambda: cluster.endpoint.asked["p12"])
    cluster.fail("42", "rank 1 on nid002 exited with status 0 after 84s")
    done = cluster.ended(process)
    assert done.returncode == 4, done.stderr
    assert "rank 1 on nid002 exited" in done.stderr
    assert "the same command goes on" in done.stderr
    assert "line-12" not in ids(cluster.results())
    # the server may be up for another try: Slurm starts a requeued job again
    assert cluster.calls("scancel") == cluster.calls("scancel", "42") == 1
    cluster.next_job("43")
    assert cluster.run().returncode == 0
    assert len(set(ids(cluster.results()))) == len(cluster.results()) == 30
    assert cluster.calls("sbatch") == 2


def test_a_server_that_is_started_again_is_waited_for(cluster):
    """Its requests are sent again, not given up."""
    cluster.prompts(12)
    cluster.endpoint.answer("p5", "drop")
    cluster.endpoint.pause = 0.3
    process = cluster.start_program("--retries=0")
    wait_for(lambda: cluster.calls("scontrol", "release"))
    attempt = cluster.directory("42") / "attempt-0"
    attempt.mkdir(parents=True)
    attempt.joinpath("timeline").write_text("1 ready\n2 restart rank 1 died\n")
    wait_for(lambda: cluster.endpoint.bodies)
    served, cluster.endpoint.healthy = cluster.endpoint.healthy, False
    wait_for(lambda: cluster.endpoint.asked["p5"])
    wait_for(lambda: cluster.calls("scontrol", "show") > 3)
    cluster.endpoint.healthy = served
    done = cluster.ended(process)
    assert done.returncode == 0, done.stderr
    assert all(result["error"] is None for result in cluster.results())
    assert cluster.endpoint.asked["p5"] == 2


def test_a_job_that_fails_to_start(cluster):
    cluster.prompts(3)
    cluster.starts = False
    process = cluster.start_program("--json-mode")
    wait_for(lambda: cluster.calls("scontrol", "show"))
    cluster.fail("42", "out of GPU memory")
    done = cluster.ended(process)
    assert done.returncode == 4
    error = json.loads(done.stdout)["error"]
    assert "out of GPU memory" in error["message"]
    assert (error["job_id"], error["done"], error["exit_code"]) == ("42", 0, 4)
    assert cluster.results() == []


def test_failed_requests_are_told(cluster):
    """There is nothing left to do, so 0; how many failed is said."""
    cluster.prompts(4)
    cluster.endpoint.answer("p2", 400)
    cluster.endpoint.answer("p3", 500)
    done = cluster.run("--retries=0", "--json-mode")
    assert done.returncode == 0
    assert "2 of them failed" in done.stderr
    assert json.loads(done.stdout)["failed"] == 2
    errors = {r["custom_id"]: r["error"] for r in cluster.results() if r["error"]}
    assert errors == {
        "line-2": {"code": "400", "message": "told to 400"},
        "line-3": {"code": "500", "message": "told to 500"},
    }


def test_results_that_are_taken_out_are_asked_for_again(cluster):
    cluster.prompts(4)
    cluster.endpoint.answer("p2", 400)
    cluster.run()
    good = [line for line in cluster.results() if line["error"] is None]
    cluster.output.write_text("".join(json.dumps(line) + "\n" for line in good))
    assert cluster.run().returncode == 0
    assert len(cluster.results()) == 4
    assert all(result["error"] is None for result in cluster.results())
    assert dict(cluster.endpoint.asked) == {"p1": 1, "p2": 2, "p3": 1, "p4": 1}


# ------------------------------------------------------------------ a given job


def test_a_given_job_is_used_and_left(cluster):
    cluster.prompts(5)
    cluster.start("7")
    done = cluster.run(job="7")
    assert done.returncode == 0, done.stderr
    assert cluster.calls("sbatch") == cluster.calls("scancel") == 0
    assert cluster.state()["job_id"] is None


def test_a_given_job_that_is_lost(cluster):
    cluster.prompts(20)
    cluster.start("7")
    cluster.endpoint.answer("p5", 1.0)
    cluster.endpoint.answer("p6", "drop")
    process = cluster.start_program("--retries=1", job="7")
    wait_for(lambda: cluster.endpoint.asked["p6"])
    cluster.show("7", "TIMEOUT")
    cluster.endpoint.answer("p6", "drop")
    done = cluster.ended(process)
    assert done.returncode == 4, done.stderr
    assert "Job 7 is lost: Slurm says TIMEOUT" in done.stderr
    assert "with another job the same command goes on" in done.stderr


def test_an_input_that_is_changed_meanwhile(cluster):
    cluster.prompts(2000)
    cluster.endpoint.pause = 0.1
    process = cluster.start_program()
    wait_for(lambda: cluster.endpoint.bodies)
    with cluster.source.open("r+") as file:
        file.seek(20000)
        file.write("{" * 100)
    cluster.endpoint.pause = 0.0
    done = cluster.ended(process)
    assert done.returncode == 2 and "was changed while it was read" in done.stderr
    assert cluster.calls("scancel", "42") == 1


def test_a_given_job_takes_no_launch_options(cluster):
    cluster.prompts(1)
    done = cluster.run("--num-nodes=2", job="7")
    assert done.returncode == 2 and "leave out --num-nodes" in done.stderr


def test_a_given_job_of_another_model_is_refused(cluster):
    cluster.prompts(1)
    cluster.start("7")
    cluster.show("7", "RUNNING", JobName="llama-vec-inf")
    done = cluster.run(job="7")
    assert done.returncode == 2 and "Job 7 is 'llama'" in done.stderr


def test_a_server_of_another_model_is_refused(cluster):
    cluster.prompts(1)
    cluster.endpoint.served = ["something-else"]
    done = cluster.run()
    assert done.returncode == 2 and "serves something-else" in done.stderr
    assert cluster.calls("scancel", "42") == 1 and not cluster.results()


def test_a_given_job_that_slurm_does_not_know(cluster):
    cluster.prompts(1)
    cluster.login.answer("scontrol.err", "slurm_load_jobs error: Invalid job id")
    cluster.login.answer("scontrol.out", "")
    done = cluster.run(job="7")
    assert done.returncode == 2 and "Slurm does not know it" in done.stderr


# ------------------------------------------------------------------ the key


def everything_written(cluster, done):
    """All that a key must not be in."""
    texts = [done.stdout, done.stderr, cluster.state_file.read_text()]
    return "".join(texts) + cluster.output.read_text()


def test_the_key_of_the_launch_is_used(cluster):
    cluster.prompts(2)
    cluster.endpoint.key = KEY
    done = cluster.run(f"--env=VLLM_API_KEY={KEY}", VLLM_API_KEY="another")
    assert done.returncode == 0, done.stderr
    assert KEY not in everything_written(cluster, done)
    assert all(result["error"] is None for result in cluster.results())


@pytest.mark.parametrize("where", ["json", "VLLM_API_KEY", "OPENAI_API_KEY"])
def test_the_key_of_a_given_job(cluster, where):
    cluster.prompts(2)
    cluster.endpoint.key = KEY
    json_file = cluster.directory("7") / f"{MODEL}.7.json"
    json_file.parent.mkdir(parents=True)
    if where == "json":
        json_file.write_text(json.dumps({"env": {"VLLM_API_KEY": "${MY_KEY}"}}))
    cluster.start("7")
    environ = {"MY_KEY": KEY, "VLLM_API_KEY": "wrong"}
    if where != "json":
        environ = {where: KEY}
    done = cluster.run(job="7", **environ)
    assert done.returncode == 0, done.stderr
    assert KEY not in everything_written(cluster, done)


def test_a_wrong_key_is_one_error_not_many(cluster):
    cluster.prompts(20)
    cluster.endpoint.key = KEY
    done = cluster.run("--env=VLLM_API_KEY=wrong")
    assert done.returncode == 2 and "refuses the API key" in done.stderr
    assert cluster.results() == [] and not cluster.endpoint.bodies
    assert cluster.calls("scancel", "42") == 1


# ------------------------------------------------------------------ refused


def test_bad_lines_are_told_before_anything_is_launched(cluster):
    good = '{"prompt": "x"}'
    cluster.source.write_text("\n".join([good, "{", "", *["[]"] * 30, good]))
    done = cluster.run()
    assert done.returncode == 2
    assert "31 bad line(s)" in done.stderr
    assert "line 2: not JSON" in done.stderr
    assert "line 22: not a JSON object" in done.stderr
    assert "line 23" not in done.stderr and "and 11 more" in done.stderr
    assert cluster.login.calls() == [] and not cluster.output.exists()


def test_an_input_without_requests(cluster):
    cluster.source.write_text("\n\n")
    done = cluster.run()
    assert done.returncode == 2 and "holds no request" in done.stderr


def test_a_second_run_is_refused(cluster):
    cluster.prompts(40)
    cluster.endpoint.pause = 0.2
    first = cluster.start_program()
    wait_for(lambda: cluster.endpoint.bodies)
    second = cluster.run()
    assert second.returncode == 3 and "Another run writes to" in second.stderr
    assert cluster.ended(first).returncode == 0
    assert cluster.calls("sbatch") == 1
    assert len(cluster.results()) == 40


@pytest.mark.parametrize("what", ["input", "model"])
def test_an_output_of_something_else_is_refused(cluster, what):
    cluster.prompts(3)
    cluster.run()
    text = cluster.output.read_text()
    if what == "input":
        cluster.prompts(4)
    else:
        state = {**cluster.state(), "model": "another"}
        cluster.state_file.write_text(json.dumps(state))
    done = cluster.run()
    assert done.returncode == 2
    assert f"holds results of another {what}" in done.stderr
    assert "Choose another --output" in done.stderr
    assert cluster.output.read_text() == text and cluster.calls("sbatch") == 1


@pytest.mark.parametrize("name", ["results.jsonl", "results.json"])
def test_a_file_of_somebody_else_is_refused(cluster, name):
    cluster.prompts(1)
    cluster.output = cluster.root / name
    cluster.output.write_text("mine\n")
    done = cluster.run()
    assert done.returncode == 2 and "exists and was not written" in done.stderr
    assert {p.name for p in cluster.root.glob("results*")} == {name}
    assert cluster.output.read_text() == "mine\n"
    assert cluster.login.calls() == []


def test_the_state_holds_no_secret(cluster):
    cluster.prompts(1)
    cluster.run("--env=SECRET=xyzzy")
    assert "xyzzy" not in cluster.state_file.read_text()


# ------------------------------------------------------------------ what is shown


def test_a_line_now_and_then(cluster, monkeypatch):
    monkeypatch.setattr(batch, "PROGRAM", "impatient")
    cluster.root.joinpath("impatient.py").write_text(
        "from app.utils.vec_inf_multinode.cli import main, progress\n"
        "progress.LINE_EVERY = 0.3\nmain()\n"
    )
    cluster.prompts(20)
    cluster.endpoint.pause = 0.2
    done = cluster.run(PYTHONPATH=f"{batch.support.TREE}:{cluster.root}")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if " requests done" in line]
    assert len(lines) >= 2 and "tokens/s, about" in lines[-1]
    assert done.stdout == ""
