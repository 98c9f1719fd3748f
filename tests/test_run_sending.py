"""Requests are sent with bounded concurrency, and again while that may help."""

import threading
import time

import pytest
import requests
from endpoint import Endpoint

from app.utils.vec_inf_multinode import sending
from app.utils.vec_inf_multinode.prompts import Request
from app.utils.vec_inf_multinode.sending import Sender, Server, pause_before

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    """Do not wait long between attempts."""
    monkeypatch.setattr(sending, "FIRST_PAUSE", 0.02)


@pytest.fixture
def endpoint():
    """Return a server."""
    server = Endpoint("llama")
    yield server
    server.close()


def requests_for(*prompts):
    body = {"model": "llama"}
    return iter([Request(p, "/v1/completions", {**body, "prompt": p}) for p in prompts])


def server_at(endpoint, timeout=5, retries=3, key=None):
    return Server(lambda: endpoint.root, key, timeout, retries)


def send(endpoint, *prompts, was_away=lambda since: False, concurrency=4, **server):
    sender = Sender(
        server_at(endpoint, **server), requests_for(*prompts), concurrency, was_away
    )
    return {result["custom_id"]: result for result in sender}


@pytest.mark.parametrize(
    "action", [408, 429, 500, 502, 503, 504, "drop", "cut", "garbage"]
)
def test_what_may_pass_is_tried_again(endpoint, action):
    endpoint.answer("x", action, action)
    result = send(endpoint, "x")["x"]
    assert result["error"] is None and result["response"]["status_code"] == 200
    assert endpoint.asked["x"] == 3


@pytest.mark.parametrize("code", [400, 401, 404, 413, 422, 302])
def test_a_decision_is_a_result(endpoint, code):
    endpoint.answer("x", (code, {"Location": "/elsewhere", "X-Request-Id": "r1"}))
    result = send(endpoint, "x")["x"]
    assert result["error"] == {"code": str(code), "message": f"told to {code}"}
    assert result["response"] == {
        "status_code": code,
        "request_id": "r1",
        "body": {"error": {"message": f"told to {code}"}},
    }
    assert endpoint.asked["x"] == 1


@pytest.mark.parametrize(
    "action, code", [(503, "503"), ("drop", "connection"), (1.0, "timeout")]
)
def test_after_all_attempts_the_error_is_the_result(endpoint, action, code):
    endpoint.answer("x", *[action] * 3)
    result = send(endpoint, "x", "y", retries=2, timeout=0.2)
    assert result["x"]["error"]["code"] == code and result["x"]["error"]["message"]
    assert (result["x"]["response"] is None) == (code != "503")
    assert result["y"]["error"] is None
    assert endpoint.asked["x"] == 3


def test_retry_after_is_honoured(endpoint):
    endpoint.answer("x", (429, {"Retry-After": "1"}))
    started = time.monotonic()
    send(endpoint, "x")
    assert time.monotonic() - started >= 1


@pytest.mark.parametrize("value, seconds", [("soon", 0), ("100000", 600), ("7", 7)])
def test_what_a_server_may_ask_for(endpoint, value, seconds):
    endpoint.answer("x", (503, {"Retry-After": value}))
    (request,) = requests_for("x")
    answer = sending.post(requests.Session(), server_at(endpoint), request)
    assert answer.pause == seconds and not answer.final


def test_pauses_grow_to_a_limit(monkeypatch):
    monkeypatch.setattr(sending, "FIRST_PAUSE", 1.0)
    for attempt, longest in ((1, 1), (2, 2), (4, 8), (50, 60)):
        assert longest / 2 <= pause_before(attempt, 0) <= longest
    assert pause_before(1, 30) == 30


def test_requests_under_way_are_bounded_and_read_late(endpoint):
    read = []

    def pending():
        for request in requests_for(*map(str, range(60))):
            read.append(request)
            yield request

    results = iter(Sender(server_at(endpoint), pending(), 5, lambda since: False))
    next(results)
    time.sleep(1)
    # what is being sent, what waits to be taken, and what was taken
    assert len(read) <= 5 + 5 + 1
    assert len(list(results)) == 59
    assert endpoint.most_at_once <= 5
    assert sum(endpoint.asked.values()) == len(read) == 60


def test_so_many_at_once(endpoint):
    endpoint.pause = 0.1
    send(endpoint, *map(str, range(30)), concurrency=5)
    assert endpoint.most_at_once == 5


def test_a_server_that_was_away_is_asked_again(endpoint):
    endpoint.answer("x", *["drop"] * 4)
    asked = []
    result = send(
        endpoint, "x", retries=1, was_away=lambda since: not asked.append(since)
    )
    assert result["x"]["error"] is None
    assert len(asked) == 2 and asked[0] < asked[1] and endpoint.asked["x"] == 5


def test_a_server_that_is_gone_ends_it(endpoint):
    endpoint.answer("b", "drop")
    endpoint.pause = 0.1

    def gone(since):
        raise RuntimeError("gone")

    sender = Sender(server_at(endpoint, retries=0), requests_for(*"abcdefgh"), 2, gone)
    came = []
    with pytest.raises(RuntimeError, match="gone"):
        for result in sender:
            came.append(result)
    came.extend(sender.stop())
    assert "b" not in [result["custom_id"] for result in came]
    assert all(result["error"] is None for result in came)


def test_a_stop_waits_for_nothing(endpoint):
    endpoint.pause = 5.0
    endpoint.answer("a", 0.0)
    endpoint.answer("b", (429, {"Retry-After": "500"}))
    sender = Sender(
        server_at(endpoint, timeout=60), requests_for(*"abcdef"), 3, lambda since: False
    )
    assert next(iter(sender))["custom_id"] == "a"
    started = time.monotonic()
    assert list(sender.stop()) == []
    assert time.monotonic() - started < 1
    time.sleep(0.2)
    assert sum(endpoint.asked.values()) <= 4


def test_an_input_that_breaks_is_an_error(endpoint):
    def pending():
        yield from requests_for("a")
        raise ValueError("changed")

    with pytest.raises(ValueError, match="changed"):
        list(Sender(server_at(endpoint), pending(), 1, lambda since: False))


def test_a_key_and_nothing_from_netrc(endpoint, tmp_path, monkeypatch):
    netrc = tmp_path / "netrc"
    netrc.write_text("default login me password secret\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    endpoint.key = "k1"
    assert send(endpoint, "a", key="k1")["a"]["error"] is None
    assert send(endpoint, "a", key=None)["a"]["error"]["code"] == "401"
    assert server_at(endpoint, key="k1").models().ok
    assert endpoint.authorizations == {"Bearer k1", None}


def test_no_thread_is_left(endpoint):
    before = threading.active_count()
    send(endpoint, *"abcdef")
    time.sleep(0.1)
    assert threading.active_count() <= before
