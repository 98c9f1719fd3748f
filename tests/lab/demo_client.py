"""The launching side of the demo: the commands that users run, as one of them."""

import argparse
import json
import re
import shlex
import subprocess
import sys

import requests

MODEL = "tiny-llama"
PROMPT = "The quick brown fox"
LIMIT = 600


def run(*words: str) -> str:
    """Run a command as at a shell; what it printed.

    Raises
    ------
    SystemExit
        If it fails.
    """
    print(f"$ {shlex.join(words)}", flush=True)
    printed = ""
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            printed += line
        status = process.wait(timeout=LIMIT)
    if status:
        sys.exit(status)
    print(flush=True)
    return printed


def complete(base_url: str) -> None:
    """Ask for one greedy completion and print it with its token ids."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    answer = requests.post(
        f"{base_url}/completions", json={**body, "return_token_ids": True}, timeout=120
    )
    answer.raise_for_status()
    choice = answer.json()["choices"][0]
    print(f"Prompt      {PROMPT!r}")
    print(f"Completion  {choice['text']!r}")
    print(f"Token ids   {choice.get('token_ids')}\n", flush=True)


def main() -> None:
    """Launch, wait, complete, shut down."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tensor", action="store_true")
    options = ["--num-nodes", "2", "--time", "00:30:00"]
    if parser.parse_args().tensor:
        options += ["--vllm-args", "-tp=2,-pp=1,--enforce-eager"]
    program = "vec-inf-multinode"
    printed = run(program, "launch", MODEL, *options, "--wait")
    found = dict(re.findall(r"^(Job|Directory) +(.+)$", printed, re.M))
    job = found["Job"]
    try:
        run("grep", "LLMHUB-TOPOLOGY", f"{found['Directory']}/{MODEL}.{job}.out")
        run("scontrol", "show", "step", f"{job}.0")
        run(program, "connect", job)
        connect = [program, "connect", job, "--json-mode"]
        asked = subprocess.run(connect, stdout=subprocess.PIPE, check=True)
        complete(json.loads(asked.stdout)["base_url"])
    finally:
        run("vec-inf", "shutdown", job)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
