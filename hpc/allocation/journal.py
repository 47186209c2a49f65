"""What the controller writes into the record of the run."""

from __future__ import annotations

from typing import Any

from hpc.allocation.verdict import complain
from hpc.rundir import RunDirectory


class Journal:
    """Appends events; where one cannot be written (a full disk, a stale handle) that is told: no decision hangs on it."""

    def __init__(self, run_dir: RunDirectory) -> None:
        self._run_dir = run_dir

    def append(self, event: str, **fields: Any) -> None:
        """Append one event."""
        try:
            self._run_dir.append_event(event, **fields)
        except (OSError, ValueError) as error:
            complain(f"the record could not be written ({event}): {error}")
