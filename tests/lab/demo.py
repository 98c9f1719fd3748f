"""The main job, for real: one model over two nodes, at the shell.

Brings the one-machine cluster up if it is not, launches the tiny model as an ordinary
user, shows its stages, asks it for a completion, shuts it down and shows that nothing
is left. Runs as root, which the cluster needs; the launch itself does not.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from lab import CANNOT_RUN, Lab, LabError

PROJECT = Path(__file__).resolve().parents[2]
CLIENT = Path(__file__).resolve().with_name("demo_client.py")
LIMIT = 900


def left_over(lab: Lab) -> list[str]:
    """Processes of jobs on any node, as text."""
    return [
        f"{node}: {' '.join(process.cmdline)[:100]}"
        for node in lab.nodes
        for process in lab.node_processes(node)
    ]


def wait_until_clean(lab: Lab, limit: float = 60) -> list[str]:
    """Wait until no job process is left on any node; what is left otherwise."""
    deadline = time.monotonic() + limit
    while (left := left_over(lab)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return left


def cancel_all(lab: Lab) -> None:
    """End every job of the lab's user."""
    lab.run(["scancel", f"--user={lab.user}"], timeout=30)


def run_client(lab: Lab, arguments: list[str]) -> int:
    """Run the launching side as the ordinary user; its exit status."""
    lab.hub_install(PROJECT / "app")
    process = lab.popen(
        [lab.client_python, "-c", CLIENT.read_text(), *arguments],
        env={"TERM": "xterm-256color", "COLUMNS": "100"},
    )
    try:
        return process.wait(timeout=LIMIT)
    finally:
        if process.poll() is None:
            # its sbatch too, which would submit after everything was cancelled
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(timeout=30)


def main() -> int:
    """Run the demo; 0 if all of it worked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--tensor", action="store_true", help="TP=2 across the nodes, not PP=2"
    )
    options = parser.parse_args()
    # a plain TERM ends the demo as Ctrl-C does
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    lab = Lab()
    was_up = lab.status()["up"]
    status = 1
    try:
        lab.up()
        status = run_client(lab, ["--tensor"] if options.tensor else [])
        left = wait_until_clean(lab)
        print("Processes left on the nodes:", *(left or ["none"]), sep="\n  ")
        status = status or int(bool(left))
    except LabError as err:
        print(err, file=sys.stderr)
        status = getattr(err, "code", CANNOT_RUN)
    except KeyboardInterrupt:
        print("\nInterrupted: cancelling the job.", file=sys.stderr)
        status = 130
    except subprocess.TimeoutExpired:
        print(f"The demo took longer than {LIMIT} s.", file=sys.stderr)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if lab.status()["up"]:
            cancel_all(lab)
            wait_until_clean(lab)
        if not was_up:
            lab.down()
    return status


if __name__ == "__main__":
    sys.exit(main())
