"""What holds after a resume with another configuration: its learning rate, weight decay and so on, at the place reached."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LRScheduler,
    OneCycleLR,
    SequentialLR,
)

from hpc.train import hyperparameters

Schedule = Callable[[Optimizer], LRScheduler | None]
SCHEDULES: dict[str, Schedule] = {
    "none": lambda optimizer: None,
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "chained": lambda optimizer: ExponentialLR(optimizer, 0.9),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 20),
    "sequential": lambda optimizer: SequentialLR(
        optimizer, [ConstantLR(optimizer, 0.1, 3), ExponentialLR(optimizer, 0.9)], [4]
    ),
}


class Trainer:
    """Two groups of parameters that step for nothing."""

    def __init__(self, lr: float, schedule: Schedule, **more: Any) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)]
        groups = [{"params": list(layer.parameters()), "lr": lr / (1 + at)} for at, layer in enumerate(layers)]
        self.optimizer = SGD(groups, lr=lr, momentum=0.9, **more)
        self.scheduler = schedule(self.optimizer)
        self.fresh = hyperparameters.fresh(self.optimizer, self.scheduler)

    def steps(self, count: int) -> list[list[float]]:
        """The rates of the next steps."""
        seen = []
        for _ in range(count):
            seen.append([group["lr"] for group in self.optimizer.param_groups])
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
        return seen

    def resume(self, other: Trainer) -> None:
        self.optimizer.load_state_dict(other.optimizer.state_dict())
        if self.scheduler is not None and other.scheduler is not None:
            self.scheduler.load_state_dict(other.scheduler.state_dict())
        hyperparameters.renew(self.optimizer, self.scheduler, other.fresh, self.fresh)


@pytest.mark.filterwarnings("ignore:Detected call")
@pytest.mark.parametrize("name", SCHEDULES)
def test_another_rate_holds_from_the_next_step_on(name: str) -> None:
    whole, before, after = (Trainer(lr, SCHEDULES[name]) for lr in (0.02, 0.1, 0.02))
    expected = whole.steps(12)
    assert before.steps(7) != expected[:7]
    after.resume(before)
    for seen, rates in zip(after.steps(5), expected[7:], strict=True):
        assert seen == pytest.approx(rates)


@pytest.mark.filterwarnings("ignore:Detected call")
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_same_configuration_changes_no_bit(name: str) -> None:
    whole, before, after = (Trainer(0.1, SCHEDULES[name]) for _ in range(3))
    expected = whole.steps(12)
    before.steps(7)
    after.resume(before)
    assert after.steps(5) == expected[7:]


def test_the_other_hyperparameters_hold_too() -> None:
    after = Trainer(0.1, SCHEDULES["none"], weight_decay=0.5, nesterov=True)
    after.resume(Trainer(0.1, SCHEDULES["none"]))
    assert [(group["weight_decay"], group["nesterov"]) for group in after.optimizer.param_groups] == [(0.5, True)] * 2


def test_what_the_jobs_own_code_has_set_stays() -> None:
    before, after = Trainer(0.1, SCHEDULES["none"]), Trainer(0.1, SCHEDULES["none"], weight_decay=0.5)
    before.optimizer.param_groups[1]["lr"] = 0.007
    after.resume(before)
    assert after.steps(1) == [[0.1, 0.007]]


@pytest.mark.filterwarnings("ignore:Detected call")
@pytest.mark.parametrize("factor", [1, 2])
def test_what_a_cycle_has_moved_stays(factor: int) -> None:
    def made(lr: float) -> tuple[AdamW, OneCycleLR, dict[str, Any]]:
        optimizer = AdamW(torch.nn.Linear(2, 1).parameters(), lr=lr)
        scheduler = OneCycleLR(optimizer, max_lr=10 * lr, total_steps=20)
        return optimizer, scheduler, hyperparameters.fresh(optimizer, scheduler)

    (before, cycle, then), (after, goes_on, now) = made(0.01), made(0.01 * factor)
    for _ in range(7):
        before.step()
        cycle.step()
    after.load_state_dict(before.state_dict())
    goes_on.load_state_dict(cycle.state_dict())
    hyperparameters.renew(after, goes_on, then, now)
    (group,), (moved,) = after.param_groups, before.param_groups
    assert group["betas"] == moved["betas"] != now["groups"][0]["betas"]
    assert (group["lr"], group["max_lr"]) == pytest.approx((factor * moved["lr"], factor * moved["max_lr"]))
