"""The ranks' logs of a run as one text: in the order of time, with rank and host in front, what repeats only once.

The times of lines come from rank-<n>.times beside each log (hpc/node/streams.py), exact to half a second and by the clock of
rank zero's node; a log without one counts as written when its attempt began. Files are read while ranks write them.
"""

from __future__ import annotations

import bisect
import heapq
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc.errors import UsageError, printable
from hpc.ranks import ranges
from hpc.rundir import RunDirectory, read_error_file

LINE_LIMIT = 8192
"""Bytes of a line that is shown as one."""
TOGETHER_S = 2.0
"""Ranks that print the same within this time are shown on one line."""
PENDING_LIMIT = 2000
READ_EVERY_S = 0.5
REST = 4.0
"""Following rests so many times as long as looking took: the logs of thousands of ranks are as many files to be opened."""
_CHUNK = 1 << 16
_LAST_MOMENT = 1e11
"""In the year 5138: a record that tells of a later one is damaged."""
_BREAK = re.compile(rb"\r\n|\n|\r")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Which logs: None for all of them."""

    ranks: frozenset[int] | None = None
    attempt: int | None = None


@dataclass(frozen=True)
class Line:
    """One line of a rank; rank -1: of ours, about the attempt."""

    time: float
    rank: int
    text: str


@dataclass
class Entry:
    """A line as it is shown: printed by one rank or by several."""

    number: int
    line: Line
    times_of: dict[int, int] = field(default_factory=dict)
    """How often each rank has printed it."""

    def shown(self, hosts: Mapping[int, str]) -> str:
        """The line with rank and host in front."""
        if self.line.rank < 0:
            return self.line.text
        ranks = sorted(self.times_of)
        where = list(dict.fromkeys(hosts[rank] for rank in ranks if rank in hosts))
        host = f" {where[0]}" if len(where) == 1 else (f" on {len(where)} hosts" if where else "")
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranges(ranks)}"
        most = max(self.times_of.values())
        again = f"  (x {most})" if most > 1 else ""
        return f"[{who}{host}] {self.line.text}{again}"


class RankLog:
    """One rank's log of one attempt, read on from where the last call has ended."""

    def __init__(self, path: Path, rank: int, began: float) -> None:
        self.path, self.rank, self._began = path, rank, began
        self._position, self._partial = 0, b""
        self._sizes: list[int] = []
        self._times: list[float] = []
        self._times_read = 0
        self._last_time = began

    def lines(self, *, final: bool) -> Iterator[Line]:
        """Whole lines that are new; with `final` also one at the end that has no line break."""
        while True:
            data = _read(self.path, self._position)
            if data:
                self._read_times()  # after the log: a time is written before its lines
            begin = self._position - len(self._partial)
            self._position += len(data)
            text = self._partial + data
            at_end = len(data) < _CHUNK
            texts, self._partial = _split(text, keep=not (final and at_end))
            for offset, line in texts:
                yield Line(self._time_of(begin + offset), self.rank, printable(_decoded(line)))
            if at_end:
                return

    def _time_of(self, offset: int) -> float:
        index = bisect.bisect_right(self._sizes, offset) - 1
        self._last_time = max(self._last_time, self._times[index] if index >= 0 else self._began)
        return self._last_time

    def _read_times(self) -> None:
        while data := _read(self.path.with_suffix(".times"), self._times_read):
            whole = data[: data.rfind(b"\n") + 1]
            if not whole:
                return
            self._times_read += len(whole)
            for line in whole.split(b"\n")[:-1]:
                moment, _, size = line.partition(b" ")
                try:
                    self._times.append(float(moment))
                    self._sizes.append(max(int(size), self._sizes[-1] if self._sizes else 0))
                except ValueError:
                    del self._times[len(self._sizes) :]


def _split(text: bytes, *, keep: bool) -> tuple[list[tuple[int, bytes]], bytes]:
    """The lines of a text with their places, and the rest that is no whole line (`keep`), cut where it is too long.

    A progress bar ends each of its states with a carriage return: the last one stands for all.
    """
    lines: list[tuple[int, bytes]] = []
    begin = 0
    for match in _BREAK.finditer(text):
        if match[0] == b"\r" and match.end() == len(text) and keep:
            break  # perhaps half of "\r\n"
        if match[0] != b"\r" or text[match.end() : match.end() + 1] == b"":
            lines.append((begin, text[begin : match.start()]))
        begin = match.end()
    rest = text[begin:]
    if rest and (not keep or len(rest) > LINE_LIMIT):
        lines.append((begin, rest))
        rest = b""
    cut = [(at + i, line[i : i + LINE_LIMIT]) for at, line in lines for i in range(0, len(line) or 1, LINE_LIMIT)]
    return cut, rest


def _decoded(line: bytes) -> str:
    return line.decode("utf-8", "backslashreplace").expandtabs()


