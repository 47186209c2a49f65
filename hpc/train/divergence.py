"""A loss that is no finite number: training that goes on with it trains nothing, and its checkpoints must not replace good ones."""

from __future__ import annotations

import math

from hpc.errors import HpcError

PATIENCE = 10
"""Logged steps in a row without a finite loss that end the run. One batch may do that, and mixed precision may skip its step."""


class Diverged(HpcError):
    """The loss is no finite number any more; the checkpoints from before are there."""


class Divergence:
    """Follows the logged losses, which are the same on every rank."""

    def __init__(self, stops: bool) -> None:
        self._stops = stops
        self._finite: int | None = None
        self._since: int | None = None
        self._count = 0

    @property
    def holds_saves(self) -> bool:
        """Whether the last logged loss was not finite, so that a checkpoint would be of no use."""
        return self._stops and self._since is not None

    def logged(self, step: int, loss: float, saved_at: int) -> str | None:
        """What there is to say about the loss of `step`; `saved_at`: the newest checkpoint's step, 0 for none.

        Raises:
            Diverged: names the first such step, and the checkpoint to go on from.
        """
        if math.isfinite(loss):
            back, self._since, self._count, self._finite = self._since, None, 0, step
            return None if back is None else f"the loss is finite again at step {step}"
        self._count += 1
        if self._since is None:
            self._since = step
            known = (
                "none was before" if self._finite is None else f"the last finite one was that of step {self._finite}"
            )
            held = "no checkpoint is written until it is finite again" if self._stops else "training goes on"
            return f"the loss of step {step} is {loss} ({known}): {held}"
        if self._count >= PATIENCE:
            self.give_up(saved_at)
        return None

    def give_up(self, saved_at: int) -> None:
        """No further step is to be made.

        Raises:
            Diverged: if the last logged loss was not finite.
        """
        if not self.holds_saves:
            return
        logged = "1 logged step" if self._count == 1 else f"{self._count} logged steps"
        raise Diverged(
            f"the loss is no finite number since step {self._since}, for {logged}: weights that are no numbers stay so. "
            f"{self._checkpoint(saved_at)}; look at the learning rate and at the data of those steps "
            f"(train.stop_when_diverged=false goes on all the same)"
        )

    def _checkpoint(self, saved_at: int) -> str:
        if not saved_at:
            return "There is no checkpoint yet"
        if self._finite is None or saved_at > self._finite:
            return (
                f"The newest checkpoint, step-{saved_at}, is later than the last finite loss: remove it if the same run "
                f"is to go on from the one before"
            )
        return f"The newest checkpoint, step-{saved_at}, is from before, and the same run goes on from there"
