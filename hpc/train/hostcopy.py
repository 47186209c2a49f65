"""Copies of a state in host memory that is kept from one copy to the next.

Memory that is touched for the first time costs several times the copy itself (256 MB: 12 ms into kept memory, 89 ms
into new), so a training that waits for the copy waits that much less from the second one on.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

PIECE = 4 << 20
"""Bytes that one thread copies at a time."""
MOST_THREADS = 8
"""More do not copy faster: the memory is the limit."""


class HostCopy:
    """Holds one copy of a state. A tensor of the copy is a plain one on the CPU, and shares memory where its origin did."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, bool], list[Tensor]] = {}  # by size and kind, whatever was copied the last time
        self._made: dict[tuple[int, bool], list[Tensor]] = {}
        self._copied: dict[tuple[torch.device, int, int], Tensor] = {}
        self._moves: list[tuple[Tensor, Tensor]] = []

    def take(self, state: Any) -> Any:
        """The state, containers copied too, as it is now. The copy before it is overwritten.

        The state may change as soon as this returns: copies from a GPU have ended by then.
        """
        try:
            copy = self._copy(state)
            _move(self._moves)
        finally:
            self._kept, self._made = self._made, {}
            self._copied, self._moves = {}, []
        return copy

    def _copy(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._copy_tensor(value.detach())
        if type(value) in (dict, OrderedDict, Counter):
            made = type(value)()
            for key, item in value.items():
                made[key] = self._copy(item)
            if type(value) is OrderedDict:  # a module's state_dict has the versions of its layers there
                made.__dict__.update(value.__dict__)
            return made
        if type(value) in (list, tuple, set):
            return type(value)(self._copy(item) for item in value)
        return value

    def _copy_tensor(self, tensor: Tensor) -> Tensor:
        plain = tensor.layout == torch.strided and type(tensor) is Tensor and not tensor.is_quantized
        if not plain or tensor.is_conj() or tensor.is_neg() or tensor.device.type not in ("cpu", "cuda"):
            return tensor.cpu().clone()
        storage = tensor.untyped_storage()
        host = self._host(storage)
        copy = torch.empty(0, dtype=tensor.dtype)
        copy.set_(host.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
        return copy

    def _host(self, storage: torch.UntypedStorage) -> Tensor:
        """The host memory that this storage goes to: [bytes] uint8, noted to be filled."""
        origin = (storage.device, storage.data_ptr(), storage.nbytes())
        if origin in self._copied and storage.nbytes():
            return self._copied[origin]
        kind = (storage.nbytes(), storage.device.type == "cuda")
        kept = self._kept.get(kind)
        host = kept.pop() if kept else torch.empty(kind[0], dtype=torch.uint8, pin_memory=kind[1])
        self._made.setdefault(kind, []).append(host)
        self._copied[origin] = host
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        self._moves.append((host, source))
        return host


def _move(moves: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Fill each first tensor with the second's bytes; by several threads where it is much."""
    pieces: list[tuple[int, int, int]] = []
    devices: set[torch.device] = set()
    for host, source in moves:
        if source.device.type == "cuda":
            host.copy_(source, non_blocking=True)  # into pinned memory, behind the kernels that are under way
            devices.add(source.device)
        else:
            size, to, since = host.numel(), host.data_ptr(), source.data_ptr()
            pieces += [(to + at, since + at, min(PIECE, size - at)) for at in range(0, size, PIECE)]
    todo = iter(pieces)

    def copy() -> None:
        for to, since, size in todo:
            ctypes.memmove(to, since, size)  # lets go of the GIL

    count = min(MOST_THREADS, len(os.sched_getaffinity(0)), sum(size for _, _, size in pieces) // PIECE)
    threads = [threading.Thread(target=copy, name="host copy") for _ in range(count - 1)]
    for thread in threads:
        thread.start()
    copy()
    for thread in threads:
        thread.join()
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
