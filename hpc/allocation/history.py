"""What a run has behind it: its newest checkpoint, and what earlier attempts made of their time. Reads, never writes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

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


def stalled_attempts(events: Iterable[Mapping[str, Any]], job_id: str, attempt: int) -> int:
    """How many attempts of this job, the last ones before `attempt` and in a row, were requeued without a new step."""
    made: dict[int, bool] = {}
    for event in events:
        if event.get("event") == "decided" and event.get("job_id") == job_id and event.get("decision") == "requeue":
            number = event.get("attempt")
            if isinstance(number, int) and number < attempt:
                made[number] = bool(event.get("made_steps"))
    count = 0
    for number in sorted(made, reverse=True):
        if made[number]:
            break
        count += 1
    return count
