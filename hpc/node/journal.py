"""What an agent writes into the record of the run: every event says of which start it is."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from hpc.rundir import RESTART_VARIABLE, RunDirectory


class Journal:
    """Appends events; without a run directory, and when it cannot be written, training goes on all the same."""

    def __init__(self, run: RunDirectory | None, attempt: int, note: Callable[[str], None]) -> None:
        self.restart = number_in(RESTART_VARIABLE)
        self._run, self._attempt, self._note = run, attempt, note

    def append(self, event: str, **fields: Any) -> None:
        """Append one event."""
        if self._run is None:
            return
        try:
            self._run.append_event(event, attempt=self._attempt, restart=self.restart, **fields)
        except (OSError, ValueError) as error:
            self._note(f"the record could not be written: {error}")


def number_in(variable: str) -> int | None:
    """The number in an environment variable; None when there is none."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else None
