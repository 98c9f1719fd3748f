"""``render``: what a launch would submit."""

import shlex
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from ..launcher import MultinodeClient
from ..preview import Preview, Setting
from .common import LaunchOptions, clean_text, launch_options, out, print_json
from .main import cli


@cli.command(
    "render",
    params=[
        *launch_options(),
        click.Option(["--script"], is_flag=True, help="Print the batch script too"),
        click.Option(
            ["--show-secrets"], is_flag=True, help="Show the values of env, too"
        ),
    ],
)
def render(
    model_name: str, json_mode: bool, script: bool, show_secrets: bool, **given: Any
) -> None:
    """Show what launch would submit. Submits nothing, writes nothing, needs no Slurm.

    \b
    Example:
      vec-inf-multinode render tiny-llama --num-nodes 2 --script
    """
    preview = MultinodeClient().preview_model(
        model_name, LaunchOptions(**given), show_secrets=show_secrets
    )
    if json_mode:
        print_json(as_json(preview, script))
        return
    out.print(table(preview))
    if script:
        click.echo(preview.script)


def as_json(preview: Preview, script: bool) -> dict[str, Any]:
    """The document of ``--json-mode``."""
    document = asdict(preview)
    if not script:
        del document["script"]
    return document


def table(preview: Preview) -> Table:
    """Everything but the script."""
    whose = "multi-node" if preview.multinode else "vec-inf's own launch"
    title = Text(clean_text(f"{preview.model_name}: {whose}"), style="bold")
    grid = Table(
        title=title,
        caption=Text(clean_text(preview.reason)),
        title_justify="left",
        caption_justify="left",
        show_header=True,
        header_style="dim",
    )
    for heading in ("", "value", "from"):
        # whole values, to be copied
        grid.add_column(heading, overflow="fold")
    _section(grid, preview.resources)
    _section(grid, preview.parallelism)
    _section(grid, preview.engine_args)
    _section(grid, (_env(setting) for setting in preview.env))
    left_out = ", ".join(preview.left_out_env)
    _section(
        grid, [Setting("env left out", left_out, "set by each rank")] * bool(left_out)
    )
    _section(grid, preview.knobs)
    if preview.container:
        command = shlex.join(preview.container)
        _section(grid, [Setting("container", command, "site")])
    return grid


def _env(setting: Setting) -> Setting:
    return Setting(f"env {setting.name}", setting.value, setting.origin)


def _section(grid: Table, settings: Iterable[Setting]) -> None:
    for setting in settings:
        cells = (setting.name, setting.value, setting.origin)
        grid.add_row(*(Text(clean_text(cell)) for cell in cells))
    grid.add_section()
