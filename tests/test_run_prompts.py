"""Input lines become requests, or are reported with a reason."""

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.utils.vec_inf_multinode.prompts import (
    SHOWN,
    BadLine,
    Request,
    parse_line,
    read_requests,
    survey,
)

MODEL = "llama"
MESSAGES = [{"role": "user", "content": "hi"}]


def parse(value, number=7):
    line = value if isinstance(value, bytes) else json.dumps(value).encode()
    return parse_line(line, number, MODEL)


def batch(url="/v1/completions", **body):
    body = body or {"prompt": "x"}
    return {"custom_id": "a", "method": "POST", "url": url, "body": body}


@pytest.mark.parametrize(
    "line, custom_id, url, body",
    [
        ({"prompt": "x"}, "line-7", "/v1/completions", {"prompt": "x"}),
        ({"prompt": [1, 2]}, "line-7", "/v1/completions", {"prompt": [1, 2]}),
        (
            {"messages": MESSAGES, "max_tokens": 5, "custom_id": "é"},
            "é",
            "/v1/chat/completions",
            {"messages": MESSAGES, "max_tokens": 5},
        ),
        (batch(), "a", "/v1/completions", {"prompt": "x"}),
        (
            batch("/v1/embeddings", input=["x", "y"]),
            "a",
            "/v1/embeddings",
            {"input": ["x", "y"]},
        ),
        (
            batch("/v1/rerank", query="q", documents=["d"]),
            "a",
            "/v1/rerank",
            {"query": "q", "documents": ["d"]},
        ),
        (batch(prompt="x", stream=False), "a", "/v1/completions", {"prompt": "x"}),
    ],
)
def test_a_request(line, custom_id, url, body):
    found = parse(line)
    found.body.pop("stream", None)
    assert found == Request(custom_id, url, {**body, "model": MODEL})


def test_the_model_may_be_named():
    assert parse({"prompt": "x", "model": MODEL}).body["model"] == MODEL


@pytest.mark.parametrize(
    "line, reason",
    [
        (b"{", "not JSON: Expecting property name"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b'{"prompt": "x", "seed": NaN}', "not JSON: NaN"),
        (b"[" * 100000, "nested too deeply"),
        (b'{"prompt": ' + b"1" * 5000 + b"}", "not JSON: Exceeds the limit"),
        ([], "not a JSON object"),
        ("text", "not a JSON object"),
        ({"text": "x"}, "no prompt: wants prompt or messages"),
        ({"prompt": "x", "messages": MESSAGES}, "both prompt and messages"),
        ({"prompt": ""}, "no prompt or prompt_embeds, or an empty one"),
        ({"prompt": None}, "no prompt"),
        ({"prompt": 5}, "prompt is 5"),
        ({"messages": "hi"}, 'messages is "hi"'),
        ({"messages": []}, "no messages, or an empty one"),
        ({"prompt": "x", "custom_id": 5}, "custom_id is 5, not a text"),
        ({"prompt": "x", "custom_id": ""}, 'custom_id is "", not a text'),
        ({"prompt": "x", "model": "gpt"}, 'model is "gpt", the served one is'),
        ({"prompt": "x", "stream": True}, "stream is true"),
        ({**batch(), "method": "GET"}, 'method is "GET", not POST'),
        (batch("/v1/files"), 'url is "/v1/files"; can be /v1/completions, '),
        ({**batch(), "url": ["/v1/completions"]}, "url is ["),
        ({**batch(), "body": "x"}, "body is not a JSON object"),
        ({**batch(), "max_tokens": 5}, '"max_tokens" stands beside body'),
        ({"url": "/v1/completions", "body": {"prompt": "x"}}, "no custom_id"),
        (batch("/v1/responses", input="x", background=True), "background is true"),
        (batch("/v1/embeddings", prompt="x"), "no input or messages"),
    ],
)
def test_a_bad_line(line, reason):
    with pytest.raises(BadLine) as refusal:
        parse(line)
    assert reason in str(refusal.value)


def test_a_long_value_is_cut_in_the_reason():
    with pytest.raises(BadLine) as refusal:
        parse({"prompt": "x", "model": "m" * 10000})
    assert len(str(refusal.value)) < 150


@given(st.one_of(st.binary(), st.text().map(str.encode)))
def test_no_line_is_too_odd(line):
    try:
        parse(line)
    except BadLine:
        pass


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=4,
)
KEYS = ["custom_id", "method", "url", "body", "prompt", "messages", "model", "stream"]


@given(st.dictionaries(st.sampled_from(KEYS), JSON))
def test_no_object_is_too_odd(value):
    try:
        found = parse(value)
    except BadLine:
        return
    assert found.custom_id and found.body["model"] == MODEL


def test_a_survey():
    text = b'{"prompt": "x"}\n\n  \r\n{"prompt": "y"}\r\n{"prompt": "z"}'
    found = survey(text.splitlines(keepends=True), MODEL)
    assert (found.count, found.bad) == (3, 0)
    assert found.sha256 == hashlib.sha256(text).hexdigest()
    requests = read_requests(text.splitlines(keepends=True), MODEL)
    assert [request.custom_id for request in requests] == ["line-1", "line-4", "line-5"]


def test_ids_that_come_twice():
    lines = [{"prompt": "x", "custom_id": "line-2"}, {"prompt": "y"}, {"prompt": "z"}]
    found = survey((json.dumps(line).encode() for line in lines), MODEL)
    assert found.first_bad == ['line 2: custom_id "line-2" is on line 1 already']


def test_every_bad_line_is_counted_and_the_first_are_named():
    found = survey([b"{}\n"] * 1000, MODEL)
    assert found.bad == 1000 and len(found.first_bad) == SHOWN
    assert found.first_bad[-1].startswith(f"line {SHOWN}: no prompt")


def test_requests_are_read_one_at_a_time():
    def lines():
        yield b'{"prompt": "x"}'
        raise AssertionError("read ahead")

    assert next(read_requests(lines(), MODEL)).custom_id == "line-1"
