"""The ranks of one run: device, process group, and every collective that the training core uses.

No other module calls a collective, so that the question "do all ranks come here?" is asked in one place.
"""

from __future__ import annotations

import atexit
import itertools
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from hpc import ranks
from hpc.errors import EnvironmentMismatch, HpcError, RendezvousError
from hpc.ranks import RankInfo
from hpc.schema import TrainConfig

log = logging.getLogger("hpc.train")

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
T = TypeVar("T")

_ended: list[dist.ProcessGroup] = []
"""Groups that were ended, kept until the interpreter leaves. Gloo's destructor joins threads that may still need the
GIL to give up a tensor. Python's own reference lets go of the GIL for it, but DDP's reducer, which may outlive it in
a traceback or a cycle, does not: were its reference the last one, that rank would hang (seen, about once in 50)."""
atexit.register(_ended.clear)

SAVE_PATIENCE = 6.0
"""How many times longer than a collective may wait the ranks wait for a save of rank 0: as with launch.hang_timeout_s."""
LOOKS_PER_S = 4000
"""No more looks at the store than this from all ranks together."""
ANSWER_S = 10.0
"""How long a rank whose collective timed out waits for the others to say that theirs did too. With 3 s a rank on a busy node
was once named as stuck that was only late to say so."""
CONSEQUENCE_S = 1.0
"""How long a rank that has lost a connection waits for another one to say that it gave up waiting: else that one has died."""
TIMED_OUT, WAITED = "timed-out", "waited"
"""Keys of the store: the ranks whose own collective timed out, and those that lost a connection in one."""


class CollectiveTimeout(HpcError):
    """A collective that did not end in time, since some rank took no part in it."""


