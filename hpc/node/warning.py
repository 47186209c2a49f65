"""Warnings on their way to the workers: to the training core at once, to a script as soon as it has a handler for them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from signal import Signals

from hpc.node.signals import has_handler
from hpc.node.starting import Worker


class Warnings:
    """What came and was not delivered yet. A script without a handler would die of it, so it keeps waiting."""

    def __init__(self, *, at_once: bool) -> None:
        """`at_once`: the workers are the training core's, which hears from its first line on."""
        self._at_once = at_once
        self._unheard: list[tuple[Worker, Signals]] = []

    def __bool__(self) -> bool:
        """Whether somebody has yet to hear one."""
        return bool(self._unheard)

    def send(self, workers: Iterable[Worker], number: Signals) -> None:
        """Pass a warning on to those that run."""
        self._unheard += [(worker, number) for worker in workers if worker.code is None]
        self.deliver()

    def deliver(self) -> None:
        """Try again with those that had no handler."""
        waiting, self._unheard = self._unheard, []
        for worker, number in waiting:
            if worker.code is not None:
                continue
            if self._at_once or has_handler(worker.pid, number):
                os.kill(worker.pid, number)  # our own child, not yet waited for: the number cannot be another's
            elif (worker, number) not in self._unheard:
                self._unheard.append((worker, number))
