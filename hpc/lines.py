"""Values through the screen of a job step: one message in lines that srun cannot tear.

srun hands on at most 1024 bytes at once: of a longer line the rest comes as a line of its own, and those of other tasks
come between (seen with 22.05.8). So a message is cut into pieces, each a line with its sender and its number.
"""

from __future__ import annotations

import json
from typing import Any

MARK = "hpc-message"
PIECE = 700
_MOST = 4096


def pieces(sender: str, message: dict[str, Any]) -> bytes:
    """The lines of one message; `sender` has no blanks, and sends one message at a time."""
    text = json.dumps(message)
    parts = [text[start : start + PIECE] for start in range(0, len(text), PIECE)]
    lines = [f"{MARK} {sender} {number}/{len(parts)} {part}\n" for number, part in enumerate(parts, 1)]
    return "".join(lines).encode()


class Collector:
    """Puts messages together again from the lines of all senders, whatever stands before them."""

    def __init__(self) -> None:
        self._parts: dict[str, list[str]] = {}

    def add(self, line: bytes) -> dict[str, Any] | None:
        """The message that this line completes; None for any other line."""
        _, mark, rest = line.decode("utf-8", "replace").partition(f"{MARK} ")
        words = rest.split(" ", 2)
        if not mark or len(words) != 3:
            return None
        sender, counted, part = words
        number, _, total = counted.partition("/")
        if not number.isdecimal() or not total.isdecimal() or len(total) > 4 or int(total) > _MOST:
            return None
        parts = self._parts.setdefault(sender, [])
        if int(number) == 1:
            parts.clear()
        parts.append(part.rstrip("\r\n"))
        if len(parts) != int(number) or int(number) != int(total):
            return None
        del self._parts[sender]
        try:
            message = json.loads("".join(parts))
        except ValueError:
            return None
        return message if isinstance(message, dict) else None
