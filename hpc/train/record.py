"""What the training core adds to the run's record: resumed, first_step, saved, stopping."""

from __future__ import annotations

import logging
import os
from typing import Any

from hpc.rundir import ATTEMPT_VARIABLE, RESTART_VARIABLE, RUN_DIR_VARIABLE, RunDirectory

log = logging.getLogger("hpc.train")


class Record:
    """The record of a run under a controller; without one, and on ranks other than 0, nothing is noted.

    Every event says in which start it happened: `attempt` and `restart`, as the agent numbers them.
    """

    def __init__(self, run: RunDirectory | None) -> None:
        self.run = run
        self._start = {"attempt": _number(ATTEMPT_VARIABLE), "restart": _number(RESTART_VARIABLE)}

    @classmethod
    def of(cls, run: RunDirectory, is_rank_zero: bool) -> Record:
        return cls(run if is_rank_zero and os.environ.get(RUN_DIR_VARIABLE) else None)

    def events(self) -> list[dict[str, Any]]:
        """What stands in the record so far; nothing where none is kept."""
        try:
            return [] if self.run is None else list(self.run.events())
        except OSError:
            return []

    def note(self, event: str, **fields: Any) -> None:
        """Append an event. A record that cannot be written is told once, and is no reason to stop training."""
        if self.run is None:
            return
        try:
            self.run.append_event(event, **self._start, **fields)
        except (OSError, ValueError) as error:
            log.warning("the record %s cannot be written, going on without it: %s", self.run.record_file, error)
            self.run = None


def _number(variable: str) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else 0
