"""Data loaders: batches in the sampler's order, by as many processes as the rank has cores for."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from hpc.schema import TrainConfig
from hpc.train.distributed import World
from hpc.train.job import TrainingJob
from hpc.train.randomness import seed_sample
from hpc.train.sampler import SampleKey

MOST_WORKERS = 8
"""More data-loader processes per rank seldom help, and each costs memory and start-up time."""

_FOR_THE_RANK = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1  # prctl(2)


class KeyedDataset(Dataset[Any]):
    """The job's samples by (epoch, index). In a data-loader process every sample is seeded by both.

    With no such process the rank's own generators run on instead: they are part of its checkpoints.
    """

    def __init__(self, samples: Dataset[Any], seed: int) -> None:
        self.samples = samples
        self.seed = seed

    def __getitem__(self, key: SampleKey) -> Any:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: list[SampleKey]) -> Any:
        seeded = get_worker_info() is not None
        many = getattr(self.samples, "__getitems__", None)
        if callable(many):
            if seeded:
                seed_sample(self.seed, *keys[0])
            return many([index for _, index in keys])
        taken = []
        for epoch, index in keys:
            if seeded:
                seed_sample(self.seed, epoch, index)
            taken.append(self.samples[index])
        return taken


def make_loader(
    job: TrainingJob,
    samples: Dataset[Any],
    sampler: Sampler[list[SampleKey]],
    config: TrainConfig,
    world: World,
    *,
    workers: int,
    persistent: bool,
) -> DataLoader[Any]:
    """A loader of the sampler's batches, on the CPU; pinned memory when they go to a GPU."""
    return DataLoader(
        KeyedDataset(samples, config.seed),
        batch_sampler=sampler,
        collate_fn=job.collate,
        num_workers=workers,
        persistent_workers=persistent and workers > 0,
        multiprocessing_context="fork" if workers else None,
        worker_init_fn=partial(prepare_worker, os.getpid()) if workers else None,
        pin_memory=world.device.type == "cuda",
        generator=torch.Generator().manual_seed(config.seed),
    )


def begin(loader: DataLoader[Any]) -> Iterator[Any]:
    """The loader's batches. Its processes are born deaf, so that no signal can kill one before it is prepared."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_THE_RANK)
    try:
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def prepare_worker(rank_process: int, worker: int) -> None:
    """What a data-loader process does first: signals that are meant for its rank are not its business.

    A terminal's interrupt and a notice of the scheduler reach the whole process group, and the rank decides. So the
    process ignores even SIGTERM; the kernel kills it when its rank ends, however that ends, and `end_workers` before.
    Source: prctl(2), PR_SET_PDEATHSIG.
    """
    for number in _FOR_THE_RANK:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FOR_THE_RANK)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != rank_process:
        os.kill(os.getpid(), signal.SIGKILL)


def end_workers() -> None:
    """Kill what data-loader processes are left; without it one that hangs in a sample would keep its rank from ending."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's own handler would raise
    for child in multiprocessing.active_children():
        if child.daemon:  # Python would end these too, but by a SIGTERM that they ignore, and wait for them
            child.kill()


def set_threads_and_workers(config: TrainConfig, world: World, environ: Mapping[str, str] | None = None) -> int:
    """Give this rank's computing its share of the cores; returns the number of its data-loader processes.

    train.threads, OMP_NUM_THREADS and train.loader_workers are the user's word. Otherwise: the cores that this process
    may use, divided by the ranks of this node that may use the same ones.
    """
    env = os.environ if environ is None else environ
    share = core_share(world)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    elif not env.get("OMP_NUM_THREADS"):
        torch.set_num_threads(max(1, share))
    if config.loader_workers is not None:
        return config.loader_workers
    return max(0, min(MOST_WORKERS, share - 1))


def core_share(world: World) -> int:
    """The whole cores that this rank has for itself; 0 when it shares each of them."""
    mine = sorted(os.sched_getaffinity(0))
    everyone = world.all_gather((world.info.node_rank, mine))
    rivals = sum(node == world.info.node_rank and not set(cores).isdisjoint(mine) for node, cores in everyone)
    return len(mine) // max(1, rivals)


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with all its tensors on the device; lists, tuples and mappings are kept as they are."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(value, device) for value in batch)
    return batch
