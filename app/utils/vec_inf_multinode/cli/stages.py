"""The wait for a job, shown: a line for each stage, and a live one on a terminal."""

import time
from contextlib import nullcontext
from typing import Any, Optional

from rich.console import Console
from rich.live import Live
from rich.text import Text

from .. import watch
from .common import clean_text, notes

_STYLES = {watch.READY: "bold green", watch.FAILED: "bold red"}


def seconds(number: float) -> str:
    """Seconds as a column."""
    return f"{number:7.1f} s"


class LiveLine:
    """One line on stderr that is rewritten in place; nothing where that cannot be.

    Parameters
    ----------
    console : Console
        Where it is shown.
    """

    def __init__(self, console: Console = notes):
        self.console = console
        self._text = ""
        self._since: Optional[float] = None
        self._live: Any = nullcontext()
        if console.is_terminal:
            self._live = Live(
                console=console,
                get_renderable=self._render,
                refresh_per_second=4,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )

    def __enter__(self) -> "LiveLine":
        """Start to show it."""
        self._live.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        """Take it away."""
        self._live.__exit__(*exception)

    def update(self, text: str, elapsed: Optional[float] = None) -> None:
        """Show another text, after the seconds that go on from `elapsed`."""
        self._text = text
        self._since = None if elapsed is None else time.monotonic() - elapsed

    def line(self, text: str, style: str = "") -> None:
        """Write a line that stays."""
        self.console.print(Text(clean_text(text), style=style), soft_wrap=True)

    def _render(self) -> Text:
        clock = "" if self._since is None else seconds(time.monotonic() - self._since)
        text = f"{clock}  {self._text}" if self._text else ""
        return Text(text, style="cyan", no_wrap=True, overflow="ellipsis")


class Stages:
    """Shows each `Progress` that it is given.

    Parameters
    ----------
    live : LiveLine
        Where to.
    """

    def __init__(self, live: LiveLine):
        self.live = live
        self._shown = 0
        self._last = ""

    def __call__(self, progress: watch.Progress) -> None:
        """Show it."""
        if len(progress.passed) < self._shown:
            self.live.line("the job is queued again")
            self._shown = 0
        for stage, took in progress.passed[self._shown :]:
            self.live.line(f"{seconds(took)}  {stage}")
        self._shown = len(progress.passed)
        if progress.stage in (watch.READY, *watch.OVER):
            # the cause has a message of its own
            detail = f"  {progress.detail}" if progress.stage == watch.READY else ""
            self.live.update("")
            self.live.line(
                f"{seconds(progress.seconds)}  {progress.stage}{detail}",
                _STYLES.get(progress.stage, ""),
            )
            return
        text = f"{progress.stage}: {progress.detail}".rstrip(": ")
        self.live.update(text, progress.stage_seconds)
        self._say_plainly(progress, text)

    def _say_plainly(self, progress: watch.Progress, text: str) -> None:
        # a log file gets the start of a stage, and not every line of an engine's log
        key = progress.stage if progress.stage == watch.LOADING else text
        if not self.live.console.is_terminal and key != self._last:
            self.live.line(f"{'':>9}  {text}")
        self._last = key