class RankZeroFailed(HpcError):
    """What the other ranks raise when rank 0 failed at something that it alone does; rank 0 reports the cause."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class World:
    """This rank among the others. With one rank there is no process group, and every method is a short cut."""

    info: RankInfo
    device: torch.device
    timeout_s: float
    store: dist.Store | None = None
    _waits: Iterator[int] = field(default_factory=itertools.count, repr=False, compare=False)

    @property
    def rank(self) -> int:
        return self.info.rank

    @property
    def size(self) -> int:
        return self.info.world_size

    @property
    def is_rank_zero(self) -> bool:
        return self.info.rank == 0

    def total(self, tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
        """The sum of the ranks' tensors (of those of a group), written into `tensor`, on every rank of it."""
        if self.size > 1:
            dist.all_reduce(tensor, group=group)
        return tensor

    def group_of(self, value: int) -> dist.ProcessGroup | None:
        """The group of the ranks that give the same value; every rank comes here. None when there is no group at all."""
        if self.size == 1:
            return None
        values = self.all_gather(value)
        groups = {
            wanted: dist.new_group([rank for rank, other in enumerate(values) if other == wanted])
            for wanted in sorted(set(values))
        }
        own = groups[value]
        return own if isinstance(own, dist.ProcessGroup) else None

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on every rank; it has to be picklable."""
        if self.size == 1:
            return value
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0, device=self._object_device())
        received: T = box[0]
        return received

    def broadcast_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Write rank 0's values into the tensors of every rank."""
        if self.size > 1:
            for work in [dist.broadcast(tensor, src=0, async_op=True) for tensor in tensors]:
                work.wait()

    def gather(self, value: T) -> list[T] | None:
        """The values of all ranks in their order, on rank 0; None on the others."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.is_rank_zero else None
        dist.gather_object(value, values, dst=0)
        return values

    def all_gather(self, value: T) -> list[T]:
        """The values of all ranks in their order, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Return when every rank has come here."""
        if self.size > 1:
            dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)

    def on_rank_zero(self, act: Callable[[], T]) -> T:
        """What `act` returns on rank 0, on every rank; the others wait for it. The value has to be picklable.

        Raises:
            RankZeroFailed: on the other ranks, when `act` raised on rank 0 (which raises the cause itself).
        """
        if self.size == 1:
            return act()
        if not self.is_rank_zero:
            value, message, code = self.broadcast((None, "", 0))
            if message:
                raise RankZeroFailed(f"rank 0 failed: {message}", code)
            return value  # type: ignore[return-value]
        try:
            done = act()
        except Exception as error:
            code = error.exit_code if isinstance(error, HpcError) else 1
            self.broadcast((None, f"{type(error).__name__}: {error}", code))
            raise
        self.broadcast((done, "", 0))
        return done

    def await_rank_zero(self, act: Callable[[], object]) -> None:
        """Return when `act` has returned on rank 0; every rank comes here.

        For what may take longer than a collective may wait, as a save to a slow file system: the others wait in none.

        Raises:
            RankZeroFailed: on the other ranks, when `act` raised on rank 0 (which raises the cause itself).
            CollectiveTimeout: rank 0 has not come to its end within SAVE_PATIENCE times train.timeout_s.
        """
        if self.store is None:
            act()
            return
        key, patience_s = f"rank-zero/{next(self._waits)}", SAVE_PATIENCE * self.timeout_s
        if self.is_rank_zero:
            failed = [1, "ended"]
            try:
                act()
                failed = []
            except Exception as error:
                failed = [error.exit_code if isinstance(error, HpcError) else 1, f"{type(error).__name__}: {error}"]
                raise
            finally:
                self.store.set(key, json.dumps(failed))
            return
        deadline, wait_s = time.monotonic() + patience_s, 0.001
        while not self.store.check([key]):  # not `wait`, which would keep the process group's threads from the store
            if time.monotonic() > deadline:
                raise CollectiveTimeout(
                    f"rank {self.rank}: rank 0 has not ended a save within {patience_s:g} s ({SAVE_PATIENCE:g} times "
                    f"train.timeout_s): look at the file system of the run directory, or raise train.timeout_s"
                )
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, self._look_s)
        failed = json.loads(self.store.get(key))
        if failed:
            raise RankZeroFailed(f"rank 0 failed: {failed[1]}", failed[0])

    def blame(self, error: BaseException) -> CollectiveTimeout | None:
        """If `error` is a collective that timed out, on this rank or first on another: the error that names who was missing.

        Every rank that waited says so in the store; those who do not are stuck elsewhere, or gone.
        """
        if self.store is None or not _is_of_a_collective(error):
            return None
        late = "timed out" in str(error).lower()
        silent = None
        try:
            if late:
                self.store.append(TIMED_OUT, f"{self.rank} ")  # type: ignore[attr-defined]
            elif not self._another_timed_out(self.store):
                return None
            silent = self._who_is_silent(self.store)
        except (dist.DistError, RuntimeError):  # rank 0, whose store it is, has left
            if not late:
                return None
        if silent is None:
            who = "not known here, but to rank 0, which has given up before"
        else:
            who = f"rank {', '.join(map(str, silent))}" if silent else "no single rank, so perhaps the network"
        return CollectiveTimeout(
            f"rank {self.rank}: a collective did not end within train.timeout_s={self.timeout_s:g}; stuck or gone: {who}; "
            f"see the log of that rank, or raise train.timeout_s if it was only slow"
        )

    def _another_timed_out(self, store: dist.Store) -> bool:
        """Gloo closes the connections of a rank whose collective timed out: the others see that, and not that it is late."""
        store.append(WAITED, f"{self.rank} ")  # type: ignore[attr-defined]
        deadline = time.monotonic() + CONSEQUENCE_S
        while not store.check([TIMED_OUT]):
            if time.monotonic() > deadline:
                return False
            time.sleep(self._look_s)
        return True

    def _who_is_silent(self, store: dist.Store) -> list[int]:
        """The ranks that have not said within ANSWER_S, or until rank 0 left with its store, that they waited, too.

        Raises:
            RuntimeError: rank 0 had left before the first look.
        """
        deadline = time.monotonic() + ANSWER_S
        silent: list[int] | None = None
        while True:
            try:
                said = b" ".join(store.get(key) for key in (TIMED_OUT, WAITED) if store.check([key]))
            except (dist.DistError, RuntimeError):
                if silent is None:
                    raise
                return silent
            silent = sorted(set(range(self.size)).difference(map(int, said.split())))
            if not silent or time.monotonic() > deadline:
                return silent
            time.sleep(self._look_s)

    @property
    def _look_s(self) -> float:
        """Seconds between two looks of this rank at the store."""
        return max(0.1, self.size / LOOKS_PER_S)

    def _object_device(self) -> torch.device | None:
        return self.device if self.device.type == "cuda" else None


@contextmanager
def connect(config: TrainConfig, rendezvous_timeout_s: float) -> Iterator[World]:
    """Join the ranks that the environment names (torchrun's variables); the process group ends with the block.

    Raises:
        EnvironmentMismatch: the variables contradict each other or the GPUs of this machine.
        RendezvousError: the ranks did not find each other in time.
        CollectiveTimeout: in place of the error of a collective that timed out inside the block.
    """
    info = ranks.from_environ()
    device = choose_device(config.device, info)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if info.world_size == 1:
        yield World(info, device, config.timeout_s)
        return
    world = World(info, device, config.timeout_s, _join(info, device, config.timeout_s, rendezvous_timeout_s))
    try:
        yield world
    except BaseException as error:
        blamed = world.blame(error)
        _leave(abort=True)
        if blamed is not None:
            raise blamed from error
        raise
    _leave(abort=False)


def _join(info: RankInfo, device: torch.device, timeout_s: float, rendezvous_timeout_s: float) -> dist.Store:
    """Make the process group; returns a part of its store for our own keys."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise EnvironmentMismatch(
                f"{name} is not set, though RANK={info.rank} and WORLD_SIZE={info.world_size} are: "
                f"set it to rank 0's host and a free port there, or start with torchrun or `python -m hpc.node`"
            )
    patience = timedelta(seconds=rendezvous_timeout_s)
    try:
        store, rank, size = next(rendezvous("env://", info.rank, info.world_size, timeout=patience))
        store.set_timeout(patience)
        # torchrun keeps one store over its restarts: without a part of its own each start finds the addresses of the dead
        # ones (pytorch issue 135712). It counts the starts of each node alone, so this is no word for several nodes.
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if info.nodes == 1 else "0"
        store = dist.PrefixStore(f"start-{start}", store)
        on_gpu = device.type == "cuda"
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=dist.PrefixStore("group", store),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if on_gpu else None,
        )
    except (RuntimeError, ValueError, OSError) as error:
        if dist.is_initialized():
            _leave(abort=True)
        master = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise RendezvousError(
            f"rank {info.rank} of {info.world_size} on {socket.gethostname()} did not meet the others at {master} within "
            f"launch.rendezvous_timeout_s={rendezvous_timeout_s:g}: {reason}; look whether every rank has started, "
            f"and whether this host can reach that address"
        ) from error
    return dist.PrefixStore("hpc", store)


