"""How one start of the step ended, as its agents and Slurm tell it, and the lines that a person gets to read."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc import exitcodes
from hpc.errors import printable, printable_lines


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
    last_step: int | None = None
    """The newest step that the heartbeats have told of; None when it is unknown."""

    @property
    def never_started(self) -> bool:
        return self.code != exitcodes.DONE and not self.started

    @property
    def exit_code(self) -> int:
        """The exit code of a job that ends with this."""
        known = self.code in (exitcodes.UNAVAILABLE, exitcodes.BAD_ENVIRONMENT) or (self.first or {}).get("by_us")
        return self.code if not self.never_started or known else exitcodes.UNAVAILABLE


def read_end(folder: Path, code: int, *, started: bool) -> End:
    """The end of the start whose outcome.json stands in the attempt's folder; `code` is srun's.

    Of a start that came to no ranks, what a task had against it counts before what the others say: they were ended.
    """
    if not started:
        refusals = [facts for path in folder.glob("error-task-*.json") if (facts := _facts(path)) is not None]
        if refusals:
            cause = min(refusals, key=lambda facts: float(facts.get("time") or 0.0))
            return End(code=int(cause.get("code") or code), started=False, reported=True, first=cause)
    outcome = _facts(folder / "outcome.json")
    if outcome is None:
        return End(code=code, started=started, reported=False)
    first = outcome.get("first")
    return End(
        code=int(outcome.get("code") or code),
        started=started,
        reported=True,
        first=first if isinstance(first, dict) else None,
        others=int(outcome.get("others", 0)),
        last_step=step if isinstance(step := outcome.get("last_step"), int) else None,
    )


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


def tell(end: End, *, attempt: int, restart: int, folder: Path, heard: str | None) -> None:
    """Print what went wrong: the first failing rank's traceback, and last the line that names it."""
    if end.never_started:
        known = end.exit_code == end.code
        why = "the lines above say why" if known else f"the step ended with {end.code} before any rank ran"
        complain(f"no rank was started: {why}")
        return
    start = f"attempt {attempt}" + (f", restart {restart}" if restart else "")
    first = end.first
    if first is None:
        complain(f"{start} ended with {end.code}: {exitcodes.describe(end.code)}; logs in {folder}")
        return
    by_signal = f" after {heard} came to the job" if first.get("by_us") and heard else ""
    if end.others:
        complain(f"{end.others} other rank{'s' if end.others > 1 else ''} failed after it; logs in {folder}")
    trace = str(first.get("traceback") or "").rstrip("\n")
    if trace:
        print(printable_lines(trace), file=sys.stderr, flush=True)
    message = str(first.get("message", ""))
    ended = exitcodes.describe(int(first.get("code", end.code)))
    reason = f"{ended}: {message}" if message != ended else ended
    log = f"; log {first['log']}" if first.get("log") else ""
    complain(f"rank {first.get('rank')} on {first.get('host')}, {start}: {reason}{by_signal}{log}")
