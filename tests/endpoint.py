"""A server that stands in for vLLM's: it answers, waits, refuses or drops as told."""

import json
import socket
import threading
import time
from collections import Counter, defaultdict, deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Endpoint:
    """A real HTTP server in threads of this process.

    Attributes
    ----------
    healthy : bool
        What ``/health`` says.
    key : str or None
        API key that it wants.
    served : list of str
        Names of models that it lists.
    pause : float
        Seconds before each answer.
    asked : Counter
        How often each prompt was asked for.
    bodies : list
        Every (path, body) that was posted.
    authorizations : set
        Every ``Authorization`` that came, None for none.
    most_at_once : int
        Most requests under way at one time.
    """

    def __init__(self, *served: str):
        self.served, self.healthy = list(served), True
        self.key, self.pause = None, 0.0
        self.asked: Counter[str] = Counter()
        self.bodies: list[tuple[str, Any]] = []
        self.authorizations: set[Any] = set()
        self.most_at_once = self._at_once = 0
        self._script: dict[str, deque[Any]] = defaultdict(deque)
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"endpoint": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        serve = self._server.serve_forever
        threading.Thread(target=serve, args=(0.05,), daemon=True).start()

    @property
    def root(self) -> str:
        """Address without ``/v1``."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        """Answer nothing more."""
        self._server.shutdown()
        self._server.server_close()

    def answer(self, prompt: str, *actions: Any) -> None:
        """Let the next requests for a prompt be answered otherwise.

        An action is a status code, a (code, headers) pair, "drop", "cut" (in the middle
        of the body), "garbage", or a number of seconds (a float) to wait.
        """
        self._script[prompt].extend(actions)

    def begin(self, path: str, body: Any) -> Any:
        """Take note of a request; what to do with it."""
        prompt = prompt_of(body)
        with self._lock:
            self.asked[prompt] += 1
            self.bodies.append((path, body))
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            script = self._script[prompt]
            return script.popleft() if script else None

    def end(self) -> None:
        """Take note of the end of a request."""
        with self._lock:
            self._at_once -= 1


def prompt_of(body: Any) -> str:
    """The prompt of a body, whatever its form."""
    if "messages" in body:
        return str(body["messages"][-1]["content"])
    return str(body.get("prompt", body.get("input")))


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *args: Any) -> None:
        """Say nothing of a client that was killed."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    endpoint: Endpoint

    def log_message(self, *args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        """Health and models."""
        if self.path == "/health":
            self._reply(200 if self.endpoint.healthy else 503, {})
        elif not self._has_key():
            self._reply(401, {"error": {"message": "Unauthorized"}})
        else:
            self._reply(200, {"data": [{"id": name} for name in self.endpoint.served]})

    def do_POST(self) -> None:
        """One request."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        action = self.endpoint.begin(self.path, body)
        try:
            time.sleep(action if isinstance(action, float) else self.endpoint.pause)
            if not self._has_key():
                self._reply(401, {"error": {"message": "Unauthorized"}})
            elif action in ("drop", "cut"):
                self._drop(action == "cut")
            elif action == "garbage":
                self._send(200, b"<html>", {})
            elif isinstance(action, (int, tuple)):
                code, headers = action if isinstance(action, tuple) else (action, {})
                self._reply(code, {"error": {"message": f"told to {code}"}}, headers)
            else:
                self._reply(200, completion(body))
        except (BrokenPipeError, ConnectionResetError):
            pass
        finally:
            self.endpoint.end()

    def _has_key(self) -> bool:
        given, key = self.headers.get("Authorization"), self.endpoint.key
        self.endpoint.authorizations.add(given)
        return not key or given == f"Bearer {key}"

    def _drop(self, in_the_middle: bool) -> None:
        if in_the_middle:
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def _reply(self, code: int, value: Any, headers: Any = None) -> None:
        self._send(code, json.dumps(value).encode(), headers or {})

    def _send(self, code: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def completion(body: Any) -> dict[str, Any]:
    """An answer that names its prompt."""
    return {
        "id": f"cmpl-{prompt_of(body)}",
        "model": body["model"],
        "choices": [{"index": 0, "text": f"echo {prompt_of(body)}"}],
        "usage": {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5},
    }
