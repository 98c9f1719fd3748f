"""The output: appended to in whole lines, owned by one run, resumed after any kill."""

import errno
import fcntl
import json
import os
import signal

import pytest

from app.utils.vec_inf_multinode import results
from app.utils.vec_inf_multinode.results import (
    Output,
    OutputBusyError,
    OutputError,
    Tally,
    WriteError,
)

USAGE = {"prompt_tokens": 2, "completion_tokens": 3}
IDS = ["c", "a", "b"]


def result(custom_id, error=None, usage=None):
    body = {"usage": usage or USAGE}
    return {"custom_id": custom_id, "response": {"body": body}, "error": error}


@pytest.fixture(params=["results.jsonl", "results.json"])
def path(request, tmp_path):
    """Return an output of each form."""
    return tmp_path / request.param


def output_at(path, sha256="abc", model="llama"):
    return Output(path, sha256, model)


def test_results_are_there_again(path):
    with output_at(path) as output:
        output.record_job("42")
        for custom_id in IDS[:2]:
            output.write(result(custom_id))
    with output_at(path) as output:
        assert output.done == {"c", "a"} and output.job_id == "42"
        assert output.tally == Tally(2, 0, 4, 6)
        assert not output.is_complete(3)
        output.write(result("b", error={"code": "500", "message": "x"}))
        assert output.tally == Tally(3, 1, 6, 9)
        assert output.is_complete(3)


@pytest.mark.parametrize("cut", [1, 2, 20])
def test_a_torn_last_line_is_cut_off(path, cut):
    with output_at(path) as output:
        for custom_id in IDS:
            output.write(result(custom_id))
        lines = output.lines
    whole = lines.read_bytes()
    os.truncate(lines, len(whole) - cut)
    with output_at(path) as output:
        assert output.done == {"c", "a"}
        output.write(result("b"))
    assert lines.read_bytes() == whole


def test_an_array_of_an_input_that_grew_is_told(tmp_path):
    with output_at(tmp_path / "results.json") as output:
        for custom_id in IDS:
            output.write(result(custom_id))
        with pytest.raises(OutputError, match="'new' has no result: the input has"):
            output.finish([*IDS, "new"])
        assert output.lines.exists() and not output.path.exists()


def test_a_write_that_came_short_leaves_nothing(path, monkeypatch):
    real = os.write
    with output_at(path) as output:
        output.write(result("c"))
        before = output.lines.read_bytes()
        monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:5]))
        with pytest.raises(WriteError, match="No space left"):
            output.write(result("a"))
        assert output.lines.read_bytes() == before
        assert output.done == {"c"} and output.tally.done == 1


def test_each_line_is_one_write(path, monkeypatch):
    written = []
    real = os.write
    with output_at(path) as output:
        monkeypatch.setattr(
            os, "write", lambda fd, data: written.append(data) or real(fd, data)
        )
        output.write(result("é\u2028"))
        flags = fcntl.fcntl(output._descriptor, fcntl.F_GETFL)
    assert flags & os.O_APPEND
    assert len(written) == 1 and len(written[0].splitlines()) == 1
    assert json.loads(written[0])["custom_id"] == "é\u2028"


def test_the_state_is_the_owners_only(path):
    with output_at(path) as output:
        assert output.state_file.stat().st_mode & 0o777 == 0o600


def test_only_one_run_has_it(path):
    with output_at(path) as output:
        output.write(result("a"))
        with pytest.raises(OutputBusyError, match="Another run writes"):
            output_at(path).__enter__()
    with output_at(path) as output:
        assert output.done == {"a"}


