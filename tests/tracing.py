"""Whole jobs on stand-in nodes, with every file-system call that they make counted."""

import re
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from node import SERVE, STAY, JobCase, JobRun, ip_output

CALLS = "trace=%file,read,write,getdents64"
_LINE = re.compile(r"\d+ +(?P<time>\d+\.\d+) (?P<call>\w+)\((?P<rest>.*)")
# Looking for markers of ranks that have started: these calls go with time.
_LOOK = re.compile(r"/started(/?|/\*\[0-9\])[\">]")


def strace() -> str:
    """Path of strace; `make test` installs it."""
    found = shutil.which("strace", path="/usr/bin:/usr/local/bin")
    assert found, "strace is needed to count system calls: apt-get install strace"
    return found


@dataclass(frozen=True)
class Window:
    """File-system calls below the job directory in a span of the job's life.

    Parameters
    ----------
    calls : int
        Number of calls of all processes of the job, on all nodes.
    looks : int
        How many of them only looked for ranks that have started.
    seconds : float
        Length of the span.
    """

    calls: int
    looks: int
    seconds: float


class TracedRun(JobRun):
    """A batch script and its ranks, run under strace."""

    def run(self, argv: list[str], *more: Any) -> None:
        """Run to the end; the tracer is not in the process's way."""
        trace = [strace(), "-D", "-f", "-ttt", "-y", "-s", "300", "-e", CALLS]
        super().run([*trace, "-o", str(self.trace), *argv], *more)

    @property
    def trace(self) -> Path:
        """What strace wrote."""
        return self.root / "trace"

    def window(self, start: float, end: float) -> Window:
        """Count the calls between two times of the clock."""
        calls = looks = 0
        for line in self.trace.read_text(errors="replace").splitlines():
            found = _LINE.match(line)
            if found and start <= float(found["time"]) < end and self.is_below(found):
                calls += 1
                looks += bool(_LOOK.search(found["rest"]))
        return Window(calls, looks, end - start)

    def is_below(self, found: re.Match[str]) -> bool:
        """Whether a call is for a path below the job directory."""
        if found["call"] == "execve":
            return False
        data = found["call"] in ("read", "write")
        subject = found["rest"].partition('"')[0] if data else found["rest"]
        return str(self.job_dir) in subject

    def launcher_processes(self) -> dict[str, list[str]]:
        """Command lines of the launcher's processes in the step now, by node."""
        own: dict[str, list[str]] = {node: [] for node in self.nodes}
        for pid in self.node.processes():
            with suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
                variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
                environ = dict(item.partition("=")[::2] for item in variables)
                engine = f"exec {line.strip()}" == STAY or "/engine.py " in line
                if environ.get("SLURM_STEP_ID") == "0" and not engine:
                    own[environ["SLURMD_NODENAME"]].append(line)
        return own


def traced(
    root: Path, nodes: int, during: Callable[[TracedRun], None], absent: bool = False
) -> TracedRun:
    """Run a job of so many nodes under strace.

    Parameters
    ----------
    root : Path
        Directory to make everything in.
    nodes : int
        Number of nodes, up to 200.
    during : callable
        Called with the run after it has started; must end it.
    absent : bool
        The last rank never starts.
    """
    names = [f"nid{number:03}" for number in range(1, nodes + 1)]
    case = JobCase(
        params={"num_nodes": str(nodes)},
        engines={0: SERVE, **{rank: STAY for rank in range(1, nodes)}},
        say={
            f"ip.{name}": ip_output(
                ("lo 127.0.0.1/8", f"hsn0 172.28.86.{number + 9}/21")
            )
            for number, name in enumerate(names, 1)
        }
        | {"srun.json": f'{{"absent": [{nodes - 1}]}}' if absent else "{}"},
        during=during,
        limit=120,
    )
    run = TracedRun(case, root)
    run.notes["started"] = time.time()
    return run.finish()


def serve_for(seconds: float) -> Callable[[TracedRun], None]:
    """Wait until a run is ready, let it serve for a while, cancel it."""

    def during(run: TracedRun) -> None:
        run.wait_for(run.ready, 100)
        run.notes["ready"] = time.time()
        time.sleep(seconds)
        run.notes["end"] = time.time()
        run.notes["processes"] = run.launcher_processes()
        run.cancel()

    return during


def wait_for(seconds: float, ranks: int) -> Callable[[TracedRun], None]:
    """Wait until all but one rank are up, look on for a while, cancel."""

    def during(run: TracedRun) -> None:
        run.wait_for(lambda: len(run.lines("STAGE-A")) == ranks, 100)
        time.sleep(0.5)
        run.notes["waiting"] = time.time()
        time.sleep(seconds)
        run.notes["end"] = time.time()
        run.cancel()

    return during
