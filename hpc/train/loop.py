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

from hpc.errors import ConfigError, EnvironmentMismatch
from hpc.rundir import RunDirectory
from hpc.schema import TrainConfig
from hpc.train import checkpoint, randomness, strategy
from hpc.train.checkpoint import Checkpoints
from hpc.train.distributed import World
from hpc.train.evaluation import evaluate
from hpc.train.heartbeat import Heartbeat
from hpc.train.interval import Pace, Plan, dear, history
from hpc.train.job import TrainingJob
from hpc.train.loader import begin, end_workers, make_loader, set_threads_and_workers, to_device
from hpc.train.metrics import Metrics
from hpc.train.origin import differences, origin, other_settings
from hpc.train.precision import autocast
from hpc.train.progress import Progress, figure
from hpc.train.record import Record
from hpc.train.sampler import EpochSampler, MicroBatch
from hpc.train.saving import Saved, Saving, expected_bytes
from hpc.train.stop import Stop

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


@dataclass(frozen=True)
class Data:
    """The samples of a job, and how this rank takes them."""

    train: Dataset[Any]
    held_out: Dataset[Any] | None
    sampler: EpochSampler
    workers: int

    @property
    def held_out_samples(self) -> int:
        return 0 if self.held_out is None else _length(self.held_out)


@dataclass(frozen=True)
class Parts:
    """What a step changes. `model` is the job's own, `wrapped` the same one as the loss calls it."""

    model: nn.Module
    wrapped: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler | None
    scaler: torch.amp.GradScaler


def train(
    job: TrainingJob,
    config: TrainConfig,
    world: World,
    run: RunDirectory,
    progress: Progress,
    stop: Stop,
    configuration: str = "",
) -> Outcome:
    """Train a job to its end, from its newest whole checkpoint on if there is one. Every rank calls this.

    A notice that `stop` has heard ends it earlier, with a checkpoint of the step that it has come to.
    `configuration`: all settings of this attempt as YAML; they stand in the checkpoints.

    Raises:
        ConfigError: settings that do not fit the data, the model or the number of ranks.
        EnvironmentMismatch: ranks that see different data.
        CheckpointError: a checkpoint that cannot be written, or none that can be read though there are some.
    """
    heartbeat = Heartbeat.from_environ()
    checkpoints = Checkpoints(run.checkpoints, config.keep_checkpoints, config.keep_every_steps)
    record = Record.of(run, world.is_rank_zero)
    if stop.here():
        return _not_begun(checkpoints, world, record, stop)
    randomness.seed_all(config.seed)
    data = _take_data(job, config, world)
    if stop.here():
        return _not_begun(checkpoints, world, record, stop)
    newest, files = world.on_rank_zero(lambda: _newest(checkpoints))
    saved = None if newest is None else _read(newest, files)
    position = _position(saved[1], data.sampler, config) if saved else Position()
    total = _total_steps(position, data.sampler, config)
    made_with = origin(job) if world.is_rank_zero else {}
    if newest is not None and saved and world.is_rank_zero and position.step < total:
        _tell_differences(newest, saved[1], configuration, made_with)
    randomness.seed_all(config.seed)
    parts = _make_parts(job, config, world, data.sampler, total, saved)
    if saved:
        if position.step < total:
            log.info("resuming at step %d of %d from %s", position.step, total, newest)
        _restore_randomness(saved[1], config, world, position)
    else:
        randomness.seed_all(config.seed, 1 + world.rank)
    past = history(record.events())
    record.note("resumed", step=position.step, checkpoint=None if newest is None else newest.name)
    if position.step < total:
        world.on_rank_zero(checkpoints.require_writable)
    metrics = Metrics(run) if world.is_rank_zero else None
    if metrics is not None:
        metrics.rewind(position.step)
    saving = Saving(
        checkpoints,
        configuration,
        on_saved=lambda saved: _note_saved(record, saved),
        expected_bytes=expected_bytes([*parts.model.parameters(), *parts.model.buffers()]),
    )
    stop.expect_save(saving.seconds_needed)
    every_s = 0.0 if config.save_every_steps is not None else config.save_every_s
    plan = Plan(time.monotonic(), past, world.info.nodes, every_s)
    loop = Loop(
        job,
        config,
        world,
        data,
        parts,
        saving,
        plan,
        record,
        metrics,
        progress,
        stop,
        heartbeat,
        position,
        total,
        made_with,
    )
    try:
        return loop.run()
    finally:
        saving.close()
        if position.step < total:
            end_workers()  # torch would wait five seconds for each that hangs
        progress.close()
        if metrics is not None:
            metrics.close()


