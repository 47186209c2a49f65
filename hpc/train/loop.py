"""The training loop, written once for all jobs."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from hpc.schema import TrainConfig
from hpc.train import randomness, strategy
from hpc.train.distributed import World
from hpc.train.divergence import Divergence
from hpc.train.evaluation import evaluate
from hpc.train.heartbeat import Heartbeat
from hpc.train.interval import Pace, Plan, dear
from hpc.train.job import TrainingJob
from hpc.train.loader import begin, make_loader, to_device
from hpc.train.metrics import Metrics
from hpc.train.precision import autocast
from hpc.train.progress import Progress, figure
from hpc.train.record import Record
from hpc.train.sampler import EpochSampler, MicroBatch
from hpc.train.saving import Saved, Saving
from hpc.train.stop import Stop
from hpc.train.work import OwnWork

log = logging.getLogger("hpc.train")


@dataclass
class Position:
    """How far a run is: `samples` of the epoch `epoch` and `step` optimizer steps in all are done."""

    epoch: int = 0
    samples: int = 0
    step: int = 0


@dataclass(frozen=True)
class Outcome:
    """What a run reached. `seconds` and `steps` of this attempt alone; `metrics` over all held-out samples.

    `stopped_at`: the step that a notice stopped it after; None when it went to its end. `checkpoint`: None when it was
    stopped before there was one.
    """

    total_steps: int
    steps: int
    seconds: float
    metrics: Mapping[str, float]
    held_out: int
    checkpoint: Path | None
    stopped_at: int | None = None
    best: tuple[str, float, Path] | None = None
    """Metric, value and checkpoint, with train.best_metric."""


@dataclass(frozen=True)
class Data:
    """The samples of a job, and how this rank takes them."""

    train: Dataset[Any]
    held_out: Dataset[Any] | None
    sampler: EpochSampler
    workers: int

    @property
    def held_out_samples(self) -> int:
        return 0 if self.held_out is None else number_of_samples(self.held_out)


@dataclass(frozen=True)
class Parts:
    """What a step changes. `model` is the job's own, `wrapped` the same one as the loss calls it.

    `fresh`: the hyperparameters as the job has made them (hyperparameters.fresh).
    """

    model: nn.Module
    wrapped: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler | None
    scaler: torch.amp.GradScaler
    fresh: Mapping[str, Any]


@dataclass(frozen=True)
class Tools:
    """What goes along with the steps: saving, planning, telling, and hearing of a stop. `metrics` on rank 0 alone."""

    saving: Saving
    plan: Plan
    record: Record
    metrics: Metrics | None
    progress: Progress
    stop: Stop
    heartbeat: Heartbeat


class Loop:
    """The steps of one attempt. All ranks go through the same sequence of steps, savings and evaluations."""

    def __init__(
        self,
        job: TrainingJob,
        config: TrainConfig,
        world: World,
        data: Data,
        parts: Parts,
        tools: Tools,
        position: Position,
        total: int,
        made_with: dict[str, Any],
    ) -> None:
        self.job = job
        self.config = config
        self.world = world
        self.data = data
        self.parts = parts
        self.saving = tools.saving
        self.plan = tools.plan
        self.record = tools.record
        self.metrics = tools.metrics
        self.progress = tools.progress
        self.stop = tools.stop
        self.heartbeat = tools.heartbeat
        self.stopped = False
        self.position = position
        self.total = total
        self.made_with = made_with
        self.results: dict[str, float] = {}
        self._loader = make_loader(
            job, data.train, data.sampler, config, world, workers=data.workers, persistent=config.epochs > 1
        )
        self._trainable = [p for p in parts.model.parameters() if p.requires_grad]
        # what logged steps add up over the ranks: the loss, and the step to save after, which only rank 0 fills in
        self._sums = torch.zeros(2, dtype=torch.float64, device=world.device)
        self._save_after = 0
        self._speed = Speed()
        self._work = OwnWork()
        if world.size > 1:  # between the two DDP hands the buffers of rank 0 to all
            parts.wrapped.register_forward_pre_hook(lambda *_: self._work.stop())
            parts.model.register_forward_pre_hook(lambda *_: self._work.go())
        self._pace = Pace(time.monotonic())
        self._measured: Saved | None = None
        self._warned = False
        self._saved_at = position.step  # where a checkpoint stands; at 0 there is nothing to save
        self._first = position.step
        self._divergence = Divergence(config.stop_when_diverged)

    def run(self) -> Outcome:
        """Go on from the position to the last step or the agreed stop, save, evaluate."""
        began, first = time.monotonic(), self._first
        self._stop_if_agreed()
        if first > 0 and self._evaluation_due() and not self.stopped:
            self._evaluate_unless_noted()
        if first < self.total:
            self.progress.begin(first, self.total)
        self._restart_clocks()
        while self.position.step < self.total and not self.stopped:
            self._epoch()
        if not self.stopped:
            self._divergence.give_up(self._saved_at)
        if self.stopped:
            self.record.note("stopping", step=self.position.step, reason=self.stop.reason)
        self.heartbeat.phase("save", None)
        if self._saved_at != self.position.step and not self._divergence.holds_saves:
            self._save()
        self.world.await_rank_zero(self.saving.finish)  # no rank leaves before the last save is durable
        self.world.barrier()  # nor rank 0, which may serve the store, before the others know
        return Outcome(
            total_steps=self.total,
            steps=self.position.step - first,
            seconds=time.monotonic() - began,
            metrics=self.results,
            held_out=self.data.held_out_samples,
            checkpoint=self.saving.path(self._saved_at) if self._saved_at else None,
            stopped_at=self.position.step if self.stopped else None,
            best=self.saving.best() if self.world.is_rank_zero else None,
        )

    def _stop_if_agreed(self) -> None:
        """A point where all ranks may stop. After the last step there is none: a run that is finished is finished."""
        if self.position.step < self.total and not self.stopped:
            self.stopped = self.stop.here()

    def _epoch(self) -> None:
        """The steps that are left of the current epoch, or until the last step of the run."""
        sampler = self.data.sampler
        sampler.set_epoch(self.position.epoch, self.position.samples)
        for micro, batch in zip(sampler.micro_batches(), begin(self._loader), strict=True):
            self._backward(micro, to_device(batch, self.world.device))
            if micro.last:
                self._step(micro.step_samples)
                if self.position.step == self.total or self.stopped:
                    return

    def _backward(self, micro: MicroBatch, batch: Any) -> None:
        """Add one micro-batch to the gradients; its loss counts by its share of the step's samples."""
        wrapped, weight = self.parts.wrapped, micro.weight(self.world.size)
        with strategy.explained(wrapped), strategy.synchronising(wrapped, micro.last):
            with autocast(self.config, self.world):
                loss = strategy.scalar(self.job.loss(wrapped, batch), wrapped, len(micro.keys))
            if micro.last:
                self._work.stop()
            self.parts.scaler.scale(loss if weight == 1.0 else loss * weight).backward()
            if micro.last:
                self._work.go()
        if self._log_due(self.position.step + 1):
            self._sums[0] += loss.detach() * micro.count

    def _step(self, samples: int) -> None:
        """One optimizer step, and what is due after it."""
        parts, scaler = self.parts, self.parts.scaler
        strategy.require_gradients(parts.wrapped, self.config)
        if self.config.clip_grad_norm is not None:
            scaler.unscale_(parts.optimizer)
            torch.nn.utils.clip_grad_norm_(self._trainable, self.config.clip_grad_norm)
        rate = float(parts.optimizer.param_groups[0]["lr"])
        scale = scaler.get_scale() if scaler.is_enabled() else 1.0
        scaler.step(parts.optimizer)
        scaler.update()
        parts.optimizer.zero_grad(set_to_none=True)
        skipped = scaler.is_enabled() and scaler.get_scale() < scale
        if parts.scheduler is not None and not skipped:
            parts.scheduler.step()
        self._advance(samples)
        self.heartbeat.beat(self.position.step, self._work.taken())
        self._pace.step(time.monotonic(), self.saving.under_way)
        self.saving.check()
        if self.position.step == self._first + 1:
            self.record.note("first_step", step=self.position.step)
        if self._log_due(self.position.step):
            self._log(samples, rate)
        self.progress.step(self.position.step)
        self._save_and_evaluate()
        self._stop_if_agreed()
        self._work.go()

    def _advance(self, samples: int) -> None:
        position = self.position
        position.step += 1
        position.samples += samples
        self._speed.add(samples)
        if self.data.sampler.steps_left(position.samples) == 0:
            position.epoch, position.samples = position.epoch + 1, 0

    def _log_due(self, step: int) -> bool:
        return step % self.config.log_every_steps == 0 or step in (1, self.total)

    def _log(self, samples: int, rate: float) -> None:
        """Note the loss of this step over the global batch, and hear from rank 0 which step to save after.

        The only place in a step that waits for the device.
        """
        if self.world.is_rank_zero:
            self._sums[1] = self._plan_save()
        total, save_after = self.world.total(self._sums).tolist()
        loss, self._save_after = total / samples, int(save_after)
        self._sums.zero_()
        step, epoch = self.position.step, self._epoch_of_step()
        if self.metrics is not None:
            speed = self._speed.per_second()
            self.progress.figures(step, epoch, loss, speed)
            figures = {"loss": loss, "lr": rate, "samples_per_s": round(speed, 1), "time": round(time.time(), 3)}
            self.metrics.note("train", step, epoch, figures)
        news = self._divergence.logged(step, loss, self._saved_at)
        if news and self.world.is_rank_zero:
            log.warning("%s", news)

    def _epoch_of_step(self) -> int:
        """The epoch that the step just done belongs to."""
        return self.position.epoch - (self.position.samples == 0)

    def _plan_save(self) -> int:
        """The step to save after, on rank 0, and what there is to say about it; 0 for none."""
        now, last, every = time.monotonic(), self.saving.last, self.config.save_every_steps
        if last is not None and last is not self._measured and not self.saving.under_way:
            self._measured = last
            cost_s = last.stall_s + self._pace.slowed_s()
            self.plan.measured(cost_s, last.seconds)
            warning = None if every is None or self._warned else dear(every, cost_s, self._pace.step_s)
            if warning:
                self._warned = True
                log.warning("%s", warning)
        if news := self.plan.news(now, self._pace.step_s):
            log.info("%s", news)
        return self.plan.next_step(self.position.step, now, self._pace.step_s)

    def _save_and_evaluate(self) -> None:
        every, step = self.config.save_every_steps, self.position.step
        save = step == self.total or step == self._save_after or (every is not None and step % every == 0)
        evaluate = self._evaluation_due()
        save = (save or (evaluate and self.config.best_metric is not None)) and not self._divergence.holds_saves
        if save:
            self._save()
        if evaluate:
            self._evaluate()
        if save or evaluate:
            self._restart_clocks()
            if self.world.is_rank_zero or not save:
                # the others' next step waits for rank 0, which copies its state first
                self.heartbeat.beat(step)

    def _restart_clocks(self) -> None:
        """What was done until now was no step."""
        self._speed.restart()
        self._pace.restart(time.monotonic())
        self._work.go()

    def _save(self) -> None:
        """Begin a checkpoint of this very position; rank 0 writes, with the random generators of every rank."""
        self.heartbeat.phase("save", None)
        began, self._saved_at = time.monotonic(), self.position.step
        self._save_after = 0
        self.plan.save_begins(began)
        self._pace.save_begins()
        generators = self.world.gather(randomness.capture(self.world.device))
        self.world.await_rank_zero(self.saving.finish)  # the save before this one: a slow file system may hold it up
        if generators is None:
            return
        parts = self.parts
        state = {
            "position": asdict(self.position),
            "optimizer": parts.optimizer.state_dict(),
            "scheduler": None if parts.scheduler is None else parts.scheduler.state_dict(),
            "scaler": parts.scaler.state_dict(),
            "hyperparameters": dict(parts.fresh),
            "random": generators,
            "data": {"samples": self.data.sampler.samples, "seed": self.config.seed},
            "total": self.total,
            "made_with": self.made_with,
        }
        last = self.stopped or self.position.step == self.total
        self.saving.begin(self.position.step, parts.model.state_dict(), state, began, urgent=last)

    def _evaluation_due(self) -> bool:
        if self.data.held_out is None or self.position.step == 0:
            return False
        every, position = self.config.eval_every_epochs, self.position
        at_end_of_epoch = position.samples == 0 and every > 0 and position.epoch % every == 0
        return at_end_of_epoch or position.step == self.total

    def _evaluate_unless_noted(self) -> None:
        """After a restart at a step that calls for an evaluation: take the noted result, or evaluate now."""
        metrics, step = self.metrics, self.position.step
        noted = self.world.on_rank_zero(lambda: None if metrics is None else metrics.evaluation(step))
        if noted is None:
            self._evaluate()
        else:
            self.results = {name: value for name, value in noted.items() if name != "samples"}

    def _evaluate(self) -> None:
        """Evaluate now; a stop in the middle leaves it to the next attempt. After the last step it is not stopped."""
        assert self.data.held_out is not None
        self.heartbeat.phase("evaluate", None)
        unfinished = self.position.step < self.total
        results = evaluate(
            self.job,
            self.parts.model,
            self.data.held_out,
            self.config,
            self.world,
            batch_size=max(1, -(-self.data.sampler.micro_size // self.world.size)),
            workers=self.data.workers,
            stop=self._stop_evaluating if unfinished else self._go_on_evaluating,
        )
        if results is None:
            self.stopped = True
            return
        self.results = results
        if self.metrics is not None:
            epoch = self._epoch_of_step()
            text = ", ".join(figure(name, value) for name, value in self.results.items())
            log.info("step %d/%d, epoch %d, held-out: %s", self.position.step, self.total, epoch + 1, text)
            figures = {"samples": self.data.held_out_samples, **self.results}
            self.metrics.note("eval", self.position.step, epoch, figures)
        self.saving.evaluated(self.position.step, results)

    def _go_on_evaluating(self) -> bool:
        """Between two batches of an evaluation: a sign of life, and no reason to stop."""
        self.heartbeat.phase("evaluate", None)
        return False

    def _stop_evaluating(self) -> bool:
        return self._go_on_evaluating() or self.stop.here()


class Speed:
    """Samples per second, without what saving and evaluating take; over ten seconds or a little more."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._since = time.monotonic()
        self._samples = 0

    def add(self, samples: int) -> None:
        self._samples += samples

    def per_second(self) -> float:
        seconds = time.monotonic() - self._since
        speed = self._samples / seconds if seconds > 0 else 0.0
        if seconds > 10:
            self.restart()
        return speed


def number_of_samples(samples: Dataset[Any]) -> int:
    """The length of a training job's dataset."""
    return len(samples)  # type: ignore[arg-type]
