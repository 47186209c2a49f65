"""What the ranks of a training run have noted: a file per rank and start, with a line for the begin of each step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from frame import NotMeasured

LOOK_S = 0.05
Found = TypeVar("Found")


def until(what: Callable[[], Found], limit_s: float, waits_for: str) -> Found:
    """What it finds, once that is something.

    Raises:
        NotMeasured: it found nothing in that time.
    """
    deadline = time.monotonic() + limit_s
    while not (found := what()):
        if time.monotonic() > deadline:
            raise NotMeasured(f"waited {limit_s:.0f} s in vain: {waits_for}")
        time.sleep(LOOK_S)
    return found


@dataclass
class Start:
    """One start of the ranks. `steps`: rank -> when it began which step."""

    name: str
    pids: dict[int, int] = field(default_factory=dict)
    steps: dict[int, list[tuple[float, int]]] = field(default_factory=dict)

    @property
    def began(self) -> float:
        return min(lines[0][0] for lines in self.steps.values())

    @property
    def first(self) -> int:
        """The first step of this start."""
        return min(lines[0][1] for lines in self.steps.values())

    def last(self, before: float = float("inf")) -> int:
        """The newest step that a rank had begun by then; 0 for none."""
        return max((step for lines in self.steps.values() for at, step in lines if at <= before), default=0)

    def all_began(self, step: int) -> bool:
        return all(lines[-1][1] >= step for lines in self.steps.values())


class Diary:
    """The starts of one run, read again where a file has grown."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.folder, self.ranks = folder, ranks
        self._read: dict[str, tuple[int, list[tuple[float, int]]]] = {}

    def starts(self) -> list[Start]:
        """Those in which every rank has begun a step, oldest first."""
        found: dict[str, Start] = {}
        for path in self.folder.glob("*.*.*"):
            size = path.stat().st_size
            if self._read.get(path.name, (0,))[0] != size:
                words = [line.split() for line in path.read_text().split("\n")[:-1]]
                self._read[path.name] = size, [(float(at), int(step)) for at, step in words]
            name, rank, pid = path.name.split(".")
            lines = self._read.get(path.name, (0, []))[1]
            if lines:
                start = found.setdefault(name, Start(name))
                start.pids[int(rank)], start.steps[int(rank)] = int(pid), lines
        whole = [start for start in found.values() if len(start.steps) == self.ranks]
        return sorted(whole, key=lambda start: start.began)