class Loop:
    """The steps of one attempt. All ranks go through the same sequence of steps, savings and evaluations."""

    def __init__(
        self,
        job: TrainingJob,
        config: TrainConfig,
        world: World,
        data: Data,
        parts: Parts,
        saving: Saving,
        plan: Plan,
        record: Record,
        metrics: Metrics | None,
        progress: Progress,
        stop: Stop,
        heartbeat: Heartbeat,
        position: Position,
        total: int,
        made_with: dict[str, Any],
    ) -> None:
        self.job = job
        self.config = config
        self.world = world
        self.data = data
        self.parts = parts
        self.saving = saving
        self.plan = plan
        self.record = record
        self.metrics = metrics
        self.progress = progress
        self.stop = stop
        self.heartbeat = heartbeat
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
        self._pace = Pace(time.monotonic())
        self._measured: Saved | None = None
        self._warned = False
        self._saved_at = position.step  # where a checkpoint stands; at 0 there is nothing to save
        self._first = position.step

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
        if self.stopped:
            self.record.note("stopping", step=self.position.step, reason=self.stop.reason)
        self.heartbeat.phase("save", None)
        if self._saved_at != self.position.step:
            self._save()
        self.world.on_rank_zero(self.saving.finish)  # no rank leaves before the last save is durable
        return Outcome(
            total_steps=self.total,
            steps=self.position.step - first,
            seconds=time.monotonic() - began,
            metrics=self.results,
            held_out=self.data.held_out_samples,
            checkpoint=self.saving.path(self.position.step) if self.position.step else None,
            stopped_at=self.position.step if self.stopped else None,
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
            self.parts.scaler.scale(loss if weight == 1.0 else loss * weight).backward()
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
        self.heartbeat.beat(self.position.step)
        self._pace.step(time.monotonic(), self.saving.under_way)
        self.saving.check()
        if self.position.step == self._first + 1:
            self.record.note("first_step", step=self.position.step)
        if self._log_due(self.position.step):
            self._log(samples, rate)
        self.progress.step(self.position.step)
        self._save_and_evaluate()
        self._stop_if_agreed()

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
        if self.metrics is None:
            return
        step, epoch, speed = self.position.step, self._epoch_of_step(), self._speed.per_second()
        self.progress.figures(step, epoch, loss, speed)
        figures = {"loss": loss, "lr": rate, "samples_per_s": round(speed, 1), "time": round(time.time(), 3)}
        self.metrics.note("train", step, epoch, figures)

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
        if save:
            self._save()
        if evaluate:
            self._evaluate()
        if save or evaluate:
            self._restart_clocks()
            self.heartbeat.beat(step)

    def _restart_clocks(self) -> None:
        """What was done until now was no step."""
        self._speed.restart()
        self._pace.restart(time.monotonic())

    def _save(self) -> None:
        """Begin a checkpoint of this very position; rank 0 writes, with the random generators of every rank."""
        self.heartbeat.phase("save", None)
        began, self._saved_at = time.monotonic(), self.position.step
        self._save_after = 0
        self.plan.save_begins(began)
        self._pace.save_begins()
        generators = self.world.gather(randomness.capture(self.world.device))
        if generators is None:
            return
        parts = self.parts
        state = {
            "position": asdict(self.position),
            "optimizer": parts.optimizer.state_dict(),
            "scheduler": None if parts.scheduler is None else parts.scheduler.state_dict(),
            "scaler": parts.scaler.state_dict(),
            "random": generators,
            "data": {"samples": self.data.sampler.samples, "seed": self.config.seed},
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
            stop=self.stop.here if unfinished else lambda: False,
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


def _take_data(job: TrainingJob, config: TrainConfig, world: World) -> Data:
    train, held_out = job.train_data(), job.eval_data()
    samples = _length(train)
    sizes = world.all_gather((samples, 0 if held_out is None else _length(held_out)))
    for rank, size in enumerate(sizes):
        if size != sizes[0]:
            raise EnvironmentMismatch(
                f"rank 0 has {sizes[0][0]} training and {sizes[0][1]} held-out samples, rank {rank} has {size[0]} and "
                f"{size[1]}: all ranks need the same data; look whether the folder is complete on every node"
            )
    if samples == 0:
        raise ConfigError("the training data has no samples; look at the job's data settings")
    if config.batch_size // config.accumulate < world.size:
        raise ConfigError(
            f"train.batch_size={config.batch_size} in {config.accumulate} micro-batches over {world.size} ranks: each rank "
            f"needs a sample of each, so at least {world.size * config.accumulate} were needed"
        )
    if config.drop_last and samples < config.batch_size:
        raise ConfigError(
            f"train.drop_last leaves out all {samples} samples, since train.batch_size={config.batch_size}: lower it"
        )
    sampler = EpochSampler(
        samples,
        batch_size=config.batch_size,
        accumulate=config.accumulate,
        rank=world.rank,
        ranks=world.size,
        seed=config.seed,
        drop_last=config.drop_last,
    )
    return Data(train, held_out, sampler, set_threads_and_workers(config, world))


def _make_parts(
    job: TrainingJob,
    config: TrainConfig,
    world: World,
    sampler: EpochSampler,
    total: int,
    saved: tuple[dict[str, Any], dict[str, Any]] | None,
) -> Parts:
    """Model, optimizer, schedule and scaler; freshly made, or as they were saved."""
    model = strategy.place(job.model(), config, world)
    strategy.refuse_lonely_samples(model, sampler)
    if saved:
        model.load_state_dict(saved[0])
    optimizer = job.optimizer(model)
    scheduler = job.scheduler(optimizer, total)
    scaler = torch.amp.GradScaler(world.device.type, enabled=config.precision == "fp16")
    if saved:
        optimizer.load_state_dict(saved[1]["optimizer"])
        if scheduler is not None and saved[1]["scheduler"] is not None:
            scheduler.load_state_dict(saved[1]["scheduler"])
        scaler.load_state_dict(saved[1]["scaler"])
    return Parts(model, strategy.wrap(model, config, world), optimizer, scheduler, scaler)


def _not_begun(checkpoints: Checkpoints, world: World, record: Record, stop: Stop) -> Outcome:
    """Stopped before the first step of this attempt: the checkpoints are as they were."""
    steps = world.on_rank_zero(checkpoints.steps)
    at = steps[-1] if steps else 0
    record.note("stopping", step=at, reason=stop.reason)
    newest = checkpoints.path(at) if steps else None
    return Outcome(at, 0, 0.0, {}, 0, newest, stopped_at=at)


def _newest(checkpoints: Checkpoints) -> tuple[Path | None, dict[str, int]]:
    """The checkpoint to go on from, and the sizes of its files, for ranks that may not see them yet."""
    checkpoints.prepare()
    newest = checkpoints.newest()
    return newest, {} if newest is None else checkpoint.sizes(newest)


def _read(path: Path, files: Mapping[str, int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What rank 0 has chosen and found whole, as soon as this rank sees it too."""
    checkpoint.await_visible(path, files)
    return checkpoint.read(path)


def _tell_differences(path: Path, trainer: Mapping[str, Any], configuration: str, made_with: Mapping[str, Any]) -> None:
    """Name what is not as it was when the checkpoint was made; the run goes on with what holds now."""
    for line in [
        *other_settings(checkpoint.configuration(path), configuration),
        *differences(trainer.get("made_with", {}), made_with),
    ]:
        log.info("changed since the checkpoint: %s", line)


def _note_saved(record: Record, saved: Saved) -> None:
    seconds = {"stall_s": round(saved.stall_s, 4), "seconds": round(saved.seconds, 3)}
    record.note("saved", step=saved.step, checkpoint=saved.checkpoint, **seconds, bytes=saved.bytes)


def _position(trainer: Mapping[str, Any], sampler: EpochSampler, config: TrainConfig) -> Position:
    """Where a checkpoint stands, after a check that the order of the samples is still the same."""
    for name, now in (("samples", sampler.samples), ("seed", config.seed)):
        then = trainer["data"][name]
        if then != now:
            raise ConfigError(
                f"the run's checkpoint was made with {then} as its {'train.seed' if name == 'seed' else 'number of samples'}, "
                f"now it is {now}: the position in the data would be lost; set it back, or use another run directory"
            )
    position = Position(**trainer["position"])
    if position.samples > 0 and sampler.steps_left(position.samples) == 0:  # the batch size grew
        position.epoch, position.samples = position.epoch + 1, 0
    return position


def _total_steps(position: Position, sampler: EpochSampler, config: TrainConfig) -> int:
    """Optimizer steps of the whole run: those done and those that are left."""
    whole_epochs = config.epochs - position.epoch
    left = whole_epochs * sampler.steps_left(0)
    if position.samples:
        left += sampler.steps_left(position.samples) - sampler.steps_left(0)
    total = position.step + max(0, left)
    return total if config.max_steps is None else max(position.step, min(total, config.max_steps))


def _restore_randomness(trainer: Mapping[str, Any], config: TrainConfig, world: World, position: Position) -> None:
    generators = trainer["random"]
    if len(generators) == world.size:
        randomness.restore(generators[world.rank], world.device)
        return
    log.debug("the checkpoint is of %d ranks, now there are %d: new random streams", len(generators), world.size)
    randomness.seed_all(config.seed + position.step, 1 + world.rank)


def _length(samples: Dataset[Any]) -> int:
    """The number of samples; a dataset of a training job has a length."""
    return len(samples)  # type: ignore[arg-type]
