"""``connect``: how to reach a model that is ready."""

import getpass
import json
import re
import shlex
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional
from urllib.parse import urlsplit

import click

from .. import slurm, watch
from ..errors import SlurmJobError
from ..jobdir import JobDirectory
from ..launcher import MultinodeClient
from .common import CommandError, clean_text, job_argument, json_option, print_json
from .main import cli

LOCAL_PORT = 8000
NO_KEY = "EMPTY"
# A reference, which the rank expands: the key is not in any file.
_REFERENCE = re.compile(r"\$(?:\{|[A-Za-z_])")

# Where vec-inf's JSON of a job may hold its key: section, name, jq's filter.
_KEY_PLACES = (
    ("env", "VLLM_API_KEY", ".env.VLLM_API_KEY"),
    ("engine_args", "--api-key", '.engine_args["--api-key"]'),
)


@dataclass(frozen=True)
class Request:
    """A request that every model of a type answers.

    Parameters
    ----------
    path : str
        Below the base URL; ``..`` leads out of ``/v1``.
    body : dict or None
        JSON, besides the model; None for a GET.
    python : str
        The same with ``openai``'s client.
    """

    path: str
    body: Optional[dict[str, Any]]
    python: str


# /v1/chat/completions needs a chat template, which a base model does not have
_COMPLETION = Request(
    "/completions",
    {"prompt": "Once upon a time", "max_tokens": 16},
    "client.completions.create(\n"
    '    model={model}, prompt="Once upon a time", max_tokens=16\n'
    ").choices[0].text",
)
_EMBEDDING = Request(
    "/embeddings",
    {"input": "Once upon a time"},
    "client.embeddings.create(\n"
    '    model={model}, input="Once upon a time"\n'
    ").data[0].embedding[:4]",
)
_MODELS = Request("/models", None, "client.models.list().data[0].id")
REQUESTS = {
    "LLM": _COMPLETION,
    "VLM": _COMPLETION,
    "Text_Embedding": _EMBEDDING,
}


@dataclass(frozen=True)
class Endpoint:
    """A served model.

    Parameters
    ----------
    job_id, model_name, model_type, base_url : str
        As vec-inf has them.
    json_path : Path
        vec-inf's JSON of the job.
    key : str or None
        The API key that it wants, None if it wants none.
    key_filter : str
        jq's filter for the key in the JSON.
    """

    job_id: str
    model_name: str
    model_type: str
    base_url: str
    json_path: Path
    key: Optional[str]
    key_filter: str

    @property
    def request(self) -> Request:
        """A request that it answers."""
        return REQUESTS.get(self.model_type, _MODELS)

    @property
    def key_command(self) -> str:
        """Shell command that prints the key."""
        return shlex.join(["jq", "-r", self.key_filter, str(self.json_path)])

    @property
    def tunnel(self) -> str:
        """Shell command for a laptop: the server at ``localhost``."""
        place = urlsplit(self.base_url)
        login = f"{getpass.getuser()}@{login_host()}"
        forward = f"{LOCAL_PORT}:{place.hostname}:{place.port}"
        return shlex.join(["ssh", "-N", "-L", forward, login])

    def curl(self) -> str:
        """Shell command for one request; the key is on no command line."""
        words = ["curl", "-sS", self.base_url + self.request.path]
        if self.request.body is not None:
            body = {"model": self.model_name, **self.request.body}
            words += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
        if self.key is None:
            return shlex.join(words)
        header = f'"Authorization: Bearer \\({self.key_filter})"'
        print_header = shlex.join(["jq", "-r", header, str(self.json_path)])
        return f"{print_header} | \\\n  {shlex.join([*words, '-H', '@-'])}"

    def python(self) -> str:
        """Python for the same request."""
        lines = ["from openai import OpenAI", ""]
        key = repr(NO_KEY)
        if self.key is not None:
            section, name, _ = next(p for p in _KEY_PLACES if p[2] == self.key_filter)
            lines.insert(0, "import json")
            lines.append(f"job = json.load(open({str(self.json_path)!r}))")
            key = f"job[{section!r}][{name!r}]"
        lines.append(f"client = OpenAI(base_url={self.base_url!r}, api_key={key})")
        answer = self.request.python.format(model=repr(self.model_name))
        lines.append(f"print({answer})")
        return "\n".join(lines)


def login_host() -> str:
    """This machine's name, as far as it is known here."""
    name = socket.getfqdn()
    return socket.gethostname() if name.startswith("localhost") else name


