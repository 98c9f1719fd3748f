"""Input lines in, requests out: the one place that knows what an input line may be.

A line is OpenAI's batch form (``custom_id``, ``method``, ``url``, ``body``) or plain:
the body itself, with ``prompt`` or ``messages`` and a ``custom_id`` if it wants one.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

# What vLLM answers with one JSON document, and the keys of which a body needs one.
ENDPOINTS: dict[str, tuple[str, ...]] = {
    "/v1/completions": ("prompt", "prompt_embeds"),
    "/v1/chat/completions": ("messages",),
    "/v1/embeddings": ("input", "messages"),
    "/v1/responses": ("input",),
    "/v1/score": ("data_1", "queries", "text_1"),
    "/v1/rerank": ("query",),
}
_PLAIN = {"prompt": "/v1/completions", "messages": "/v1/chat/completions"}
_BATCH_KEYS = {"method", "url", "body"}
# Bodies that ask for an answer that does not come as one JSON document.
_NOT_AT_ONCE = ("stream", "background")

SHOWN = 20


class BadLine(ValueError):
    """Why a line is no request."""


@dataclass(frozen=True)
class Request:
    """One request to the server.

    Parameters
    ----------
    custom_id : str
        The name that its result carries.
    url : str
        One of `ENDPOINTS`.
    body : dict
        What is posted there, the model's name included.
    """

    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass
class Survey:
    """What a full pass over the input found.

    Parameters
    ----------
    count : int
        Number of requests.
    sha256 : str
        Of the whole input.
    bad : int
        Number of bad lines.
    first_bad : list of str
        The first `SHOWN` of them, each with its number and the reason.
    """

    count: int = 0
    sha256: str = ""
    bad: int = 0
    first_bad: list[str] = field(default_factory=list)

    def refuse(self, number: int, reason: str) -> None:
        """Note a bad line."""
        self.bad += 1
        if len(self.first_bad) < SHOWN:
            self.first_bad.append(f"line {number}: {reason}")


def parse_line(line: bytes, number: int, model: str) -> Request:
    """Make a request of one line.

    Parameters
    ----------
    line : bytes
        The line, not empty.
    number : int
        Its number, from 1.
    model : str
        Name of the served model.

    Raises
    ------
    BadLine
        If it is no request; the text says why.
    """
    value = _load(line)
    if not isinstance(value, dict):
        raise BadLine("not a JSON object")
    if _BATCH_KEYS.isdisjoint(value):
        custom_id, url, body = _plain(value, number)
    else:
        custom_id, url, body = _batch(value)
    if not isinstance(custom_id, str) or not custom_id:
        raise BadLine(f"custom_id is {_short(custom_id)}, not a text")
    _check_body(url, body)
    if body.setdefault("model", model) != model:
        raise BadLine(f"model is {_short(body['model'])}, the served one is {model!r}")
    return Request(custom_id, url, body)


def _load(line: bytes) -> Any:
    try:
        return json.loads(line, parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        raise BadLine("not UTF-8") from None
    except json.JSONDecodeError as err:
        raise BadLine(f"not JSON: {err.msg} at column {err.colno}") from None
    except RecursionError:
        raise BadLine("JSON that is nested too deeply") from None
    except ValueError as err:  # NaN, or a number of thousands of digits
        raise BadLine(f"not JSON: {err}") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number there")


def _plain(value: dict[str, Any], number: int) -> tuple[Any, str, dict[str, Any]]:
    found = [key for key in _PLAIN if key in value]
    if not found:
        raise BadLine("no prompt: wants prompt or messages, or url and body")
    if len(found) > 1:
        raise BadLine("both prompt and messages")
    custom_id = value.pop("custom_id", f"line-{number}")
    return custom_id, _PLAIN[found[0]], value


def _batch(value: dict[str, Any]) -> tuple[Any, str, dict[str, Any]]:
    unknown = value.keys() - _BATCH_KEYS - {"custom_id"}
    if unknown:
        raise BadLine(f"{_short(min(unknown))} stands beside body, not in it")
    if value.get("method", "POST") != "POST":
        raise BadLine(f"method is {_short(value['method'])}, not POST")
    url, body = value.get("url"), value.get("body")
    if not isinstance(url, str) or url not in ENDPOINTS:
        raise BadLine(f"url is {_short(url)}; can be {', '.join(ENDPOINTS)}")
    if not isinstance(body, dict):
        raise BadLine("body is not a JSON object")
    if "custom_id" not in value:
        raise BadLine("no custom_id")
    return value["custom_id"], url, body


def _check_body(url: str, body: dict[str, Any]) -> None:
    wanted = ENDPOINTS[url]
    found = [key for key in wanted if body.get(key) not in (None, "", [])]
    if not found:
        raise BadLine(f"no {' or '.join(wanted)}, or an empty one")
    kinds = list if found[0] == "messages" else (str, list, dict)
    if not isinstance(body[found[0]], kinds):
        raise BadLine(f"{found[0]} is {_short(body[found[0]])}")
    for key in _NOT_AT_ONCE:
        if body.get(key):
            raise BadLine(f"{key} is {_short(body[key])}; results come as a whole here")


def _short(value: Any) -> str:
    """A value of the input, short enough for a message."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def numbered(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Lines that are not empty, with their numbers."""
    return ((n, line) for n, line in enumerate(lines, 1) if line.strip())


def read_requests(lines: Iterable[bytes], model: str) -> Iterator[Request]:
    """Requests of an input that a `survey` found good, one at a time."""
    for number, line in numbered(lines):
        yield parse_line(line, number, model)


def survey(lines: Iterable[bytes], model: str) -> Survey:
    """Look at every line; nothing but the ids is kept.

    Parameters
    ----------
    lines : iterable of bytes
        The input, line by line, line ends included.
    model : str
        Name of the served model.
    """
    found = Survey()
    digest = hashlib.sha256()
    first_seen: dict[str, int] = {}
    for number, line in numbered(_hashed(lines, digest.update)):
        try:
            custom_id = parse_line(line, number, model).custom_id
        except BadLine as err:
            found.refuse(number, str(err))
            continue
        if custom_id in first_seen:
            first = first_seen[custom_id]
            reason = f"custom_id {_short(custom_id)} is on line {first} already"
            found.refuse(number, reason)
            continue
        first_seen[custom_id] = number
        found.count += 1
    found.sha256 = digest.hexdigest()
    return found


def _hashed(lines: Iterable[bytes], update: Any) -> Iterator[bytes]:
    for line in lines:
        update(line)
        yield line
