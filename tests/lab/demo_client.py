"""The launching side of the demo, run by the ordinary user."""

import argparse
import subprocess
import sys
import time
from pathlib import Path

import requests
from rich.console import Console
from rich.status import Status
from vec_inf.client import LaunchOptions, ModelStatus, StatusResponse, VecInfClient

from app.utils.vec_inf_multinode import launch_model

MODEL = "tiny-llama"
PROMPT = "The quick brown fox"
LIMIT = 600

console = Console(highlight=False)


def log_lines(status: StatusResponse, job_id: str) -> list[str]:
    """The job's stdout so far."""
    path = Path(status.log_dir) / f"{MODEL}.{job_id}.out"
    return path.read_text(errors="replace").splitlines() if path.exists() else []


def stage(status: StatusResponse, lines: list[str]) -> str:
    """What the job is doing, in a few words."""
    if status.server_status == ModelStatus.PENDING:
        return f"queued ({status.pending_reason})"
    ranks = sum("LLMHUB-STAGE-A: rank" in line for line in lines)
    if not any("LLMHUB-STAGE-A: all" in line for line in lines):
        return f"starting ranks ({ranks} up)"
    return f"loading the engine: {lines[-1][:70]}"


def wait_until_ready(client: VecInfClient, job_id: str) -> StatusResponse:
    """Show the stages with their seconds until vec-inf says READY."""
    started = since = time.monotonic()
    shown = ""
    with Status("submitted", console=console) as spinner:
        while time.monotonic() - started < LIMIT:
            status = client.get_status(job_id)
            now = time.monotonic()
            text = stage(status, log_lines(status, job_id))
            kind = text.split(" (")[0].split(":")[0]
            if shown and kind != shown:
                console.print(f"  {now - since:5.1f} s  {shown}")
                since = now
            shown = kind
            spinner.update(f"{now - started:4.0f} s  {text}")
            if status.server_status == ModelStatus.READY:
                console.print(f"  {now - since:5.1f} s  {shown}")
                console.print(f"  {now - started:5.1f} s  READY", style="bold green")
                return status
            if status.server_status == ModelStatus.FAILED or str(
                status.job_state
            ) not in ("PENDING", "CONFIGURING", "RUNNING"):
                break
            time.sleep(0.5)
    lines = [line for line in log_lines(status, job_id) if "LLMHUB-" in line]
    console.print(*lines, sep="\n")
    sys.exit(f"not ready: {status.server_status.value}: {status.failed_reason}")


def complete(status: StatusResponse) -> None:
    """Ask for one greedy completion and print it with its token ids."""
    answer = requests.post(
        f"{status.base_url}/completions",
        json={
            "model": MODEL,
            "prompt": PROMPT,
            "max_tokens": 12,
            "temperature": 0,
            "return_token_ids": True,
        },
        timeout=120,
    )
    answer.raise_for_status()
    choice = answer.json()["choices"][0]
    console.print(f"Prompt      {PROMPT!r}")
    console.print(f"Completion  {choice['text']!r}")
    console.print(f"Token ids   {choice.get('token_ids')}")


def main() -> None:
    """Launch, wait, complete, shut down."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tensor", action="store_true")
    tensor = parser.parse_args().tensor
    options = LaunchOptions(
        num_nodes=2,
        time="00:30:00",
        vllm_args="-tp=2,-pp=1,--enforce-eager" if tensor else None,
    )
    client = VecInfClient()
    console.print(f"launch_model({MODEL!r}) over 2 nodes", style="bold")
    job_id = launch_model(client, MODEL, options).slurm_job_id
    try:
        console.print(f"Slurm job {job_id}")
        status = wait_until_ready(client, job_id)
        lines = log_lines(status, job_id)
        console.print(*(line for line in lines if "LLMHUB-TOPOLOGY" in line), sep="\n")
        console.print(f"Endpoint    {status.base_url}", style="bold")
        step = subprocess.run(
            ["scontrol", "show", "step", f"{job_id}.0"],
            capture_output=True,
            text=True,
            timeout=30,
        )
        console.print(step.stdout.strip())
        complete(status)
    finally:
        client.shutdown_model(job_id)
        console.print(f"shutdown_model({job_id})")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
