"""How a model is spread over GPUs: DistributedDataParallel, SyncBatchNorm, and DataParallel for a quick trial."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DataParallel, DistributedDataParallel

from hpc.errors import ConfigError
from hpc.schema import TrainConfig
from hpc.train.distributed import World
from hpc.train.sampler import EpochSampler

log = logging.getLogger("hpc.train")

SWITCH = "train.find_unused_parameters=true"


def place(model: nn.Module, config: TrainConfig, world: World) -> nn.Module:
    """The model on this rank's device, its BatchNorm layers synchronised where that has a meaning and is wanted."""
    if config.sync_batchnorm and _has_batchnorm(model):
        if world.device.type == "cuda" and world.size > 1:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        elif world.is_rank_zero:
            where = "on the CPU" if world.device.type == "cpu" else "with one GPU"
            log.info("BatchNorm stays as it is %s; with several GPUs it becomes SyncBatchNorm", where)
    return model.to(world.device)


def wrap(model: nn.Module, config: TrainConfig, world: World) -> nn.Module:
    """The model as the loss calls it: DDP with several ranks, DataParallel if asked for, else the model itself.

    Raises:
        ConfigError: DataParallel is asked for with several ranks.
    """
    if config.strategy == "dp":
        return _data_parallel(model, world)
    if world.size == 1:
        return model
    wrapped = DistributedDataParallel(
        model,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        find_unused_parameters=config.find_unused_parameters,
    )
    _settle_buckets(wrapped)
    return wrapped


def _settle_buckets(wrapped: DistributedDataParallel) -> None:
    """Have DDP lay out its buckets before the first step, in reverse order of the parameters.

    It would do so after the first step of each process. With three ranks or more the order of a sum depends on the
    gradient's place in its bucket, so the first step after a restart would differ in the last bits from the same step
    of an uninterrupted run. One exchange of zeros takes the place of that first step.
    """
    trainable = [p for p in wrapped.module.parameters() if p.requires_grad]
    if wrapped.find_unused_parameters or not trainable:  # then the buckets stay as they are
        return
    total = torch.zeros((), device=trainable[0].device)
    for parameter in trainable:
        total = total + parameter.sum()
    wrapped.reducer.prepare_for_forward()
    wrapped.reducer.prepare_for_backward([])
    total.backward(torch.zeros_like(total))
    for parameter in trainable:
        parameter.grad = None


def _data_parallel(model: nn.Module, world: World) -> nn.Module:
    if world.size > 1:
        raise ConfigError(
            f"train.strategy=dp with {world.size} ranks: DataParallel is for a single process; use train.strategy=ddp"
        )
    gpus = torch.cuda.device_count() if world.device.type == "cuda" else 0
    if gpus < 2:
        log.warning("train.strategy=dp with %d GPUs: nothing to spread over, so the model runs as it is", gpus)
        return model
    log.warning("train.strategy=dp is for a quick trial: DDP (one process per GPU) is faster, also on one node")
    return DataParallel(model, output_device=world.device)


def synchronising(wrapped: nn.Module, last: bool) -> AbstractContextManager[None]:
    """Around forward and backward of one micro-batch: ranks exchange gradients in the last one of a step only."""
    if isinstance(wrapped, DistributedDataParallel) and not last:
        context: AbstractContextManager[None] = wrapped.no_sync()
        return context
    return nullcontext()


def scalar(loss: Tensor, wrapped: nn.Module, samples: int) -> Tensor:
    """The mean loss over the batch. A model that returns its loss under DataParallel gives one for each replica:
    [replicas], each the mean over that replica's part; they are weighted by the sizes of the parts.

    Raises:
        ValueError: the loss is not a scalar.
    """
    if loss.dim() == 0:
        return loss
    if isinstance(wrapped, DataParallel) and loss.dim() == 1:
        parts = [len(part) for part in torch.arange(samples).chunk(len(wrapped.device_ids))]
        if len(parts) == loss.shape[0]:
            return (loss * loss.new_tensor(parts)).sum() / samples
    raise ValueError(
        f"loss() returned a tensor of shape {list(loss.shape)}; a scalar, the mean over the batch, was needed"
    )


@contextmanager
def explained(wrapped: nn.Module) -> Iterator[None]:
    """Around one micro-batch: DDP's complaint about unused parameters, in terms of names and of our switch.

    Raises:
        ConfigError: some parameters took no part in the loss of the step before.
    """
    try:
        yield
    except RuntimeError as error:
        if "Expected to have finished reduction" not in str(error):
            raise
        raise _unused(without_gradient(wrapped)) from error


def require_gradients(wrapped: nn.Module, config: TrainConfig) -> None:
    """After the backward pass of a step: under DDP every parameter has to have a gradient.

    Raises:
        ConfigError: lists the parameters that have none, and names the switch that allows it.
    """
    if isinstance(wrapped, DistributedDataParallel) and not config.find_unused_parameters:
        missing = without_gradient(wrapped)
        if missing:
            raise _unused(missing)


def without_gradient(wrapped: nn.Module) -> list[str]:
    """The names of the trainable parameters that have no gradient, as the job's own model calls them."""
    module = wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped
    return [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None]


def _unused(names: list[str]) -> ConfigError:
    shown = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
    listed = f"these parameters got no gradient: {shown}" if names else "some parameters got no gradient on some rank"
    return ConfigError(
        f"{listed}; DDP needs one for each: take them out of the model or the optimizer (requires_grad_(False)), "
        f"or set {SWITCH}"
    )


def refuse_lonely_samples(model: nn.Module, sampler: EpochSampler) -> None:
    """Refuse, before the first step, a BatchNorm1d that would have to make statistics of a single sample.

    Raises:
        ConfigError: says in which batch, and which batch size would do.
    """
    lonely = [name for name, layer in model.named_modules() if isinstance(layer, nn.BatchNorm1d)]
    full, final = sampler.smallest_shares()
    if not lonely or min(full, final) > 1 or not model.training:
        return
    per_rank = f"{sampler.samples} samples, train.batch_size={sampler.batch_size}, {sampler.ranks} ranks"
    if full <= 1:
        raise ConfigError(
            f"{lonely[0]} (BatchNorm1d) needs two samples at a time, but a rank gets {full} in a micro-batch ({per_rank}): "
            f"raise train.batch_size or lower train.accumulate"
        )
    raise ConfigError(
        f"{lonely[0]} (BatchNorm1d) needs two samples at a time, but in the last batch of an epoch a rank gets {final} "
        f"({per_rank}): set train.drop_last=true, or choose another train.batch_size"
    )


def _has_batchnorm(model: nn.Module) -> bool:
    return any(isinstance(m, _BatchNorm) and not isinstance(m, nn.SyncBatchNorm) for m in model.modules())
