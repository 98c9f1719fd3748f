"""What interrupts a command: Ctrl-C, TERM, and HUP when the connection is lost."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def ignore() -> None:
    """Hear none of them from here on."""
    for other in STOPPING:
        signal.signal(other, signal.SIG_IGN)


def _interrupt(number: int, frame: Any) -> None:
    # one is enough: the next must not cut short what the first has set off
    ignore()
    raise KeyboardInterrupt(signal.Signals(number).name)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let TERM and HUP end what runs inside as Ctrl-C does, once.

    What is ignored stays so: ``nohup`` keeps its meaning.
    """
    before = {number: signal.getsignal(number) for number in STOPPING}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def allow_another() -> None:
    """Let Ctrl-C interrupt once more."""
    signal.signal(signal.SIGINT, _interrupt)


@contextmanager
def held() -> Iterator[Callable[[], None]]:
    """Let no such signal through, here or in a command that is run, until released.

    Yields a function that lets them through; what came meanwhile is raised by it.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    # a shell drops the mask that it inherits, but ignores on what was ignored; what is
    # blocked here stays pending all the same
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in STOPPING}

    def release() -> None:
        while handlers:
            signal.signal(*handlers.popitem())
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    try:
        yield release
    finally:
        release()