def _read(path: Path, position: int) -> bytes:
    """At most _CHUNK bytes from this position on; nothing when the file cannot be read (yet)."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.pread(descriptor, _CHUNK, position)
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def collapse(lines: Iterable[Line]) -> Iterator[Entry]:
    """Lines in the order of time, those of several ranks together that say the same; each rank's own order is kept."""
    pending: list[Entry] = []
    newest: dict[str, Entry] = {}  # of those that are pending, by text
    last: dict[int, int] = {}  # by rank: the entry of its last line
    count = 0
    for line in lines:
        while pending and (line.time - pending[0].line.time > TOGETHER_S or len(pending) > PENDING_LIMIT):
            yield _taken(pending, newest)
        entry = newest.get(line.text) if line.rank >= 0 else None
        before = last.get(line.rank, -1)
        if entry is None or entry.number < before:
            count += 1
            entry = Entry(count, line)
            pending.append(entry)
            if line.rank >= 0:
                newest[line.text] = entry
        entry.times_of[line.rank] = entry.times_of.get(line.rank, 0) + 1
        last[line.rank] = entry.number
    while pending:
        yield _taken(pending, newest)


def _taken(pending: list[Entry], newest: dict[str, Entry]) -> Entry:
    entry = pending.pop(0)
    if newest.get(entry.line.text) is entry:
        del newest[entry.line.text]
    return entry


