"""What a terminal shows after a program has rewritten its lines.

Knows what rich's live display writes: back to the start, up, erase; colours.
"""

import re

_PART = re.compile(
    r"\x1b\[(?P<number>[0-9;?]*)(?P<command>[A-Za-z])|[\r\n]|[^\x1b\r\n]+"
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def lines(written: str) -> list[str]:
    """Lines that are left, with their colours; a part is taken to fill its line."""
    shown, row = [""], 0
    for part in _PART.finditer(written):
        text, command = part.group(), part["command"]
        if text == "\n":
            row += 1
            shown += [""] * (row + 1 - len(shown))
        elif command == "A":
            row = max(0, row - int(part["number"] or 1))
        elif command == "K":
            shown[row] = ""
        elif command == "m" or (command is None and text != "\r"):
            shown[row] += text
    return [line for line in shown if _COLOUR.sub("", line).strip()]


def left(written: str) -> list[str]:
    """Lines that are left, without colours."""
    return [_COLOUR.sub("", line).rstrip() for line in lines(written)]
