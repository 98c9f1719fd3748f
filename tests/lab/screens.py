"""Take the pictures of the README anew: real commands on the one-machine cluster.

Each command runs as the ordinary user in a terminal of its own; what the terminal shows
in the end becomes an SVG in ``docs/``. Needs the lab up, and rich (``make screens``).
"""

import io
import re
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path

import requests
from lab import Lab
from rich.console import Console
from rich.text import Text

PROJECT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(PROJECT), str(PROJECT / "tests")]

import screen  # noqa: E402

from app.utils.vec_inf_multinode.cli.connect import login_host  # noqa: E402

DOCS = PROJECT / "docs"
PROGRAM = "vec-inf-multinode"
WIDTH = 100
LIMIT = 240
LAUNCH = ["tiny-llama", "--num-nodes", "2", "--time", "00:30:00"]


class Terminal:
    """One command in a terminal.

    Parameters
    ----------
    lab : Lab
        A lab that is up, with the project installed.
    words : list of str
        The command.
    """

    def __init__(self, lab: Lab, *words: str):
        self.command = shlex.join(words)
        self.process = lab.popen(
            ["script", "-qefc", self.command, "/dev/null"],
            env={"TERM": "xterm-256color", "COLUMNS": str(WIDTH)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=False,
        )
        self.written = b""

    def read(self, until: str = "") -> str:
        """Read to the end, or until a pattern is there."""
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline:
            data = self.process.stdout.read1(65536)
            self.written += data
            text = self.written.decode(errors="replace")
            if not data or (until and re.search(until, text)):
                return text
        raise TimeoutError(f"{self.command}: {LIMIT} s")

    def press(self, key: bytes) -> None:
        """Type something."""
        self.process.stdin.write(key)
        self.process.stdin.flush()


def picture(name: str, command: str, lines: list[str]) -> None:
    """Write what a terminal shows as ``docs/NAME.svg``."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    # this machine's own name is nobody's login node
    text = "\n".join(lines).replace(f"@{login_host()}", "@login.cluster")
    console.print(Text(f"$ {command}", style="bold"))
    console.print(Text.from_ansi(text))
    DOCS.mkdir(exist_ok=True)
    svg = console.export_svg(title=name, unique_id=name)
    DOCS.joinpath(f"{name}.svg").write_text(svg, "utf-8")
    print(f"docs/{name}.svg  {len(svg) // 1024 + 1} KiB")


def shoot(lab: Lab, name: str, *words: str) -> list[str]:
    """Run a command to its end and take its picture; its lines."""
    terminal = Terminal(lab, *words)
    lines = screen.lines(terminal.read())
    picture(name, terminal.command, lines)
    return lines


def number_in(lines: list[str]) -> str:
    """The job's number in what ``launch`` or ``serve`` says."""
    return next(m[1] for line in lines if (m := re.match(r"Job +(\d+)", line)))


def ask(url: str, busy: threading.Event) -> None:
    """Keep a server busy."""
    body = {"model": "tiny-llama", "prompt": "Once", "max_tokens": 100}
    while busy.is_set():
        requests.post(f"{url}/completions", json=body, timeout=60)


def serve(lab: Lab) -> None:
    """Take a picture of ``serve``: its live line, and after that its end."""
    terminal = Terminal(lab, "vec-inf-multinode", "serve", *LAUNCH)
    url = re.search(r"Address +(\S+)", terminal.read(until=r"Model +\S+\r"))[1]
    busy = threading.Event()
    busy.set()
    asking = [threading.Thread(target=ask, args=(url, busy)) for _ in range(2)]
    for thread in asking:
        thread.start()
    try:
        written = terminal.read(until=r"[1-9][0-9.]* generated tokens/s.* left")
    finally:
        busy.clear()
        for thread in asking:
            thread.join()
    live = screen.lines(written)[-1]
    terminal.press(b"\x03")
    lines = screen.lines(terminal.read())
    stop = next(i for i, line in enumerate(lines) if "Stopping" in line)
    picture("serve", terminal.command, [*lines[:stop], live, "^C", *lines[stop:]])


def run(lab: Lab, job: str) -> None:
    """Take a picture of ``run``."""
    prompts, results = lab.home / "prompts.jsonl", lab.home / "results.jsonl"
    lines = (f'{{"prompt": "Once upon {n}", "max_tokens": 16}}\n' for n in range(300))
    prompts.write_text("".join(lines))
    prompts.chmod(0o644)
    files = ["--input", prompts.name, "--output", results.name]
    try:
        shoot(lab, "run", PROGRAM, "run", "tiny-llama", "--job-id", job, *files)
    finally:
        for path in (prompts, *lab.home.glob("results.jsonl*")):
            path.unlink()


def diagnose(lab: Lab) -> None:
    """Take a picture of ``diagnose``, of a job with an argument that vLLM lacks."""
    odd = ["--vllm-args", "--no-such-argument=1", "--wait"]
    terminal = Terminal(lab, PROGRAM, "launch", *LAUNCH, *odd)
    job = number_in(screen.lines(terminal.read()))
    shoot(lab, "diagnose", PROGRAM, "diagnose", job)


def main() -> None:
    """Take every picture; the lab is left as it was."""
    lab = Lab()
    lab.hub_install(PROJECT / "app")
    env = lab.home / "screens.env"
    env.write_text("VLLM_API_KEY=sk-0123456789\n")
    env.chmod(0o644)
    try:
        shoot(lab, "render", PROGRAM, "render", *LAUNCH, "--env", env.name)
        launch = [PROGRAM, "launch", *LAUNCH, "--env", env.name, "--wait"]
        job = number_in(shoot(lab, "launch", *launch))
        shoot(lab, "connect", PROGRAM, "connect", job)
        run(lab, job)
        lab.run(["scancel", job], timeout=20)
        serve(lab)
        diagnose(lab)
    finally:
        lab.run(["scancel", f"--user={lab.user}"], timeout=20)
        env.unlink()


if __name__ == "__main__":
    main()
