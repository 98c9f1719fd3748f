"""How far a run is: a bar on a terminal, a plain line now and then elsewhere."""

import threading
import time
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from ..results import Tally

LINE_EVERY = 10.0


class RunProgress:
    """Show a tally that grows, while in the ``with`` block.

    Parameters
    ----------
    console : Console
        Where to.
    total : int
        Number of requests.
    tally : Tally
        The results so far; read again at each turn.
    """

    def __init__(self, console: Console, total: int, tally: Tally):
        self.console, self.total, self.tally = console, total, tally
        self.first = replace(tally)
        self.started = time.monotonic()
        self._over = threading.Event()
        self._bar = Progress(
            TextColumn("requests"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[failed]} failed"),
            TextColumn("{task.fields[rate]:.0f} tokens/s"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(
            "", total=total, completed=tally.done, **self._fields()
        )
        self._lines = threading.Thread(target=self._say_lines, daemon=True)

    def __enter__(self) -> "RunProgress":
        """Begin to show."""
        self._bar.start()
        if not self.console.is_terminal:
            self._lines.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Leave the last state on the screen."""
        self._over.set()
        self.update()
        self._bar.stop()

    def update(self) -> None:
        """Take over the tally."""
        self._bar.update(self._task, completed=self.tally.done, **self._fields())

    def rate(self) -> float:
        """Tokens a second since the start: generated ones, or read ones if none are."""
        generated = self.tally.completion_tokens - self.first.completion_tokens
        read = self.tally.prompt_tokens - self.first.prompt_tokens
        return (generated or read) / max(time.monotonic() - self.started, 0.001)

    def line(self) -> str:
        """The state as one line."""
        done, elapsed = self.tally.done, time.monotonic() - self.started
        text = f"{done} of {self.total} requests done, {self.tally.failed} failed"
        if done > self.first.done:
            left = elapsed / (done - self.first.done) * (self.total - done)
            text += f", {self.rate():.0f} tokens/s, about {left:.0f} s left"
        return text

    def _fields(self) -> dict[str, Any]:
        return {"failed": self.tally.failed, "rate": self.rate()}

    def _say_lines(self) -> None:
        while not self._over.wait(LINE_EVERY):
            self.console.print(self.line(), markup=False)
