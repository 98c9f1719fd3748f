"""What a server is busy with, from its own metrics."""

import re
import time
from dataclasses import dataclass
from typing import Optional

import requests

_TIMEOUT = 5
_SAMPLE = re.compile(
    r"^(?:vllm|sglang):(?P<name>num_requests_running|num_requests_waiting|"
    r"num_running_reqs|num_queue_reqs|prompt_tokens_total|generation_tokens_total)"
    r"(?:\{.*\})? (?P<value>\S+)",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Load:
    """Requests and tokens of a server, at a time.

    Parameters
    ----------
    at : float
        Seconds, by a clock that only goes forward.
    running, waiting : int
        Requests.
    prompt_tokens, generation_tokens : float
        Since the server started.
    """

    at: float
    running: int
    waiting: int
    prompt_tokens: float
    generation_tokens: float


def parse(text: str, at: float) -> Optional[Load]:
    """Read metrics; None if they hold none of these. Several engines are added up."""
    sums: dict[str, float] = {}
    for sample in _SAMPLE.finditer(text):
        try:
            value = float(sample["value"])
        except ValueError:
            continue
        sums[sample["name"]] = sums.get(sample["name"], 0.0) + value
    if not sums:
        return None

    def first(*names: str) -> float:
        return next((sums[name] for name in names if name in sums), 0.0)

    return Load(
        at=at,
        running=int(first("num_requests_running", "num_running_reqs")),
        waiting=int(first("num_requests_waiting", "num_queue_reqs")),
        prompt_tokens=first("prompt_tokens_total"),
        generation_tokens=first("generation_tokens_total"),
    )


def fetch(base_url: str) -> Optional[Load]:
    """Ask a server; None if it does not answer or has no metrics."""
    try:
        url = base_url.rstrip("/").removesuffix("/v1") + "/metrics"
        answer = requests.get(url, timeout=_TIMEOUT)
        answer.raise_for_status()
    except requests.RequestException:
        return None
    return parse(answer.text, time.monotonic())


def describe(before: Optional[Load], now: Optional[Load]) -> str:
    """Requests, and tokens per second since `before`."""
    if now is None:
        return "no metrics"
    parts = [f"{now.running} running, {now.waiting} waiting"]
    passed = now.at - before.at if before else 0.0
    if before and passed > 0:
        prompt = max(0.0, now.prompt_tokens - before.prompt_tokens) / passed
        generation = max(0.0, now.generation_tokens - before.generation_tokens) / passed
        parts.append(f"{prompt:.1f} prompt and {generation:.1f} generated tokens/s")
    return ", ".join(parts)
