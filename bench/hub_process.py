"""What the package costs the hub's process: import, and launches up to sbatch.

Runs in an interpreter of its own; prints seconds as JSON, measured in turns, so that
what slows the machine slows both sides.
"""

import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

OURS, VEC_INF = "app.utils.vec_inf_multinode", "vec_inf.client"


class AtSbatch(BaseException):
    """Raised in place of the sbatch call, where the measurement ends."""


def import_seconds(module: str) -> float:
    """Seconds that a fresh interpreter takes to import a module."""
    code = f"import time; t = time.perf_counter(); import {module}; "
    code += "print(time.perf_counter() - t)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return float(done.stdout)


def launch_seconds(launch: Callable[[], Any]) -> float:
    """Processor seconds of one launch, up to the sbatch call."""
    started = time.process_time()
    try:
        launch()
    except AtSbatch:
        return time.process_time() - started
    raise AssertionError("sbatch was not called")


def measure_launches(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Launches of a single-node and a multi-node entry by both clients."""
    from vec_inf.client import LaunchOptions, VecInfClient, _utils

    from app.utils.vec_inf_multinode import launch_model

    def at_sbatch(command: str) -> tuple[str, str]:
        raise AtSbatch

    _utils.run_bash_command = at_sbatch
    warnings.simplefilter("ignore")
    client = VecInfClient()
    found: dict[str, dict[str, list[float]]] = {}
    for row, model in (("single", sys.argv[2]), ("multi", sys.argv[3])):
        options = LaunchOptions()
        sides = {
            "vec-inf": lambda: client.launch_model(model, options),
            "ours": lambda: launch_model(client, model, options),
        }
        times: dict[str, list[float]] = {side: [] for side in sides}
        for number in range(rounds + 1):
            for side, launch in sides.items():
                seconds = launch_seconds(launch)
                if number:  # the first round fills caches of both
                    times[side].append(seconds)
        found[row] = times
    return found


def measure_imports(rounds: int) -> dict[str, list[float]]:
    """Imports of the package and of vec-inf's client."""
    sides = {"vec-inf": VEC_INF, "ours": OURS}
    times: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(rounds + 1):
        for side, module in sides.items():
            seconds = import_seconds(module)
            if number:
                times[side].append(seconds)
    return times


if __name__ == "__main__":
    turns = int(sys.argv[1])
    print(json.dumps({**measure_launches(turns), "import": measure_imports(turns)}))
