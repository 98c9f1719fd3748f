"""The program: its commands, and one way from an error to an exit code."""

import sys
from typing import Any, Optional

import click

from .. import seam
from ..errors import MultinodeError, SlurmJobError, SubmitError
from ..version import __version__
from . import common

PROGRAM = "vec-inf-multinode"


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="list, status, metrics, shutdown and cleanup are vec-inf's own: see "
    "'vec-inf --help'. Exit status: 0 done, 2 bad input, 3 refused, 4 failed on the "
    "cluster, 130 interrupted.",
)
@click.version_option(__version__)
def cli() -> None:
    """Serve vLLM models over several Slurm nodes through vec-inf, without Ray."""
    report = seam.inspect_vec_inf(seam.MEMBERS + seam.CLI_MEMBERS)
    if not report.ok:
        raise common.CommandError(report.message(), common.REFUSED)


def exit_code(err: Exception) -> int:
    """Exit status for an error that a command raised."""
    if isinstance(err, SubmitError):  # it was queued
        return common.FAILED
    refusals = (MultinodeError, SlurmJobError, ValueError, OSError)
    if isinstance(err, (*refusals, *common.VEC_INF_REFUSALS)):
        return common.REFUSED
    return common.FAILED


def main(args: Optional[list[str]] = None) -> None:
    """Run the program and leave with its exit status."""
    given = sys.argv[1:] if args is None else args
    try:
        with common.plain_warnings():
            status: Any = cli.main(given, PROGRAM, standalone_mode=False)
        sys.exit(status if isinstance(status, int) else common.DONE)
    except (KeyboardInterrupt, click.Abort):
        common.say("Interrupted.")
        sys.exit(common.INTERRUPTED)
    except click.ClickException as err:
        _report(err.format_message(), err.exit_code, given, err)
    except Exception as err:
        # a KeyError's own text is quoted
        text = err.args[0] if isinstance(err, KeyError) and err.args else err
        _report(common.clean_text(str(text)), exit_code(err), given, err)


def _report(text: str, status: int, given: list[str], err: Exception) -> None:
    """Say what happened, as JSON if that was asked for, and leave."""
    if "--json-mode" in given:
        details = getattr(err, "details", {})
        kind = type(err).__name__
        error = {"kind": kind, "message": text, "exit_code": status, **details}
        common.print_json({"error": error})
    elif isinstance(err, click.ClickException):
        err.show()
    else:
        common.say(f"Error: {text.removeprefix('Error: ')}", style="red")
    sys.exit(status)
