"""What the record of a run tells: its starts, how each ended, and what its time was used for.

The record may be torn at any byte and lack any event: what is not known is shown as "?".
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc import exitcodes
from hpc.errors import UsageError
from hpc.login.paces import pace_lines
from hpc.login.shares import shares
from hpc.rundir import RunDirectory

_LAST_MOMENT = 1e11
"""In the year 5138: a record that tells of a later one is damaged."""
HEADINGS = ("attempt", "began", "ran", "hosts", "steps", "exit", "how it ended")


@dataclass
class Start:
    """One start of the step: ranks that ran, or that never did."""

    attempt: int
    restart: int = 0
    began: float | None = None
    """When its ranks started, in seconds since 1970; None when they never did."""
    ended: float | None = None
    hosts: tuple[str, ...] = ()
    code: int | None = None
    cause: str = ""
    decision: str = ""
    steps: tuple[int, int] | None = None
    requeued: bool = False


def starts_of(events: Iterable[Mapping[str, Any]]) -> list[Start]:
    """The starts that the events tell of, in their order."""
    starts: list[Start] = []
    for event in events:
        kind, attempt, moment = event.get("event"), _integer(event.get("attempt")), event.get("time")
        moment = float(moment) if isinstance(moment, int | float) and 0 <= moment < _LAST_MOMENT else None
        last = starts[-1] if starts else None
        if kind == "started":
            starts.append(Start(attempt=attempt or 0, began=moment, hosts=_hosts(event.get("nodes"))))
            restart = _integer(event.get("restart"))
            if restart is not None:
                starts[-1].restart = restart
            elif last is not None and last.attempt == attempt:
                starts[-1].restart = last.restart + 1
        elif kind == "ended":
            if last is None or last.code is not None or last.attempt != attempt or event.get("started") is False:
                last = Start(attempt=attempt or 0)
                starts.append(last)
            last.ended, last.code = moment, _integer(event.get("code"))
            last.restart = _integer(event.get("restart")) or last.restart
            last.cause = _cause(event)
            last.steps = _steps(event)
        elif kind == "ending" and last is not None and last.code is None and last.attempt == attempt:
            last.ended, last.cause = moment, f"Slurm ended the job itself ({event.get('by_slurm')})"
            last.requeued = event.get("by_slurm") == "requeued"
            last.decision = "requeue" if last.requeued else ""
        elif kind == "decided" and last is not None and last.attempt == attempt:
            last.decision = str(event.get("decision", ""))
            last.cause = str(event.get("reason") or last.cause)
            last.steps = _steps(event) or last.steps
        elif kind == "requeued" and last is not None:
            last.requeued = True
    return starts


def running_share(starts: Sequence[Start]) -> tuple[float, float] | None:
    """Seconds in which ranks ran, and seconds from the first start to the last end; None when nothing has ended."""
    began = [start.began for start in starts if start.began is not None]
    ended = [start.ended for start in starts if start.ended is not None]
    if not began or not ended or max(ended) <= min(began):
        return None
    ran = 0.0
    for start in starts:
        if start.began is not None and start.ended is not None:
            ran += max(0.0, start.ended - start.began)
    return ran, max(ended) - min(began)


def report_lines(path: Path) -> list[str]:
    """The lines to print for one run.

    Raises:
        UsageError: there is no such directory, or it has no record.
    """
    run_dir = RunDirectory(Path(os.path.abspath(path)))
    elements = sorted(run_dir.path.glob("array-*/record.jsonl"))
    if not run_dir.record_file.is_file() and not elements:
        raise UsageError(f"{path} has no record.jsonl; a run directory was needed, such as runs/digits-...")
    lines = _one_run(run_dir)
    for record in elements:
        lines += ["", *_one_run(RunDirectory(record.parent))]
    return lines


def _one_run(run_dir: RunDirectory) -> list[str]:
    events = list(run_dir.events())
    jobs = [str(event.get("job_id")) for event in events if event.get("event") == "submitted"]
    jobs += [str(event.get("new_job_id")) for event in events if event.get("event") == "continued"]
    lines = [f"{run_dir.path}" + (f", job {', '.join(jobs)}" if jobs else "")]
    starts = starts_of(events)
    if not starts:
        return [*lines, "no attempt has begun"]
    _guess_ends(starts, run_dir)
    lines += _table([HEADINGS, *(_row(start) for start in starts)])
    share = running_share(starts)
    if share is not None:
        ran, whole = share
        lines.append(f"ranks ran {100 * ran / whole:.0f} % of {_duration(whole)} between first start and last end")
    used = shares(events)
    if used is not None:
        lines.append(f"of {_duration(used.whole)} since the submission: {used.line()}")
    return [*lines, *pace_lines(events)]


def _guess_ends(starts: list[Start], run_dir: RunDirectory) -> None:
    """Where nobody was left to note the end (a killed controller), the last word in the ranks' logs stands for it."""
    for index, start in enumerate(starts):
        if start.began is None or start.ended is not None:
            continue
        following = next((other.began for other in starts[index + 1 :] if other.began is not None), None)
        words = [log.stat().st_mtime for log in run_dir.attempt(start.attempt).glob("rank-*.log")]
        last = min(max(words, default=start.began), following or float("inf"))
        start.ended = max(start.began, last)
        start.cause = "no end in the record: it runs, or its controller was killed"


def _row(start: Start) -> tuple[str, ...]:
    ran = start.ended - start.began if start.began is not None and start.ended is not None else None
    number = f"{start.attempt}" + (f", restart {start.restart}" if start.restart else "")
    steps = f"{start.steps[0]} to {start.steps[1]}" if start.steps else "?"
    words = {"again": "; started again", "requeue": "; requeued" if start.requeued else "; to come back"}
    return (
        number,
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(start.began)) if start.began is not None else "never",
        _duration(ran) if ran is not None else "-",
        _host_words(start.hosts),
        steps,
        "?" if start.code is None else str(start.code),
        start.cause + words.get(start.decision, ""),
    )


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS) - 1)]
    return ["  ".join([*(f"{cell:{w}}" for cell, w in zip(row, widths, strict=False)), row[-1]]) for row in rows]


def _cause(event: Mapping[str, Any]) -> str:
    code = _integer(event.get("code"))
    if code == exitcodes.DONE:
        return "finished"
    first = event.get("first")
    if isinstance(first, dict):
        return f"rank {first.get('rank')} on {first.get('host')}: {first.get('message')}".split("\n")[0][:120]
    return exitcodes.describe(code) if code is not None else "?"


def _steps(event: Mapping[str, Any]) -> tuple[int, int] | None:
    begin, end = _integer(event.get("steps_from")), _integer(event.get("steps_to"))
    return (begin, end) if begin is not None and end is not None else None


def _hosts(nodes: Any) -> tuple[str, ...]:
    places = nodes if isinstance(nodes, list) else []
    return tuple(dict.fromkeys(str(place[0]) for place in places if isinstance(place, list) and place))


def _host_words(hosts: Sequence[str]) -> str:
    return ",".join(hosts) if len(hosts) <= 3 else f"{hosts[0]} ... {hosts[-1]} ({len(hosts)})"


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _duration(seconds: float) -> str:
    minutes, rest = divmod(seconds, 60)
    if minutes < 1:
        return f"{seconds:.1f} s"
    hours, minutes = divmod(int(minutes), 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02.0f} s"
