"""Does a notice reach every rank on this cluster, and does the job come back? A tiny job finds out, by Slurm's own warning."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc.config import load
from hpc.errors import SlurmCommandError
from hpc.login import submission
from hpc.rundir import RunDirectory
from hpc.slurm import commands

JOB = "jobs.notice"
LOOK_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What was seen of it."""

    signal: str
    ranks: int
    words: tuple[dict[str, Any], ...]
    """What each rank of the first attempt left: rank, host, steps, heard."""
    decision: str | None
    """What the controller decided after the first attempt, and why."""
    requeued: bool
    came_back_after_s: float | None
    """From the requeue to the first rank of the next attempt."""
    ended: str | None
    """The job's state when it ended before all was seen."""


def prove(overrides: Sequence[str], *, allow_root: bool, limit_s: float, tell: Callable[[str], None]) -> Proof:
    """Send the job, watch it until it has come back, and take it out of the queue again.

    Raises:
        UsageError: the configuration, or the cluster, refuses the job.
        SlurmCommandError: Slurm gave no answer.
    """
    flags = {"slurm.allow_root": True} if allow_root else {}
    loaded = load(job=JOB, overrides=overrides, flags=flags)
    sent = submission.send(loaded)
    for note in sent.notes:
        tell(f"note: {note}")
    tell(f"job {sent.job_id} sent, {sent.plan.run_dir}; the warning is due within the first minute of its run")
    run = RunDirectory(sent.plan.run_dir)
    try:
        ended = _watch(run, sent.job_id, time.monotonic() + limit_s, tell)
    finally:
        _take_out(sent.job_id, tell)
    return read(run, loaded.config.slurm.signal, ended)


def _watch(run: RunDirectory, job_id: str, deadline: float, tell: Callable[[str], None]) -> str | None:
    """Wait until the next attempt has begun; the state in which the job ended before, or why no longer was waited."""
    told: set[str] = set()
    looked = 0.0
    while time.monotonic() < deadline:
        for event in run.events():
            line = _line(event)
            if line and line not in told:
                told.add(line)
                tell(line)
            if event.get("event") == "started" and event.get("attempt"):
                return None
        if time.monotonic() - looked > 5 * LOOK_S:
            looked = time.monotonic()
            state = commands.state_of(job_id)
            if state is None or state.is_finished:
                return state.value if state is not None else "gone"
        time.sleep(LOOK_S)
    return "not waited for any longer"


def _line(event: dict[str, Any]) -> str:
    kind, attempt = event.get("event"), event.get("attempt")
    if kind == "started":
        return f"attempt {attempt}: ranks run"
    if kind == "stopping":
        return f"attempt {attempt}: all ranks agreed to stop, on {event.get('reason')}"
    if kind == "requeued":
        return f"attempt {attempt}: back in the queue"
    return ""


def _take_out(job_id: str, tell: Callable[[str], None]) -> None:
    try:
        commands.cancel(job_id)
    except SlurmCommandError as error:
        tell(f"job {job_id} could not be cancelled: {error}")


def read(run: RunDirectory, signal: str, ended: str | None) -> Proof:
    """The proof in a run directory."""
    events = list(run.events())

    def first(kind: str, attempt: int) -> dict[str, Any]:
        return next((one for one in events if one.get("event") == kind and one.get("attempt") == attempt), {})

    begun, decided, requeued, again = (
        first(kind, attempt) for kind, attempt in (("started", 0), ("decided", 0), ("requeued", 0), ("started", 1))
    )
    after = float(again["time"]) - float(requeued["time"]) if again and requeued else None
    return Proof(
        signal=signal,
        ranks=int(begun.get("world_size") or 0),
        words=tuple(_words(run.attempt(0))),
        decision=f"{decided.get('decision')}: {decided.get('reason')}" if decided else None,
        requeued=bool(requeued),
        came_back_after_s=after,
        ended=ended,
    )


def _words(folder: Path) -> list[dict[str, Any]]:
    found = []
    for path in folder.glob("notice-*.json"):
        try:
            word = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(word, dict) and isinstance(word.get("rank"), int):
            found.append(word)
    return sorted(found, key=lambda word: int(word["rank"]))


def verdicts(proof: Proof) -> list[tuple[bool, str]]:
    """Each thing that was to be shown: whether it was, and in words. Pure."""
    if not proof.ranks:
        return [(False, f"no rank was started ({proof.ended or 'no word of any'}): look at the job's output")]
    heard = [word for word in proof.words if word.get("heard") == f"SIG{proof.signal}"]
    steps = sorted({int(word.get("steps", -1)) for word in proof.words})
    deaf = [f"{word['rank']} on {word.get('host')}" for word in proof.words if word not in heard]
    silent = proof.ranks - len(proof.words)
    found = [
        (True, f"every one of {proof.ranks} ranks heard SIG{proof.signal}")
        if len(heard) == proof.ranks
        else (
            False,
            f"{len(heard)} of {proof.ranks} ranks heard SIG{proof.signal}"
            + (f"; not: rank {', '.join(deaf)}" if deaf else "")
            + (f"; {silent} left no word" if silent else ""),
        )
    ]
    if len(steps) == 1 and not silent:
        found.append((True, f"all stopped at the same step, {steps[0]}"))
    else:
        found.append((False, f"they did not all stop at one step: {', '.join(map(str, steps)) or 'no word of any'}"))
    if not proof.requeued:
        found.append((False, f"the job was not requeued ({proof.decision or proof.ended or 'no decision was made'})"))
    elif proof.came_back_after_s is None:
        found.append((False, f"requeued, but it did not come back ({proof.ended})"))
    else:
        found.append((True, f"requeued, and its ranks ran again {proof.came_back_after_s:.0f} s later"))
    return found
