"""From a training job to its loop: the data, the parts, and where the newest whole checkpoint left them."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hpc.errors import ConfigError, EnvironmentMismatch
from hpc.rundir import RunDirectory
from hpc.schema import TrainConfig
from hpc.train import checkpoint, hyperparameters, randomness, strategy
from hpc.train.best import Best
from hpc.train.checkpoint import Checkpoints
from hpc.train.distributed import World
from hpc.train.heartbeat import Heartbeat
from hpc.train.interval import Plan, history
from hpc.train.job import TrainingJob
from hpc.train.loader import end_workers, set_threads_and_workers
from hpc.train.loop import Data, Loop, Outcome, Parts, Position, Tools, number_of_samples
from hpc.train.metrics import Metrics
from hpc.train.origin import differences, origin, other_settings
from hpc.train.progress import Progress
from hpc.train.record import Record
from hpc.train.sampler import EpochSampler
from hpc.train.saving import Saved, Saving, expected_bytes
from hpc.train.stop import Stop

log = logging.getLogger("hpc.train")


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
    best = None if config.best_metric is None else Best(config.best_metric, config.best_mode)
    checkpoints = Checkpoints(run.checkpoints, config.keep_checkpoints, config.keep_every_steps, best)
    record = Record.of(run, world.is_rank_zero)
    if stop.here():
        return _not_begun(checkpoints, world, record, stop)
    randomness.seed_all(config.seed)
    data = _take_data(job, config, world)
    if stop.here():
        return _not_begun(checkpoints, world, record, stop)
    made_with = origin(job) if world.is_rank_zero else {}
    position, total, parts, newest = _resume(job, config, world, data, checkpoints, configuration, made_with)
    past = history(record.events())
    record.note("resumed", step=position.step, checkpoint=None if newest is None else newest.name)
    if position.step < total:
        world.on_rank_zero(checkpoints.require_writable)
    metrics = Metrics(run) if world.is_rank_zero else None
    if metrics is not None:
        metrics.rewind(position.step)
        if best is not None:
            best.take(metrics.evaluations())
    saving = Saving(
        checkpoints,
        configuration,
        on_saved=lambda saved: _note_saved(record, saved),
        expected_bytes=expected_bytes([*parts.model.parameters(), *parts.model.buffers()]),
        on_writing=heartbeat.writing,
    )
    stop.expect_save(saving.seconds_needed)
    every_s = 0.0 if config.save_every_steps is not None else config.save_every_s
    plan = Plan(time.monotonic(), past, world.info.nodes, every_s)
    tools = Tools(saving, plan, record, metrics, progress, stop, heartbeat)
    loop = Loop(job, config, world, data, parts, tools, position, total, made_with)
    try:
        return loop.run()
    finally:
        saving.close()
        if position.step < total:
            end_workers()  # torch would wait five seconds for each that hangs
        progress.close()
        if metrics is not None:
            metrics.close()


def _resume(
    job: TrainingJob,
    config: TrainConfig,
    world: World,
    data: Data,
    checkpoints: Checkpoints,
    configuration: str,
    made_with: dict[str, Any],
) -> tuple[Position, int, Parts, Path | None]:
    """Position, steps of the whole run, and parts: from the newest whole checkpoint, or new ones; and that checkpoint."""
    newest, files = world.on_rank_zero(lambda: _newest(checkpoints))
    saved = None if newest is None else _read(newest, files)
    position = _position(saved[1], data.sampler, config) if saved else Position()
    total = _total_steps(position, data.sampler, config)
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
    return position, total, parts, newest


def _take_data(job: TrainingJob, config: TrainConfig, world: World) -> Data:
    train, held_out = job.train_data(), job.eval_data()
    samples = number_of_samples(train)
    sizes = world.all_gather((samples, 0 if held_out is None else number_of_samples(held_out)))
    for rank, size in enumerate(sizes):
        if size != sizes[0]:
            raise EnvironmentMismatch(
                f"rank 0 has {sizes[0][0]} training and {sizes[0][1]} held-out samples, rank {rank} has {size[0]} and "
                f"{size[1]}: all ranks need the same data; look whether the folder is complete on every node"
            )
    if config.best_metric is not None and held_out is None:
        raise ConfigError(f"train.best_metric={config.best_metric}: the job has no held-out samples to evaluate on")
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
    fresh = hyperparameters.fresh(optimizer, scheduler)
    if saved:
        then = saved[1]
        # on the CPU the optimizer would keep the tensors as they are, which are mapped from the checkpoint
        optimizer.load_state_dict(copy.deepcopy(then["optimizer"]) if world.device.type == "cpu" else then["optimizer"])
        if scheduler is not None and then["scheduler"] is not None:
            state = then["scheduler"]
            if then.get("total", total) != total:  # more epochs than before, say
                other = job.scheduler(job.optimizer(model), then["total"])
                assert other is not None
                state = _with_new_total(state, other.state_dict(), scheduler.state_dict())
            scheduler.load_state_dict(state)
        hyperparameters.renew(optimizer, scheduler, then.get("hyperparameters", fresh), fresh)
        if then["scaler"]:  # of a run without fp16 it is empty
            scaler.load_state_dict(then["scaler"])
    return Parts(model, strategy.wrap(model, config, world), optimizer, scheduler, scaler, fresh)


def _with_new_total(saved: Any, then: Any, now: Any) -> Any:
    """The saved state of a schedule, but for what a new one has otherwise since the run has another number of steps.

    `then` and `now`: the states of new schedules for the old and for the new number.
    """
    if isinstance(now, dict) and isinstance(then, dict) and isinstance(saved, dict):
        kept = saved.keys() - now.keys() | {"_last_lr"}
        return {
            name: saved[name] if name in kept else _with_new_total(saved[name], then.get(name), now[name])
            for name in saved
        }
    if isinstance(now, (list, tuple)) and isinstance(then, (list, tuple)) and len(saved) == len(then) == len(now):
        return type(now)(map(_with_new_total, saved, then, now))
    return saved if then == now else now


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
