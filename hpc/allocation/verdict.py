"""How one start of the step ended, as its agents and Slurm tell it, and the lines that a person gets to read."""

from __future__ import annotations

import json
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc import exitcodes
from hpc.allocation.policy import Action, Decision, Ending, killed_by
from hpc.allocation.warden import Past
from hpc.errors import printable, printable_lines
from hpc.slurm.states import JobState

_OUT_OF_MEMORY = re.compile(r"^(torch\.)?(cuda\.)?(OutOfMemoryError|MemoryError)\b|CUDA out of memory")
_NOT_FOUND = re.compile(r"never arrived|was not reached|ended before (every rank had arrived|the start)|cannot resolve")
MESSAGE_LIMIT = 2000
TRACEBACK_LIMIT = 8000
ALIKE_SHOWN = 4
"""In the record: messages and tracebacks, in characters. On the screen: groups of other ranks."""


@dataclass(frozen=True, kw_only=True)
class End:
    """One start of the step that has ended."""

    code: int
    """The first failure's, as a shell gives it; srun's where no agent could tell."""
    started: bool
    """Ranks ran."""
    reported: bool
    """The agents could say how it ended."""
    first: Mapping[str, Any] | None = None
    others: int = 0
    alike: Sequence[Mapping[str, Any]] = ()
    """The other ranks that failed by themselves, those that say the same together: "ranks", "count", "message", "same"."""
    last_step: int | None = None
    """The newest step that the heartbeats have told of; None when it is unknown."""
    orphaned: str | None = None
    """In words, that it ended since its controller was killed; None for any other end."""

    @property
    def never_started(self) -> bool:
        return self.code != exitcodes.DONE and not self.started

    @property
    def exit_code(self) -> int:
        """The exit code of a job that ends with this."""
        known = self.code in (exitcodes.UNAVAILABLE, exitcodes.BAD_ENVIRONMENT) or (self.first or {}).get("by_us")
        return self.code if not self.never_started or known else exitcodes.UNAVAILABLE


def read_end(folder: Path, code: int, *, started: bool, told: Mapping[str, Any] | None = None) -> End:
    """The end of the start whose outcome.json stands in the attempt's folder; `code` is srun's.

    `told`: the same by another way: on a full disk there are neither outcome.json nor what the record says of the start.
    Of a start that came to no ranks, what a task had against it counts before what the others say: they were ended.
    """
    started = started or bool(told and told.get("started"))
    outcome = _facts(folder / "outcome.json") or told
    if not started or outcome is None:
        refusals = [facts for path in folder.glob("error-task-*.json") if (facts := _facts(path)) is not None]
        if refusals:
            cause = min(refusals, key=lambda facts: float(facts.get("time") or 0.0))
            return End(code=int(cause.get("code") or code), started=started, reported=True, first=cause)
    if outcome is None:
        return End(code=code, started=started, reported=False)
    first = outcome.get("first")
    return End(
        code=int(outcome.get("code") or code),
        started=started,
        reported=True,
        first=first if isinstance(first, dict) else None,
        others=int(outcome.get("others", 0)),
        alike=[group for group in outcome.get("alike", ()) if isinstance(group, dict)],
        last_step=step if isinstance(step := outcome.get("last_step"), int) else None,
    )


def orphaned(end: End, past: Past, *, noticed: bool) -> End:
    """The end of a start whose controller was killed: that is its cause, unless it had one of its own.

    Without a notice ranks save and leave, too, when their step is ended.
    """
    saved, by_us = end.code == exitcodes.WANTS_ANOTHER_ATTEMPT, bool((end.first or {}).get("by_us"))
    if end.reported and (noticed if saved else not by_us):
        return end
    code = 128 + past.number
    return End(code=code, started=end.started, reported=False, last_step=end.last_step, orphaned=past.cause)


def _facts(path: Path) -> dict[str, Any] | None:
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts, dict) else None


def complain(text: str) -> None:
    """One line on stderr, after all that was said on stdout."""
    sys.stdout.flush()
    print(f"hpc.launch: {printable(text)}", file=sys.stderr, flush=True)


def hang_of(first: Mapping[str, Any]) -> str | None:
    """Which worker was ended because it was stopped or made no step, and how; None when it was for something else."""
    return f"rank {first.get('rank')} on {first.get('host')} {first.get('message')}" if first.get("hung") else None


def cause_of(end: End, ending: Ending, *, requeued: bool = False) -> str:
    """Why a start ended that was no success, in a word or two. `requeued`: Slurm has taken the job back already."""
    first, code = end.first or {}, end.code
    message = str(first.get("message") or "")
    if ending.keyboard:
        return "stopped at the keyboard"
    state = ending.state
    by_slurm = state is not None and (state.is_completing or state.is_finished) and ending.cut_short is None
    if state is JobState.CANCELLED or (by_slurm and not requeued and not ending.lost_nodes):
        return "cancelled"
    if ending.orphaned is not None:
        return ending.orphaned.partition(",")[0]
    if not end.started:
        if code == exitcodes.BAD_ENVIRONMENT:
            return "a contradiction in the environment"
        return "rendezvous failed" if _NOT_FOUND.search(message) else "never started"
    if ending.hung:
        return "hang"
    if first.get("oom"):
        return "out of memory"
    by_signal = killed_by(code)
    if (
        code == exitcodes.WANTS_ANOTHER_ATTEMPT
        or first.get("by_us")
        or (by_signal and code - 128 in ending.notice_signals)
    ):
        return _notice(ending)
    if ending.lost_nodes or first.get("silent"):
        return "node lost"
    if code == exitcodes.UNAVAILABLE:
        return "an agent or its node lost" if message.startswith("the agent on") else "rendezvous failed"
    if by_signal or first.get("loader_killed"):
        return f"killed by {by_signal}" if by_signal else "a data-loader process killed"
    if not end.reported:
        return "lost with its step"
    if _OUT_OF_MEMORY.search(message):
        return "out of memory"
    return "exception" if message and message != exitcodes.describe(code) else exitcodes.describe(code)