@cli.command(
    "connect",
    params=[
        job_argument(),
        click.Option(
            ["--env", "as_env"],
            is_flag=True,
            help="Print export lines for eval, the key included",
        ),
        click.Option(["--show-secrets"], is_flag=True, help="Show the API key"),
        json_option(),
    ],
)
def connect(job_id: str, as_env: bool, show_secrets: bool, json_mode: bool) -> None:
    """Show how to reach a model: address, key, ssh tunnel, curl, Python.

    \b
    Examples:
      vec-inf-multinode connect 12
      eval "$(vec-inf-multinode connect 12 --env)"
    """
    if as_env and json_mode:
        raise click.UsageError("--env and --json-mode exclude each other.")
    endpoint = find_endpoint(MultinodeClient(), job_id)
    if as_env:
        click.echo(environment(endpoint))
    elif json_mode:
        print_json(as_json(endpoint, show_secrets))
    else:
        click.echo(text(endpoint, show_secrets))


def find_endpoint(client: MultinodeClient, job_id: str) -> Endpoint:
    """Look a job up that should be ready.

    Raises
    ------
    CommandError
        If it is not ready, or not there any more.
    """
    try:
        status, progress = client.get_progress(job_id)
    except (SlurmJobError, OSError) as err:
        why = f"Slurm does not tell of job {job_id}: {err}"
        if isinstance(err, OSError):
            # another user's, or not one of vec-inf's
            why = f"Job {job_id} cannot be read: {err}"
        if slurm.no_such_job(str(err)):
            why = f"Slurm does not know job {job_id}, or not any more"
        raise CommandError(
            f"{why.strip()}. The jobs that are there: squeue --me",
            slurm_job_id=job_id,
            stage="gone",
        ) from None
    if progress.stage != watch.READY:
        raise CommandError(
            f"Job {job_id} is not ready: {progress.stage}"
            + (f": {progress.detail}" if progress.detail else ""),
            slurm_job_id=job_id,
            stage=progress.stage,
        )
    return endpoint_of(status, job_id)


def endpoint_of(status: Any, job_id: str) -> Endpoint:
    """The endpoint of a job that is ready."""
    directory = JobDirectory(Path(status.log_dir))
    facts = directory.facts()
    held = (
        (str(value), jq)
        for section, name, jq in _KEY_PLACES
        if (value := (facts.get(section) or {}).get(name))
    )
    key, key_filter = next(held, (None, ""))
    return Endpoint(
        job_id=job_id,
        model_name=status.model_name,
        model_type=str(facts.get("model_type", "")),
        base_url=status.base_url,
        json_path=directory.file("json"),
        key=key,
        key_filter=key_filter,
    )


def environment(endpoint: Endpoint) -> str:
    """Lines for ``eval``: what OpenAI's own libraries read."""
    key = NO_KEY if endpoint.key is None else endpoint.key
    if _REFERENCE.search(key):
        raise CommandError(
            f"The key of job {endpoint.job_id} refers to a variable of the job's own "
            f"environment; {endpoint.json_path} does not hold its value."
        )
    pairs = {"OPENAI_BASE_URL": endpoint.base_url, "OPENAI_API_KEY": key}
    return "\n".join(f"export {k}={shlex.quote(v)}" for k, v in pairs.items())


def as_json(endpoint: Endpoint, show_secrets: bool) -> dict[str, Any]:
    """The document of ``--json-mode``."""
    key: dict[str, Any] = {"required": endpoint.key is not None}
    if endpoint.key is not None:
        key |= {"file": str(endpoint.json_path), "command": endpoint.key_command}
        if show_secrets:
            key["value"] = endpoint.key
    return {
        "slurm_job_id": endpoint.job_id,
        "model_name": endpoint.model_name,
        "model_type": endpoint.model_type,
        "base_url": endpoint.base_url,
        "api_key": key,
        "tunnel": endpoint.tunnel,
        "curl": endpoint.curl(),
        "python": endpoint.python(),
    }


def text(endpoint: Endpoint, show_secrets: bool = False) -> str:
    """What ``connect`` says."""
    rows = {"Address": endpoint.base_url, "Model": endpoint.model_name}
    if endpoint.key is None:
        rows["API key"] = "none needed"
    else:
        rows["API key"] = "needed; printed by: " + endpoint.key_command
        if show_secrets:
            rows["The key"] = endpoint.key
    lines = [f"{name:<10}{clean_text(value)}" for name, value in rows.items()]
    return "\n".join(
        [
            *lines,
            "",
            f"From a laptop, where it is then http://localhost:{LOCAL_PORT}/v1:",
            "",
            endpoint.tunnel,
            "",
            "From here, with curl:",
            "",
            endpoint.curl(),
            "",
            "From here, with Python (pip install openai):",
            "",
            endpoint.python(),
        ]
    )
