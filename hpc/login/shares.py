"""What the time of a run was used for, from its record alone. Pure; any event may be missing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass
class Shares:
    """Seconds of a run's life, from its submission (or first sign of life) to its last sign of life."""

    productive: float = 0.0
    """Steps that were kept."""
    start_up: float = 0.0
    """From the controller's first line, or the decision to start again, to the first step."""
    recomputed: float = 0.0
    """Steps that were lost, and so made again."""
    saving: float = 0.0
    """Training stood still for a save, or waited for the last one."""
    waiting: float = 0.0
    """In the queue."""
    other: float = 0.0
    """Pauses before a restart, and the way from the last step to the end."""

    @property
    def whole(self) -> float:
        return float(sum(getattr(self, part.name) for part in fields(self)))

    def line(self) -> str:
        """ "productive 71 %, start-up 12 %, ..."; what is nothing is left out, but for the first."""
        whole = self.whole or 1.0
        parts = [(part.name.replace("_", "-"), 100 * getattr(self, part.name) / whole) for part in fields(self)]
        return ", ".join(f"{name} {percent:.0f} %" for name, percent in parts if percent >= 0.5 or name == "productive")


@dataclass
class _Start:
    """One start of the step, as far as the record tells of it."""

    attempt: int
    began: float
    seen: float
    """The last sign of life."""
    ended: float | None = None
    resumed: int | None = None
    first_step: float | None = None
    stopping: float | None = None
    steps: list[int] = field(default_factory=list)
    saves: list[tuple[float, float]] = field(default_factory=list)
    """When each was durable, and how long training stood still for it."""

    @property
    def end(self) -> float:
        return self.seen if self.ended is None else self.ended


def shares(events: Iterable[Mapping[str, Any]]) -> Shares | None:
    """The shares of a training run; None when no rank of the training core has told anything (a script, or nothing yet)."""
    starts: dict[tuple[int, int], _Start] = {}
    submitted: float | None = None
    told = False
    for event in events:
        kind, moment = event.get("event"), _number(event.get("time"))
        if moment is None:
            continue
        if kind == "submitted" and submitted is None:
            submitted = moment
        if kind not in _OF_A_START or (kind == "ended" and event.get("started") is False):
            continue
        key = (int(_number(event.get("attempt")) or 0), int(_number(event.get("restart")) or 0))
        start = starts.setdefault(key, _Start(key[0], moment, moment))
        start.seen = max(start.seen, moment)
        told = told or kind in _OF_THE_CORE
        _note(start, str(kind), moment, event)
    if not told:
        return None
    return _add_up(sorted(starts.values(), key=lambda start: start.began), submitted)


_OF_THE_CORE = ("resumed", "first_step", "saved", "stopping")
_OF_A_START = ("started", "ending", "ended", *_OF_THE_CORE)


def _note(start: _Start, kind: str, moment: float, event: Mapping[str, Any]) -> None:
    step = _number(event.get("last_step" if kind == "ended" else "step"))
    if kind == "started":
        start.began = min(start.began, _number(event.get("began")) or moment)
    elif kind == "ended":
        start.ended = moment
    elif kind == "resumed":
        start.resumed = None if step is None else int(step)
    elif kind == "first_step":
        start.first_step = moment
    elif kind == "saved":
        start.saves.append((moment, max(0.0, _number(event.get("stall_s")) or 0.0)))
    elif kind == "stopping":
        start.stopping = moment
    if step is not None:
        start.steps.append(int(step))


def _add_up(starts: Sequence[_Start], submitted: float | None) -> Shares:
    sums = Shares()
    before = starts[0].began if submitted is None else min(submitted, starts[0].began)
    attempt = None
    for index, start in enumerate(starts):
        gap = max(0.0, start.began - before)
        if start.attempt == attempt:
            sums.other += gap
        else:
            sums.waiting += gap
        before, attempt = max(before, start.end), start.attempt
        begin = max(start.began, before - max(0.0, start.end - start.began))
        _split(start, begin, _resumed_next(starts[index + 1 :]), sums)
    return sums


def _split(start: _Start, begin: float, resumed_next: int | None, sums: Shares) -> None:
    """Add the seconds of one start to the sums."""
    end = max(begin, start.end)
    if start.first_step is None:
        sums.start_up += end - begin
        return
    first = min(max(begin, start.first_step), end)
    sums.start_up += first - begin
    stop = end if start.stopping is None else min(max(first, start.stopping), end)
    after = [moment for moment, _ in start.saves if stop < moment <= end]
    last_save = (max(after) - stop) if after else 0.0
    sums.saving += last_save
    sums.other += end - stop - last_save
    stalls = min(stop - first, sum(stall for moment, stall in start.saves if moment <= stop))
    sums.saving += stalls
    running = stop - first - stalls
    steps = max(start.steps, default=0)
    made = steps - (start.resumed if start.resumed is not None else min(start.steps, default=0))
    lost = 0 if resumed_next is None else max(0, steps - resumed_next)
    share = min(1.0, lost / made) if made > 0 else 0.0
    sums.recomputed += running * share
    sums.productive += running * (1.0 - share)


def _resumed_next(starts: Sequence[_Start]) -> int | None:
    return next((start.resumed for start in starts if start.resumed is not None), None)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