def test_without_locks_it_says_so(path, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with output_at(path) as output:
        assert not output.locked
        output.write(result("a"))
    with output_at(path) as output:
        assert output.done == {"a"}


def test_a_file_that_was_replaced_while_it_was_locked(path, monkeypatch):
    """A run that ends removes its lines: the lock on them is worth nothing then."""
    real = fcntl.flock
    gone = []

    def late(descriptor, operation):
        real(descriptor, operation)
        if not gone:
            gone.append(True)
            output_at(path).lines.unlink()

    monkeypatch.setattr(fcntl, "flock", late)
    with output_at(path) as output:
        output.write(result("a"))
        assert output.lines.read_bytes().count(b"\n") == 1


@pytest.mark.parametrize("sha256, model", [("def", "llama"), ("abc", "gpt")])
def test_another_input_or_model_is_refused(path, sha256, model):
    with output_at(path) as output:
        output.record_job("42")
        output.write(result("a"))
    files = {p: p.read_bytes() for p in path.parent.iterdir()}
    with pytest.raises(OutputError) as refusal:
        output_at(path, sha256, model).__enter__()
    assert "Choose another --output" in str(refusal.value)
    assert "Job 42 was launched for them" in str(refusal.value)
    assert {p: p.read_bytes() for p in path.parent.iterdir()} == files


def test_a_file_without_a_state_is_refused(path):
    path.write_text("{}\n")
    with pytest.raises(OutputError, match="exists and was not written by such a run"):
        output_at(path).__enter__()
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_an_empty_file_is_nobodys(path):
    path.touch()
    with output_at(path) as output:
        assert output.done == set()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model": "llama"}', '{"x": 1}'])
def test_a_state_that_is_none(path, text):
    with output_at(path) as output:
        state_file = output.state_file
    state_file.write_text(text)
    with pytest.raises(OutputError, match="cannot be read. Move it"):
        output_at(path).__enter__()


@pytest.mark.parametrize("line", ["{}", "x", "[]", '{"custom_id": "a"}'])
def test_a_line_that_is_no_result(path, line):
    with output_at(path) as output:
        output.write(result("a"))
        lines = output.lines
    with lines.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(OutputError, match="Line 2 of .* is no result"):
        output_at(path).__enter__()
    lines.write_text("")
    with output_at(path):  # the lock is free again
        pass


def test_places_that_are_no_files(tmp_path):
    with pytest.raises(OutputError, match="is not a file"):
        output_at(tmp_path).__enter__()
    with pytest.raises(OutputError, match="is not a file"):
        output_at(tmp_path / "/dev/null").__enter__()
    with pytest.raises(OutputError, match="is no directory"):
        output_at(tmp_path / "no" / "results.jsonl").__enter__()


def test_a_link_is_followed(tmp_path):
    real = tmp_path / "real"
    real.mkdir()
    link = tmp_path / "results.json"
    link.symlink_to(real / "results.json")
    finished(link)
    assert link.is_symlink()
    assert json.loads((real / "results.json").read_text())


# ------------------------------------------------------------------ the array


def finished(path):
    """Finish an output."""
    with output_at(path) as output:
        if not output.is_complete(3):
            for custom_id in {"a", "b", "c"} - output.done:
                output.write(result(custom_id))
        output.finish(IDS)
        return output


def test_an_array_in_the_order_of_the_input(tmp_path):
    output = finished(tmp_path / "results.json")
    array = json.loads(output.path.read_text())
    assert [item["custom_id"] for item in array] == IDS
    assert {p.name for p in tmp_path.iterdir()} == {
        "results.json",
        "results.json.run.json",
    }
    with output_at(output.path) as again:
        assert again.is_complete(3) and again.tally == Tally(3, 0, 6, 9)
        again.finish([])
    assert json.loads(output.path.read_text()) == array


def test_an_array_that_was_taken_away_is_made_anew(tmp_path):
    output = finished(tmp_path / "results.json")
    output.path.unlink()
    with output_at(output.path) as again:
        assert not again.is_complete(3) and again.done == set()
    finished(output.path)
    assert len(json.loads(output.path.read_text())) == 3


STEPS = ("open", "write", "fsync", "replace", "unlink", "ftruncate")


def killed_at(step, action):
    """Do something in a fork that is killed at a step; false if it had fewer."""
    child = os.fork()
    if child == 0:
        left = [step]

        def counted(function):
            def wrapper(*arguments, **named):
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*arguments, **named)

            return wrapper

        for name in STEPS:
            setattr(results.os, name, counted(getattr(os, name)))
        for name in ("unlink", "open"):
            setattr(results.Path, name, counted(getattr(results.Path, name)))
        try:
            action()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def test_killed_at_every_step(path):
    """From each state that a kill can leave, the same run comes to the same end."""
    step = 0
    while killed_at(step, lambda: finished(path)):
        with output_at(path) as output:
            assert output.tally.done == (
                3 if output.is_complete(3) else len(output.done)
            )
        output = finished(path)
        text = path.read_text()
        found = (
            json.loads(text)
            if output.is_array
            else map(json.loads, text.split("\n")[:-1])
        )
        found = [item["custom_id"] for item in found]
        assert sorted(found) == ["a", "b", "c"]
        assert not output.is_array or found == IDS
        assert {p.name for p in path.parent.iterdir()} <= {
            path.name,
            output.state_file.name,
        }
        for file in path.parent.iterdir():
            file.unlink()
        step += 1
    assert step > 8


def test_tokens_of_every_form():
    tally = Tally()
    tally.add(result("a", usage={"input_tokens": 1, "output_tokens": 2}))
    tally.add(result("b", usage={"prompt_tokens": None, "completion_tokens": "x"}))
    tally.add({"response": {"body": "text"}, "error": {"code": "400"}})
    tally.add({"response": None, "error": {"code": "timeout"}})
    assert tally == Tally(4, 2, 1, 2)