def _notice(ending: Ending) -> str:
    if ending.preempted or ending.cut_short == "preemption":
        return "preempted"
    if any("time limit" in (text or "") for text in (ending.cut_short, ending.notice)):
        return "out of time"
    return f"ended by {ending.cut_short or ending.notice or 'a signal'}"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is said of an end that is no success: why, who was first, what comes next, and where to look further."""

    end: End
    cause: str
    attempt: int
    restart: int
    folder: Path
    """The attempt's."""
    comes_next: str
    heard: str | None = None
    """The last signal that came to the batch step."""

    @property
    def start(self) -> str:
        return f"attempt {self.attempt}" + (f", restart {self.restart}" if self.restart else "")

    @property
    def look(self) -> str:
        """The command with which to look further."""
        first = self.end.first or {}
        rank = first.get("rank")
        one = f" --rank {rank}" if isinstance(rank, int) and rank >= 0 and self.end.started else ""
        return f"python -m hpc.logs {shlex.quote(str(self.folder.parent))} --attempt {self.attempt}{one}"

    def event(self) -> dict[str, Any]:
        """The verdict's fields in the record; `first_time` in seconds since 1970 by the clock of rank zero's node."""
        first = self.end.first or {}
        told = {name: first.get(name) for name in ("rank", "host", "gpu", "step", "log")}
        return {
            "cause": self.cause,
            "attempt": self.attempt,
            "restart": self.restart,
            "code": self.end.code,
            **told,
            "first_time": first.get("time"),
            "message": str(first.get("message") or "")[:MESSAGE_LIMIT],
            "traceback": str(first.get("traceback") or "")[-TRACEBACK_LIMIT:],
            "others": self.end.others,
            "alike": [dict(group) for group in self.end.alike],
            "stacks": str(first.get("stacks") or "")[:MESSAGE_LIMIT],
            "next": self.comes_next,
            "look": self.look,
        }

    def tell(self) -> None:
        """Print it: the cause, the others, what comes next, the traceback, and last the line that names the first rank."""
        end, first = self.end, self.end.first
        complain(f"verdict: {self.cause}{self._place()}")
        if first is not None and end.started:
            self._tell_others()
            if first.get("stacks"):
                complain(f"stacks: {first['stacks']}; all of them in {self.folder / 'stacks'}")
        complain(f"next: {self.comes_next}; look further: {self.look}")
        if end.never_started:
            known = end.exit_code == end.code
            why = "the lines above say why" if known else f"the step ended with {end.code} before any rank ran"
            complain(f"no rank was started: {why}")
            return
        if first is None:
            complain(f"{self.start} ended with {end.code}: {exitcodes.describe(end.code)}; logs in {self.folder}")
            return
        trace = str(first.get("traceback") or "").rstrip("\n")
        if trace:
            print(printable_lines(trace), file=sys.stderr, flush=True)
        message = str(first.get("message", ""))
        ended = exitcodes.describe(int(first.get("code", end.code)))
        reason = message if message == ended or message.startswith(f"{ended.split(',')[0]},") else f"{ended}: {message}"
        by_signal = f" after {self.heard} came to the job" if first.get("by_us") and self.heard else ""
        log = f"; log {first['log']}" if first.get("log") else ""
        complain(f"rank {first.get('rank')} on {first.get('host')}, {self.start}: {reason}{by_signal}{log}")

    def _place(self) -> str:
        """ " in rank 2 (GPU 2) on node1, after step 41, at 2026-11-30 12:03:04"."""
        first = self.end.first
        if first is None or not self.end.started or int(first.get("rank", -1)) < 0 or first.get("by_us"):
            return f", {self.start}"
        gpu = f" (GPU {first['gpu']})" if first.get("gpu") is not None else ""
        step = f", after step {first['step']}" if isinstance(first.get("step"), int) else ""
        moment = first.get("time")
        when = ""
        if isinstance(moment, int | float) and 0 <= moment < 1e11:
            when = time.strftime(", at %Y-%m-%d %H:%M:%S", time.localtime(moment))
        return f", first in rank {first.get('rank')}{gpu} on {first.get('host')}, {self.start}{step}{when}"

    def _tell_others(self) -> None:
        end = self.end
        if not end.others:
            return
        if self.cause == "hang":  # what they did is told by the stacks
            complain(
                f"{end.others} other rank{'s' if end.others > 1 else ''} made no step either; logs in {self.folder}"
            )
            return
        complain(f"{end.others} other rank{'s' if end.others > 1 else ''} failed after it; logs in {self.folder}")
        for group in end.alike[:ALIKE_SHOWN]:
            several = group.get("count") != 1
            said = "the same" if group.get("same") else str(group.get("message", "")).split("\n")[0][:200]
            complain(f"  rank{'s' if several else ''} {group.get('ranks')}: {said}")
        if len(end.alike) > ALIKE_SHOWN:
            complain("  and others; each rank's log has its own")


def next_of(decision: Decision, code: int, *, local: bool) -> str:
    """What comes next, in words; `code` is the exit code of a job that ends with it."""
    if decision.action is Action.AGAIN:
        return f"started again inside this allocation in {decision.pause_s:g} s"
    if decision.action is Action.REQUEUE:
        return "nothing by itself, the command to go on follows" if local else "back into the queue"
    return f"given up, the job ends with exit code {code}"
