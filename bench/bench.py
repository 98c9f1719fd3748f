"""Measure what the launcher costs, side by side with what it stands beside.

    make bench                             everything (about 40 minutes)
    make bench BENCH_ARGS='hub start'      some parts: hub, start, serve, ray, scale

Absolute times on a shared machine mean little, so each part takes both sides in turns.
Raw numbers go to ``results/raw.json``, part by part; the table and the plots are made
from that file.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parent
RESULTS = HERE / "results"
RAW = RESULTS / "raw.json"
sys.path[:0] = [str(PROJECT / "tests"), str(HERE)]

SINGLE, MULTI = "Meta-Llama-3.1-8B-Instruct", "c4ai-command-r-plus-08-2024"
ROUNDS = 5


def say(text: str) -> None:
    """One line of progress."""
    print(f"bench  {text}", file=sys.stderr, flush=True)


def hub_part(rounds: int) -> dict[str, Any]:
    """The hub's process: import and launches, with vec-inf's own catalog."""
    import support

    root = Path(tempfile.mkdtemp(prefix="bench-hub-"))
    try:
        places = {"log_dir": f"{root}/logs", "model_weights_parent_dir": f"{root}/w"}
        site = support.write_site(root / "config", {"default_args": places})
        support.make_weights(root / "w", [SINGLE, MULTI])
        environ = {**os.environ, **site, "HOME": str(root), "PYTHONPATH": str(PROJECT)}
        environ.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [sys.executable, str(HERE / "hub_process.py"), str(rounds * 3)]
        done = subprocess.run(
            [*command, SINGLE, MULTI],
            env=environ,
            stdout=subprocess.PIPE,
            timeout=300,
            check=True,
        )
    finally:
        shutil.rmtree(root)
    return json.loads(done.stdout)


def start_part(rounds: int) -> dict[str, Any]:
    """Job start until the last rank's container runs its engine, on two nodes."""
    import cluster

    lab, hub, place = on_cluster(2)
    sides = {
        "bare": lambda: cluster.bare_seconds(lab, place, 2, container=False),
        "bare, in containers": lambda: cluster.bare_seconds(lab, place, 2, True),
        "ours": lambda: cluster.start_seconds(hub, place, 2, stock=False),
        "vec-inf": lambda: cluster.start_seconds(hub, place, 2, stock=True),
    }
    try:
        return in_turns(sides, rounds)
    finally:
        hub.close()


def serve_part(rounds: int) -> dict[str, Any]:
    """Real vLLM: until it serves, what goes through it, what a fault does."""
    import cluster

    lab, hub, place = on_cluster(2)
    found: dict[str, Any] = {side: [] for side in ("by hand", "ours")}
    try:
        for number in range(rounds + 1):
            with cluster.served_by_hand(lab) as served:
                row = {**served.times(), **cluster.load(served.url)}
            say(f"by hand {row}")
            found["by hand"] += [row] if number else []  # the first fills the caches
            with cluster.served_by_job(hub) as served:
                row = {**served.times(), **cluster.load(served.url)}
                cluster.kill_worker(lab, "nid002")
                row["fault"] = cluster.seconds_to_end(lab, served.job)
            say(f"ours {row}")
            found["ours"] += [row] if number else []
        found["plain"] = [cluster.plain_fault(lab, place) for _ in range(2)]
        say(f"plain design, fault: {found['plain']}")
    finally:
        hub.close()
    return found


def ray_part(rounds: int) -> dict[str, Any]:
    """vec-inf's own script until it serves, in an environment and in the container."""
    import cluster

    lab, hub, _ = on_cluster(2)
    found: dict[str, Any] = {}
    try:
        sides = (("environment", str(cluster.ray_environment(lab)), rounds),)
        for side, venv, count in (*sides, ("container", "apptainer", 1)):
            found[side] = [
                cluster.ray_seconds(lab, hub, venv, 240) for _ in range(count)
            ]
            say(f"{side}: {found[side]}")
    finally:
        hub.close()
    return found


def scale_part(rounds: int) -> dict[str, Any]:
    """Jobs of 2 to 64 nodes with the stand-in, and the file-system calls of a job."""
    import cluster

    calls = subprocess.run(
        [sys.executable, str(HERE / "file_calls.py"), "2", "4", "8", "16", "32"],
        stdout=subprocess.PIPE,
        timeout=600,
        check=True,
    )
    lab, hub, place = on_cluster(64)
    jobs = []
    try:
        for _ in range(rounds):
            for nodes in (2, 8, 32, 64):
                bare = cluster.bare_seconds(lab, place, nodes, True)
                jobs.append(asdict(cluster.scale(lab, hub, place, nodes)))
                jobs[-1]["bare"] = bare
                say(f"scale {jobs[-1]}")
        missing = cluster.missing_rank(lab, hub, place, 64)
        say(f"a rank that never starts: {missing}")
    finally:
        hub.close()
    return {"calls": json.loads(calls.stdout), "jobs": jobs, "missing": missing}


def on_cluster(nodes: int) -> Any:
    """The cluster of so many nodes, a hub on it, the place of the stand-ins."""
    import cluster

    lab = cluster.Lab()
    lab.up(nodes)
    return lab, cluster.Hub(lab), cluster.Place(lab)


def in_turns(sides: dict[str, Any], rounds: int) -> dict[str, list[float]]:
    """Take each side's measurement in turn, after one round that fills caches."""
    found: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(rounds + 1):
        for side, measure in sides.items():
            seconds = measure()
            say(f"{side}: {seconds:.3f} s")
            found[side] += [seconds] if number else []
    return found


PARTS = {
    "hub": hub_part,
    "start": start_part,
    "serve": serve_part,
    "ray": ray_part,
    "scale": scale_part,
}


def machine() -> dict[str, Any]:
    """What the numbers were taken on."""
    return {
        "cpus": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "time": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
    }


def main() -> None:
    """Run the parts, keep their numbers, make table and plots."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", default=[], choices=[*PARTS, "report", []])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    for name in given.parts or PARTS:
        if name == "report":
            continue
        say(f"--- {name}")
        numbers = PARTS[name](given.rounds)
        raw = json.loads(RAW.read_text()) if RAW.exists() else {}
        raw[name] = {"machine": machine(), "rounds": given.rounds, **numbers}
        RAW.write_text(json.dumps(raw, indent=1) + "\n")
    import report

    print(report.write(RAW, RESULTS))


if __name__ == "__main__":
    main()
