"""Which checkpoint is the best one, by a metric of the evaluations; of equal ones the later."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable, Mapping

from hpc.errors import ConfigError


class Best:
    """The evaluations of a run so far. A metric that is no number, as after a loss that diverged, is never the best."""

    def __init__(self, metric: str, mode: str) -> None:
        """`mode`: "max" or "min"."""
        self.metric = metric
        self._sign = 1.0 if mode == "max" else -1.0
        self._values: dict[int, float] = {}

    def note(self, step: int, metrics: Mapping[str, float]) -> None:
        """What the evaluation after `step` gave.

        Raises:
            ConfigError: it has no such metric.
        """
        if self.metric not in metrics:
            near = difflib.get_close_matches(self.metric, metrics, 1)
            meant = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(
                f"train.best_metric={self.metric}: the job's evaluation gives {', '.join(metrics) or 'nothing'}{meant} "
                f"The checkpoint of step {step} is there: submit the same run again with the metric's name, or with null"
            )
        self._values[step] = metrics[self.metric]

    def take(self, evaluations: Iterable[Mapping[str, float]]) -> None:
        """Those that an earlier attempt has noted, with their "step"; one without the metric does not count."""
        for noted in evaluations:
            if self.metric in noted:
                self._values[int(noted["step"])] = noted[self.metric]

    def of(self, steps: Collection[int]) -> int | None:
        """The best of these steps; None when none of them has been evaluated."""
        known = [step for step in steps if not math.isnan(self._values.get(step, math.nan))]
        return max(known, key=lambda step: (self._sign * self._values[step], step), default=None)

    def value(self, step: int) -> float:
        return self._values[step]
