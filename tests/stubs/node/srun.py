"""The one step of a job, as Slurm runs it, with all its tasks on this machine.

What the real srun was seen to do and this one does: after a bad exit the other tasks
get SIGTERM, and SIGKILL when KillWait is over; SIGTERM kills the step; each line of a
task is labelled; stdin goes to every task; the status is the highest of the tasks'.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

KILL_WAIT = 10
ETC, LOG = Path(os.environ["STUB_ETC"]), Path(os.environ["STUB_LOG"])
NODES = os.environ["STUB_NODES"].split(",")

# Options of an outer job, which the real srun would obey.
LEAKED = ("SLURM_MEM_PER_CPU", "SLURM_CPU_BIND", "SLURM_GPUS", "SLURM_HINT")
LEAKED += ("SLURM_THREADS_PER_CORE", "SLURM_EXACT", "SLURM_NTASKS_PER", "SLURM_WAIT")

write_lock = threading.Lock()
tasks: dict[int, subprocess.Popen] = {}
forced = threading.Event()


def refuse(why: str) -> None:
    """Refuse a call that is not known, loudly."""
    with LOG.joinpath("refused").open("a") as file:
        file.write(f"stub srun: {why}\n")
    print(f"stub srun: {why}", file=sys.stderr)
    sys.exit(97)


def parse(argv: list[str]) -> tuple[dict[str, str], list[str]]:
    """Split the call into srun's options and the command."""
    known = {
        "--nodes": str(len(NODES)),
        "--ntasks": str(len(NODES)),
        "--ntasks-per-node": "1",
        "--kill-on-bad-exit": None,
        "--distribution": "block",
        "--cpus-per-task": None,
        "--cpu-bind": "none",
        "--export": "ALL",
        "--label": "",
    }
    options = {}
    while argv and argv[0].startswith("-"):
        name, _, value = argv[0].partition("=")
        if name not in known or known[name] not in (None, value):
            refuse(f"not known: {argv[0]}")
        options[name] = value
        argv = argv[1:]
    for name in ("--nodes", "--ntasks", "--ntasks-per-node"):
        if name not in options:
            refuse(f"{name} is missing")
    return options, argv


def pump(source, sink, label: str) -> None:
    """Copy a task's lines, labelled."""
    for line in source:
        if not line.endswith(b"\n"):
            line += b"\n"
        with write_lock:
            sink.write(label.encode() + line)
            sink.flush()


def feed() -> None:
    """Give every line of stdin to every task, and its end too."""
    while True:
        line = os.read(0, 65536)
        for task in list(tasks.values()):
            try:
                if line:
                    task.stdin.write(line)
                    task.stdin.flush()
                else:
                    task.stdin.close()
            except (OSError, ValueError):
                pass
        if not line:
            return


def signal_all(signum: int) -> None:
    """Signal what is left of each task, its own group only."""
    for task in tasks.values():
        try:
            os.killpg(task.pid, signum)
        except ProcessLookupError:
            pass


def on_term(signum, frame) -> None:
    """Take a signal for an order to end the step."""
    forced.set()
    say("srun: forcing job termination")
    signal_all(signal.SIGKILL)


def say(text: str) -> None:
    """Print one of srun's own lines."""
    os.write(2, (text + "\n").encode())


def start(rank: int, label: bool, command: list[str]) -> list[threading.Thread]:
    """Start one task and the threads that carry what it says."""
    env = {
        **os.environ,
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_ID": "0",
        "SLURMD_NODENAME": NODES[rank],
        "CUDA_VISIBLE_DEVICES": os.environ["STUB_GPUS"],
    }
    pipe = subprocess.PIPE
    task = subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, env=env, start_new_session=True
    )
    tasks[rank] = task
    with LOG.joinpath("tasks").open("a") as file:
        file.write(f"{task.pid}\n")
    text = f"{rank}: " if label else ""
    pumps = [
        threading.Thread(target=pump, args=args, daemon=True)
        for args in (
            (task.stdout, sys.stdout.buffer, text),
            (task.stderr, sys.stderr.buffer, text),
        )
    ]
    for thread in pumps:
        thread.start()
    return pumps


def main() -> int:
    """Run the step."""
    options, command = parse(sys.argv[1:])
    for name in os.environ:
        if name.startswith(LEAKED):
            refuse(f"{name} of an outer job would be obeyed")
    config = json.loads(ETC.joinpath("srun.json").read_text())
    if "fails" in config:
        say(config["fails"])
        return 1
    signal.signal(signal.SIGTERM, on_term)
    absent = config.get("absent", [])
    pumps: list[threading.Thread] = []
    for rank in range(len(NODES)):
        if rank not in absent:
            pumps += start(rank, "--label" in options, command)
    threading.Thread(target=feed, daemon=True).start()
    ended: dict[int, int] = {}
    kill_at = float("inf")
    while not forced.is_set() and (absent or len(ended) < len(tasks)):
        for rank, task in tasks.items():
            if rank in ended or task.poll() is None:
                continue
            ended[rank] = task.returncode
            if task.returncode == 0:
                continue
            how = (
                f"Exited with exit code {task.returncode}"
                if task.returncode > 0
                else signal.strsignal(-task.returncode)
            )
            say(f"srun: error: {NODES[rank]}: task {rank}: {how}")
            if options.get("--kill-on-bad-exit") == "1" and kill_at == float("inf"):
                signal_all(signal.SIGTERM)
                kill_at = time.monotonic() + KILL_WAIT
                absent = []
        if time.monotonic() > kill_at:
            signal_all(signal.SIGKILL)
        time.sleep(0.02)
    for thread in pumps:
        thread.join(1)
    signal_all(signal.SIGKILL)
    codes = [task.wait() for task in tasks.values()]
    return max((code if code >= 0 else 128 - code) for code in codes)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)
