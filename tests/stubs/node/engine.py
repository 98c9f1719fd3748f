"""A server that answers as vLLM's would, or as badly as the test asks.

``http.json``, read at each request: ``health`` and ``completion`` (HTTP statuses),
``hang`` (no answer to a completion), ``key`` (the API key that it wants), ``running``
(requests that run, None for no metrics), ``moving`` (tokens come),
``good_every`` (of that many completions, one is answered well all the same).
"""

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer

ETC, LOG = Path(os.environ["STUB_ETC"]), Path(os.environ["STUB_LOG"])


METRICS = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="m"}} {0}
vllm:num_requests_waiting{{engine="0",model_name="m"}} 0.0
vllm:generation_tokens_total{{engine="0",model_name="m"}} {1}
"""


class Handler(BaseHTTPRequestHandler):
    """Two addresses of an OpenAI server."""

    completions = 0

    def log_message(self, *args) -> None:
        """Say nothing."""

    def answer(self, status: int, body: bytes = b'{"object": "stub"}') -> None:
        """Send an answer with a body."""
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def note(self, body: bytes) -> dict:
        """Note the request; return what the test asks for."""
        entry = {
            "method": self.command,
            "path": self.path,
            "headers": {key.lower(): value for key, value in self.headers.items()},
            "body": body.decode(),
        }
        with LOG.joinpath("http.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")
        return json.loads(ETC.joinpath("http.json").read_text())

    def do_GET(self) -> None:
        """Answer /health and /metrics."""
        config = self.note(b"")
        if self.path == "/health":
            self.answer(config.get("health", 200))
        elif self.path == "/metrics" and config.get("running") is not None:
            tokens = time.time() if config.get("moving") else 7
            self.answer(200, METRICS.format(config["running"], tokens).encode())
        else:
            self.answer(404)

    def do_POST(self) -> None:
        """Answer /v1/completions."""
        config = self.note(self.rfile.read(int(self.headers["Content-Length"])))
        if config.get("hang"):
            time.sleep(3600)
        key = config.get("key")
        if self.path != "/v1/completions":
            self.answer(404)
        elif key and self.headers["Authorization"] != f"Bearer {key}":
            self.answer(401)
        else:
            Handler.completions += 1
            good = Handler.completions % config.get("good_every", 1 << 30) == 0
            self.answer(200 if good else config.get("completion", 200))


class Server(ThreadingHTTPServer):
    """Without the look-up of this machine's own name."""

    def server_bind(self) -> None:
        """Bind, nothing else."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]


if __name__ == "__main__":
    port = int(sys.argv[sys.argv.index("--port") + 1])
    Server(("127.0.0.1", port), Handler).serve_forever()
