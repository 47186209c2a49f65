"""What a run has behind it: its newest checkpoint, and what earlier attempts made of their time. Reads, never writes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hpc import exitcodes
from hpc.rundir import RunDirectory

_STEP = re.compile(r"step-([0-9]+)")


def newest_checkpoint(run_dir: RunDirectory) -> tuple[int, Path | None]:
    """Step and folder of the newest checkpoint that has its manifest, which is written last; (0, None) for none.

    Whether every byte is right is the training core's to say.
    """
    try:
        names = os.listdir(run_dir.checkpoints)
    except OSError:
        return 0, None
    for step in sorted((int(match[1]) for name in names if (match := _STEP.fullmatch(name))), reverse=True):
        folder = run_dir.checkpoints / f"step-{step}"
        if (folder / "manifest.json").is_file():
            return step, folder
    return 0, None


def attempts_of_earlier_jobs(events: Iterable[Mapping[str, Any]], job_id: str) -> int:
    """How many attempts other jobs of the same run have had: their numbers come before this job's own."""
    numbers = [
        number
        for event in events
        if event.get("job_id") not in (None, "", job_id) and isinstance(number := event.get("attempt"), int)
    ]
    return max(numbers, default=-1) + 1


def stalled_attempts(events: Iterable[Mapping[str, Any]], job_id: str, attempt: int) -> int:
    """How many attempts, the last ones before `attempt` and in a row, asked to come back without a new step.

    Those of this job, and of the jobs that it continues by itself.
    """
    jobs, made = {job_id}, dict[int, bool]()
    for event in reversed(list(events)):
        if event.get("event") == "continued" and str(event.get("new_job_id")) in jobs:
            jobs.add(str(event.get("job_id")))
        elif (
            event.get("event") == "decided" and str(event.get("job_id")) in jobs and event.get("decision") == "requeue"
        ):
            number = event.get("attempt")
            if isinstance(number, int) and number < attempt:
                made.setdefault(number, bool(event.get("made_steps")))
    count = 0
    for number in sorted(made, reverse=True):
        if made[number]:
            break
        count += 1
    return count


def lost_hosts(events: Iterable[Mapping[str, Any]], attempt: int) -> tuple[str, ...]:
    """The nodes that were lost, or on which an agent was, in the attempt before this one."""
    hosts: dict[str, None] = {}
    for event in events:
        if event.get("attempt") != attempt - 1:
            continue
        nodes = event.get("lost_nodes")
        if event.get("event") in ("decided", "ending") and isinstance(nodes, list):
            hosts.update(dict.fromkeys(map(str, nodes)))
        first = event.get("first")
        if event.get("event") == "ended" and isinstance(first, Mapping):
            if first.get("code") == exitcodes.UNAVAILABLE and first.get("host"):
                hosts[str(first["host"])] = None
    return tuple(hosts)