def _is_of_a_collective(error: BaseException) -> bool:
    """Gloo's error has the place in its source in it, and no type of its own; NCCL's are DistErrors.

    Others time out, too, and are no rank's fault: "DataLoader timed out after 5 seconds" is a RuntimeError.
    """
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/transport" in str(error))


def _leave(*, abort: bool) -> None:
    """End the process group. After a failure it is aborted first, since NCCL would wait for what never ends."""
    group = dist.group.WORLD
    if group is None:
        return
    _ended.append(group)
    try:
        if abort and dist.get_backend() == "nccl":
            group.abort()
        dist.destroy_process_group()
    except (RuntimeError, ValueError) as error:
        if not abort:
            raise
        log.debug("the process group could not be ended cleanly: %s", error)


def choose_device(wanted: str, info: RankInfo) -> torch.device:
    """The device of this worker: DEVICE_INDEX as the launcher set it, else LOCAL_RANK, among the visible GPUs.

    "auto" falls back to the CPU where there is no GPU, or where the launcher gave this worker none (DEVICE_INDEX is
    set and empty). GPUs that Slurm allocated on a host without an NVIDIA driver are none (a trial cluster's); with a
    driver they are real, and a torch that cannot use them is an error and no reason to train slowly.

    Raises:
        EnvironmentMismatch: no GPU although one is needed, or an index beyond the visible ones; names both counts.
    """
    if wanted == "cpu":
        return torch.device("cpu")
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = "CUDA_VISIBLE_DEVICES is unset" if listed is None else f"CUDA_VISIBLE_DEVICES={listed}"
    if visible == 0:
        built_for = f"torch {torch.__version__} is built for CUDA {torch.version.cuda}"
        if torch.version.cuda is None:
            built_for = f"torch {torch.__version__} is built without CUDA"
        if wanted == "cuda" or (info.device_index is not None and NVIDIA_DRIVER.exists()):
            asked = "train.device=cuda" if wanted == "cuda" else f"DEVICE_INDEX={info.device_index}"
            raise EnvironmentMismatch(
                f"{asked}, but torch can use no GPU on {socket.gethostname()} ({seen}; {built_for}): "
                f"ask Slurm for GPUs (slurm.gpus_per_node) and install a torch for this driver's CUDA, "
                f"or train on the CPU with train.device=cpu"
            )
        if (torch.version.cuda is not None or info.device_index is not None) and info.rank == 0:
            log.warning("training on the CPU: no GPU is usable on %s (%s; %s)", socket.gethostname(), seen, built_for)
        return torch.device("cpu")
    if wanted == "auto" and os.environ.get("DEVICE_INDEX") == "":
        log.warning("training on the CPU: the launcher gave this worker no GPU (DEVICE_INDEX is empty)")
        return torch.device("cpu")
    index = info.local_rank if info.device_index is None else info.device_index
    if info.device_index is None and visible == 1:
        index = 0
    if index >= visible:
        name = "LOCAL_RANK" if info.device_index is None else "DEVICE_INDEX"
        raise EnvironmentMismatch(
            f"{name}={index} on {socket.gethostname()}, but only {visible} GPUs are visible ({seen}): start one worker "
            f"per visible GPU ({visible} per node), or make all GPUs of the node visible to every worker"
        )
    return torch.device("cuda", index)
