"""Requests out, results in: bounded concurrency, retries, an interruptible end."""

import json
import queue
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Optional

import requests
from requests.auth import AuthBase
from urllib3.util.retry import Retry

from .prompts import Request

CONNECT_TIMEOUT = 30
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
# A server that asks for a longer pause than this is asked earlier.
LONGEST_RETRY_AFTER = 600.0

Result = dict[str, Any]


class _Bearer(AuthBase):
    """The key, and nothing from ``~/.netrc`` when there is none."""

    def __init__(self, key: Optional[str]):
        self.key = key

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self.key:
            request.headers["Authorization"] = f"Bearer {self.key}"
        return request


@dataclass(frozen=True)
class Server:
    """The endpoint, and how patiently it is asked.

    Parameters
    ----------
    root : callable
        Gives the address without ``/v1``; a requeued job has another one.
    key : str, optional
        API key.
    timeout : float
        Seconds that one answer may take.
    retries : int
        How often a request is sent again after the first time.
    """

    root: Callable[[], str]
    key: Optional[str]
    timeout: float
    retries: int

    def session(self) -> requests.Session:
        """A session with the key; each thread has its own."""
        session = requests.Session()
        session.auth = _Bearer(self.key)
        return session

    def models(self) -> requests.Response:
        """What is served."""
        timeout = (CONNECT_TIMEOUT, self.timeout)
        with self.session() as session:
            return session.get(f"{self.root()}/v1/models", timeout=timeout)


@dataclass(frozen=True)
class Answer:
    """What came of one attempt.

    Parameters
    ----------
    final : bool
        Whether the server has decided; otherwise it is worth another attempt.
    response : dict or None
        Status code, request id and body, None if there was no answer.
    error : dict or None
        Code and message, None after success.
    pause : float
        Seconds that the server asks to wait.
    """

    final: bool
    response: Optional[dict[str, Any]]
    error: Optional[dict[str, str]]
    pause: float = 0.0

    def result(self, custom_id: str) -> Result:
        """The line of the output, in OpenAI's batch form."""
        return {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": custom_id,
            "response": self.response,
            "error": self.error,
        }


def post(session: requests.Session, server: Server, request: Request) -> Answer:
    """Send a request once."""
    try:
        response = session.post(
            server.root() + request.url,
            data=json.dumps(request.body),
            headers={"Content-Type": "application/json"},
            timeout=(CONNECT_TIMEOUT, server.timeout),
            allow_redirects=False,  # it would become a GET
        )
    except requests.Timeout as err:
        return Answer(False, None, _error("timeout", err))
    except requests.RequestException as err:
        return Answer(False, None, _error("connection", err))
    return read_answer(response)


def read_answer(response: requests.Response) -> Answer:
    """Tell a decision of the server from a state that may pass."""
    code = response.status_code
    try:
        body = response.json()
    except ValueError:
        if response.ok:  # cut short, or from something in between
            return Answer(False, None, _error("connection", "the answer is not JSON"))
        body = response.text
    request_id = response.headers.get("X-Request-Id") or _member(body, "id") or ""
    described = {"status_code": code, "request_id": request_id, "body": body}
    if response.ok and not response.is_redirect:
        return Answer(True, described, None)
    passing = code in (408, 429) or code >= 500
    message = _member(_member(body, "error"), "message") or response.reason
    pause = _retry_after(response) if passing else 0.0
    return Answer(not passing, described, _error(str(code), message), pause)


def _error(code: str, message: Any) -> dict[str, str]:
    return {"code": code, "message": str(message)}


def _member(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None


def _retry_after(response: requests.Response) -> float:
    value = response.headers.get("Retry-After")
    try:
        seconds = Retry().parse_retry_after(value) if value else 0.0
    except Exception:  # neither seconds nor a date
        return 0.0
    return min(seconds, LONGEST_RETRY_AFTER)


def pause_before(attempt: int, asked: float) -> float:
    """Seconds to wait before a further attempt, the first of which is 1."""
    longest = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (attempt - 1))
    # spread, so that all threads do not come back at once
    return max(asked, longest * random.uniform(0.5, 1.0))


class Sender:
    """Send requests by threads, and give their results as they come.

    At most `concurrency` requests are in memory, and about as many results.

    Parameters
    ----------
    server : Server
        Where to.
    pending : iterator of Request
        Taken one at a time.
    concurrency : int
        How many are under way at once.
    was_away : callable
        Asked with a time (`time.monotonic`) when a request has had all its attempts:
        whether the server was away since, so that it is sent again. It raises if the
        server is gone for good, which ends the sending.
    """

    def __init__(
        self,
        server: Server,
        pending: Iterator[Request],
        concurrency: int,
        was_away: Callable[[float], bool],
    ):
        self._server, self._pending, self._was_away = server, pending, was_away
        self._lock = threading.Lock()
        self._stop = threading.Event()
        # a result, None for a thread that has ended, or what ended all
        self._came: queue.Queue[Any] = queue.Queue(maxsize=concurrency)
        # daemons: one that waits for an answer does not hold up the end
        self._threads = [
            threading.Thread(target=self._work, daemon=True) for _ in range(concurrency)
        ]

    def __iter__(self) -> Iterator[Result]:
        """Results in the order in which they come."""
        for thread in self._threads:
            thread.start()
        left = len(self._threads)
        while left:
            item = self._came.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield item

    def stop(self) -> Iterator[Result]:
        """Send nothing more; results that have come by now."""
        self._stop.set()
        while True:
            try:
                item = self._came.get_nowait()
            except queue.Empty:
                return
            if isinstance(item, dict):
                yield item

    def _work(self) -> None:
        try:
            with self._server.session() as session:
                while (request := self._next()) is not None:
                    answer = self._ask(session, request)
                    if answer is not None:
                        self._came.put(answer.result(request.custom_id))
            self._came.put(None)
        except BaseException as err:
            self._came.put(err)

    def _next(self) -> Optional[Request]:
        with self._lock:
            return None if self._stop.is_set() else next(self._pending, None)

    def _ask(self, session: requests.Session, request: Request) -> Optional[Answer]:
        """Ask until there is an answer to keep; None if all is being stopped."""
        started, attempt = time.monotonic(), 0
        while True:
            answer = post(session, self._server, request)
            if answer.final:
                return answer
            attempt += 1
            if attempt > self._server.retries:
                if not self._was_away(started):
                    return answer
                started, attempt = time.monotonic(), 0
            elif self._stop.wait(pause_before(attempt, answer.pause)):
                return None
            if self._stop.is_set():
                return None
