"""``vec-inf-multinode``: plan, serve, connect, run and diagnose at the shell.

One module a command, each a function of click's; what they share is in `common`.
"""

from . import connect, diagnose, launch, render, run, serve  # each adds its command
from .main import main

__all__ = ["connect", "diagnose", "launch", "main", "render", "run", "serve"]