class Printer:
    """Prints entries; one that comes again and again is printed once, and then how often it came."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._shown, self._again = "", 0

    def show(self, text: str) -> None:
        if text == self._shown and text:
            self._again += 1
            return
        self.flush()
        self._shown = text
        self._say(text)

    def flush(self) -> None:
        """Say what is held back."""
        if self._again:
            self._say(f"  (the line before, {self._again} more time{'s' if self._again > 1 else ''})")
        self._shown, self._again = "", 0


class Logs:
    """All logs of a run that are asked for."""

    def __init__(self, run: RunDirectory, asked: Asked, say: Callable[[str], None]) -> None:
        self._run, self._asked, self._say = run, asked, say
        self._printer = Printer(say)
        self._files: dict[int, dict[int, RankLog]] = {}
        self._headed: set[tuple[int, int]] = set()

    def show(self, *, final: bool) -> bool:
        """Print what is new; whether there was anything. `final`: no more will come of what is there."""
        events = list(self._run.events())
        attempts = _attempts(self._run, events, self._asked)
        some = False
        for attempt in attempts:
            began, hosts = _starts(events, attempt)
            files = self._files.setdefault(attempt, {})
            for rank in _ranks(self._run.attempt(attempt), self._asked):
                if rank not in files:
                    path = self._run.attempt(attempt) / f"rank-{rank}.log"
                    files[rank] = RankLog(path, rank, began[0][1] if began else 0.0)
            ends = final or attempt != attempts[-1]
            parts = [
                self._headings(attempt, began or [(0, 0.0, "")][: len(files)]),
                *(files[rank].lines(final=ends) for rank in sorted(files)),
            ]
            for entry in collapse(heapq.merge(*parts, key=lambda line: line.time)):
                some = True
                self._printer.show(entry.shown(hosts))
        if final or not some:
            self._printer.flush()
        return some

    def _headings(self, attempt: int, began: Sequence[tuple[int, float, str]]) -> Iterator[Line]:
        """A line before each start of the attempt."""
        for restart, moment, where in began:
            if (attempt, restart) in self._headed:
                continue
            self._headed.add((attempt, restart))
            name = f"attempt {attempt}" + (f", restart {restart}" if restart else "")
            when = time.strftime(", began %Y-%m-%d %H:%M:%S", time.localtime(moment)) if moment else ""
            yield Line(moment, -1, printable(f"==== {name}{when}{where} ===="))


def follow(run: RunDirectory, asked: Asked, say: Callable[[str], None]) -> None:
    """Print the logs as they grow, over restarts and requeues, until the run is over for good."""
    logs = Logs(run, asked, say)
    told = False
    while True:
        began = time.monotonic()
        over = _is_over(run.events())
        some = logs.show(final=over)
        took = time.monotonic() - began
        if some and took < READ_EVERY_S:
            continue
        if over and not some:
            return
        if not told and not any(run.path.glob("attempt-*/rank-*.log")):
            told = True
            say("no rank has started yet; waiting")
        time.sleep(max(READ_EVERY_S, REST * took))


def error_lines(run: RunDirectory, asked: Asked) -> Iterator[str]:
    """The verdicts of the record, and what ranks of an attempt without one have said of their errors so far."""
    events = list(run.events())
    for attempt in _attempts(run, events, asked):
        verdicts = [event for event in events if event.get("event") == "verdict" and event.get("attempt") == attempt]
        for event in verdicts:
            yield from _verdict_lines(event, asked)
        if not verdicts:
            yield from _error_files(run.attempt(attempt), attempt, asked)


def _verdict_lines(event: Mapping[str, Any], asked: Asked) -> Iterator[str]:
    rank, restart = event.get("rank"), event.get("restart")
    if asked.ranks is not None and not (isinstance(rank, int) and rank in asked.ranks):
        return
    start = f"attempt {event.get('attempt')}" + (f", restart {restart}" if restart else "")
    place = f", first in rank {rank} on {event.get('host')}" if isinstance(rank, int) and rank >= 0 else ""
    yield printable(f"==== {start}: {event.get('cause')}{place} ====")
    for line in str(event.get("traceback") or event.get("message") or "").rstrip("\n").split("\n"):
        yield printable(line.expandtabs())
    groups = event.get("alike")
    for group in groups if isinstance(groups, list) else ():
        if isinstance(group, dict):
            said = "the same" if group.get("same") else str(group.get("message", "")).split("\n")[0]
            yield printable(f"[ranks {group.get('ranks')}] {said}")
    if event.get("stacks"):
        yield printable(f"stacks: {event['stacks']}")
    yield printable(f"next: {event.get('next')}")


def _error_files(folder: Path, attempt: int, asked: Asked) -> Iterator[str]:
    found: dict[str, list[int]] = {}
    for path in folder.glob("error-*.json"):
        rank = path.name.removeprefix("error-").removesuffix(".json")
        if rank.isdecimal() and (asked.ranks is None or int(rank) in asked.ranks):
            message, trace, _ = read_error_file(path)
            found.setdefault(trace or message, []).append(int(rank))
    for text, ranks in sorted(found.items(), key=lambda item: min(item[1])):
        yield f"==== attempt {attempt}: rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)} ===="
        for line in text.rstrip("\n").split("\n"):
            yield printable(line.expandtabs())


def _attempts(run: RunDirectory, events: Iterable[Mapping[str, Any]], asked: Asked) -> list[int]:
    """The attempts that have a folder, and those of which only the record tells; oldest first."""
    found = {int(name) for path in run.path.glob("attempt-*") if (name := path.name[8:]).isdecimal()}
    found |= {event["attempt"] for event in events if type(event.get("attempt")) is int}
    return sorted(attempt for attempt in found if asked.attempt in (None, attempt))


def _ranks(folder: Path, asked: Asked) -> list[int]:
    names = [path.name[5:-4] for path in folder.glob("rank-*.log")]
    ranks = [int(name) for name in names if name.isdecimal()]
    return [rank for rank in ranks if asked.ranks is None or rank in asked.ranks]


def _starts(events: Iterable[Mapping[str, Any]], attempt: int) -> tuple[list[tuple[int, float, str]], dict[int, str]]:
    """The starts of an attempt (restart, when, where in words), and the host of each rank."""
    starts: list[tuple[int, float, str]] = []
    hosts: dict[int, str] = {}
    for event in events:
        if event.get("event") != "started" or event.get("attempt") != attempt:
            continue
        moment, restart, nodes = event.get("time"), event.get("restart"), event.get("nodes")
        places = (
            [place for place in nodes if isinstance(place, list) and len(place) == 3] if isinstance(nodes, list) else []
        )
        for host, first, workers in places:
            if type(first) is int and type(workers) is int and workers <= 4096:
                hosts.update(dict.fromkeys(range(first, first + workers), printable(str(host))))
        names = list(dict.fromkeys(str(place[0]) for place in places))
        where = f" on {', '.join(names)}" if 0 < len(names) <= 4 else (f" on {len(names)} hosts" if names else "")
        job = f", job {event['job_id']}" if event.get("job_id") else ""
        number = restart if type(restart) is int else (starts[-1][0] + 1 if starts else 0)
        known = isinstance(moment, int | float) and 0 <= moment < _LAST_MOMENT
        starts.append((number, float(moment or 0) if known else 0.0, f"{where}{job}"))
    return starts, hosts


def _is_over(events: Iterable[Mapping[str, Any]]) -> bool:
    """Whether nothing more will come, by the last word of the record: it finished, or was given up."""
    over = False
    for event in events:
        kind = event.get("event")
        if kind == "started":
            over = False
        elif kind == "ended":
            over = event.get("code") == 0
        elif kind == "verdict":
            over = str(event.get("next", "")).startswith(("given up", "nothing by itself"))
    return over


def parse_ranks(text: str) -> frozenset[int]:
    """ "3" or "0-3,7".

    Raises:
        UsageError: it is no list of ranks.
    """
    ranks: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,7})(?:-(\d{1,7}))?", part.strip())
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise UsageError(f"--rank {text!r} is no list of ranks; needs numbers as in 3 or 0-3,7")
        ranks.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(ranks)


def open_run(path: Path) -> RunDirectory:
    """The run at this path, for reading.

    Raises:
        UsageError: there is none.
    """
    run = RunDirectory(Path(os.path.abspath(path)))
    if run.record_file.is_file() or any(run.path.glob("attempt-*")):
        return run
    elements = sorted(record.parent.name for record in run.path.glob("array-*/record.jsonl"))
    hint = f"; it is an array: give one of {', '.join(elements[:3])}" if elements else ""
    raise UsageError(f"{path} has no logs of ranks; a run directory was needed, such as runs/digits-...{hint}")
