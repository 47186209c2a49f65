"""After a failure elsewhere, the worker that is writing a checkpoint may finish it: it is of a step before that.

Else a kill would cost the steps of an interval and those of a save besides.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from hpc.node.starting import Worker

LOOK_S = 0.1
LIMIT_S = 10.0
"""Less than the other nodes' agents wait for this one's last word (agent.REPORT_LIMIT_S)."""


class Sparing:
    """Which workers are not to be ended yet; none until `begin`."""

    def __init__(self) -> None:
        self._until = 0.0

    def begin(self, limit_s: float) -> None:
        """A failure has been named, and the others are about to be ended; a save may take so long from now on."""
        self._until = time.monotonic() + min(limit_s, LIMIT_S)

    def stop_within(self, seconds: float) -> None:
        """Slurm ends the job by then."""
        self._until = min(self._until, time.monotonic() + seconds)

    def spares(self, worker: Worker) -> bool:
        return (
            worker.code is None
            and worker.fault is None
            and time.monotonic() < self._until
            and worker.pulse.is_writing_checkpoint()
        )

    def kill_others(self, workers: Iterable[Worker]) -> float:
        """SIGKILL for those that are not spared; returns in how many seconds to look again."""
        alive = [worker for worker in workers if worker.code is None]
        for worker in alive:
            if not self.spares(worker):
                worker.kill()
        return self.next_look_s(alive, 1.0)

    def next_look_s(self, workers: Iterable[Worker], otherwise_s: float) -> float:
        """In how many seconds those that have not ended are to be looked at again."""
        return LOOK_S if any(map(self.spares, workers)) else otherwise_s
