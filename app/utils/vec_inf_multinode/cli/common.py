"""What the commands share: exit codes, vec-inf's options, output."""

import json
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console

from ..jobdir import clean_line

try:
    from vec_inf.cli._cli import launch as _launch_command
    from vec_inf.client._exceptions import (
        ModelConfigurationError,
        ModelNotFoundError,
        ServerError,
    )
    from vec_inf.client.models import LaunchOptions
except Exception:  # another vec-inf: the seam check names what is missing
    _launch_command = None

    class LaunchOptions:  # type: ignore[no-redef]
        """Stand-in, which no command reaches."""

    class ModelConfigurationError(Exception):  # type: ignore[no-redef]
        """The same."""

    class ModelNotFoundError(KeyError):  # type: ignore[no-redef]
        """The same."""

    class ServerError(Exception):  # type: ignore[no-redef]
        """The same."""


DONE = 0
BAD_INPUT = 2
REFUSED = 3
FAILED = 4
INTERRUPTED = 130

# What vec-inf refuses with, besides ValueError and OSError.
VEC_INF_REFUSALS = (ModelConfigurationError, ModelNotFoundError)

# Results go to stdout, everything that is said on the way to stderr.
out = Console(highlight=False)
notes = Console(stderr=True, highlight=False)

_JOB_ID = re.compile(r"[0-9]+")


class CommandError(click.ClickException):
    """An error with one of the exit codes of this program.

    Parameters
    ----------
    message : str
        What happened, which value, what to do next; it may quote a log.
    exit_code : int
        `BAD_INPUT`, `REFUSED`, `FAILED` or `INTERRUPTED`.
    details : dict, optional
        More for ``--json-mode``.
    """

    def __init__(self, message: str, exit_code: int = FAILED, **details: Any):
        super().__init__(clean_text(message))
        self.exit_code = exit_code
        self.details = details

    def show(self, file: Any = None) -> None:
        """Write it to stderr; an interruption is what was asked for, and no error."""
        prefix = "" if self.exit_code == INTERRUPTED else "Error: "
        say(f"{prefix}{self.format_message()}")


class _JobId(click.ParamType):
    """Slurm's id of a job: vec-inf hands it to a shell."""

    name = "job id"

    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        """Refuse what is no number."""
        if not _JOB_ID.fullmatch(str(value)):
            self.fail(f"{str(value)!r:.80} is not Slurm's id of a job", param, ctx)
        return str(value)


def job_argument() -> click.Parameter:
    """``JOB_ID``."""
    return click.Argument(["job_id"], type=_JobId())


def launch_options() -> list[click.Parameter]:
    """Model name and options of vec-inf's own ``launch``, ``--json-mode`` included."""
    return list(_launch_command.params) if _launch_command else []


def json_option() -> click.Parameter:
    """``--json-mode``, for a command without vec-inf's launch options."""
    return click.Option(["--json-mode"], is_flag=True, help="Output in JSON string")


def clean_text(text: str) -> str:
    """Lines that a terminal can be given."""
    return "\n".join(clean_line(line).rstrip() for line in text.splitlines())


def say(text: str, **style: Any) -> None:
    """Write lines to stderr; nobody may be there to read them any more."""
    try:
        notes.print(clean_text(text), markup=False, soft_wrap=True, **style)
    except OSError:
        pass


def show_warning(message: Any, *args: Any, **kwargs: Any) -> None:
    """Show a warning of vec-inf's as a line, without the place in its source."""
    say(f"Warning: {str(message).removeprefix('WARNING: ').removeprefix('Warning: ')}")


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Let warnings be lines on stderr."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = show_warning
        yield


def print_json(value: Any) -> None:
    """Write one JSON document to stdout."""
    click.echo(json.dumps(value, indent=2, default=str))
