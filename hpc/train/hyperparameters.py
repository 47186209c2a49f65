"""The hyperparameters that hold after a resume: what the configuration has changed since the checkpoint is changed.

An optimizer's state has its learning rate, weight decay and so on in it, so that loading it alone would undo that. So a
checkpoint also says how they were when optimizer and schedule had just been made. What training has moved since then
(the rate within its schedule, a cycled momentum, what the job's own code has set) is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


def fresh(optimizer: Optimizer, scheduler: LRScheduler | None) -> dict[str, Any]:
    """Those of an optimizer that was just made, with its schedule: plain data."""
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    return {"groups": groups, "base_rates": _base_rates(scheduler)}


def renew(optimizer: Optimizer, scheduler: LRScheduler | None, then: dict[str, Any], now: dict[str, Any]) -> None:
    """After their states were loaded: change what differs between what `fresh` gave then and gives now, and nothing else.

    The current rate is scaled as the one that its schedule starts from.
    """
    for group, before, after in zip(optimizer.param_groups, then["groups"], now["groups"], strict=False):
        changed = {name: value for name, value in after.items() if name not in before or bool(before[name] != value)}
        rate = "initial_lr" if "initial_lr" in before and "initial_lr" in after else "lr"
        if rate in changed:
            scaled = group["lr"] * (after[rate] / before[rate]) if before[rate] else after["lr"]
            group.update(changed, lr=scaled)
        else:
            group.update((name, value) for name, value in changed.items() if name != "lr")
    if scheduler is not None and then["base_rates"] != now["base_rates"]:
        _set_base_rates(scheduler, now["base_rates"])
        scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]


def _base_rates(scheduler: LRScheduler | None) -> list[Any]:
    """The rates that a schedule starts from, and those of the schedules in it."""
    if scheduler is None:
        return []
    return [list(getattr(scheduler, "base_lrs", [])), *map(_base_rates, _inner(scheduler))]


def _set_base_rates(scheduler: LRScheduler, rates: Sequence[Any]) -> None:
    if rates and rates[0]:
        scheduler.base_lrs = list(rates[0])
    for inner, its in zip(_inner(scheduler), rates[1:], strict=False):
        _set_base_rates(inner, its)


def _inner(scheduler: LRScheduler) -> Sequence[LRScheduler]:
    """SequentialLR and ChainedScheduler consist of others."""
    return getattr(scheduler, "_schedulers", ())
