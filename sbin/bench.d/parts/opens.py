"""Files opened and bytes read below some folders, out of strace's files (`strace -ff -ttt -y`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_OPENED = re.compile(r"(?P<time>[0-9.]+) open(?:at)?\(.* = [0-9]+<(?P<path>[^>]*)>")
_READ = re.compile(r"(?P<time>[0-9.]+) p?read(?:64)?\([0-9]+<(?P<path>[^>]*)>.* = (?P<bytes>[0-9]+)")


@dataclass(frozen=True)
class Counted:
    """Opens of files that exist, and bytes that read(2) and pread(2) returned (pages of mapped libraries are not seen)."""

    opens: int
    read_bytes: int


def count(traces: Sequence[Path], folders: Sequence[str], until: float) -> Counted:
    """What all processes of the traces did below `folders` up to the moment `until`, in seconds since 1970."""
    opens = read_bytes = 0
    prefixes = tuple(f"{folder}/" for folder in folders)
    for trace in traces:
        with trace.open(errors="replace") as lines:
            for line in lines:
                match = _OPENED.match(line) or _READ.match(line)
                if match is None or not match["path"].startswith(prefixes) or float(match["time"]) > until:
                    continue
                if "bytes" in match.re.groupindex:
                    read_bytes += int(match["bytes"])
                else:
                    opens += 1
    return Counted(opens, read_bytes)
