"""What the commands share: exit codes, vec-inf's options, output."""

import json
from typing import Any

import click
from rich.console import Console

try:
    from vec_inf.cli._cli import launch as _launch_command
except Exception:  # another vec-inf: the seam check names it
    _launch_command = None

DONE = 0
BAD_INPUT = 2
REFUSED = 3
FAILED = 4
INTERRUPTED = 130

# Results go to stdout, everything that is said on the way to stderr.
out = Console(highlight=False)
notes = Console(stderr=True, highlight=False)


class CommandError(click.ClickException):
    """An error with one of the exit codes of this program.

    Parameters
    ----------
    message : str
        What happened, which value, what to do next.
    exit_code : int
        `BAD_INPUT`, `REFUSED` or `FAILED`.
    details : dict, optional
        More for ``--json-mode``.
    """

    def __init__(self, message: str, exit_code: int = FAILED, **details: Any):
        super().__init__(message)
        self.exit_code = exit_code
        self.details = details


def launch_options() -> list[click.Parameter]:
    """Model name and options of vec-inf's own ``launch``, ``--json-mode`` included."""
    return list(_launch_command.params) if _launch_command else []


def json_option() -> click.Parameter:
    """``--json-mode``, for a command without vec-inf's launch options."""
    return click.Option(["--json-mode"], is_flag=True, help="Output in JSON string")


def print_json(value: Any) -> None:
    """Write one JSON document to stdout."""
    click.echo(json.dumps(value, indent=2, default=str))
