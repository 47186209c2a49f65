"""Who holds this node's GPUs and how much of their memory, asked of the driver (NVML) without starting CUDA."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

FREE_MIB = 1024
"""Used by a GPU that nobody holds: what the driver and its daemons keep for themselves is well below."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU as it was found."""

    name: str
    """As in CUDA_VISIBLE_DEVICES: an index or a UUID."""
    used_mib: int
    holders: dict[int, int] = field(default_factory=dict)
    """Process id -> MiB, 0 where the driver does not tell."""


def ask(names: Sequence[str] | None, note: Callable[[str], None]) -> list[Gpu]:
    """The GPUs with these names (None: all of the node); [] with a note where there is no driver to ask.

    A GPU that the driver does not know under its name is left out, with a note. Process ids are those of the host, so
    inside a container with ids of its own they are not these.
    """
    if names is not None and not names:
        return []
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:  # no pynvml, no library, no driver
        note(f"no GPU can be asked about: {error or type(error).__name__}")
        return []
    found = []
    try:
        for name in names if names is not None else [str(index) for index in range(pynvml.nvmlDeviceGetCount())]:
            try:
                found.append(_ask_one(pynvml, name))
            except pynvml.NVMLError as error:
                note(f"GPU {name} cannot be asked about: {error}")
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
    return found


def _ask_one(pynvml: Any, name: str) -> Gpu:
    is_index = name.isascii() and name.isdecimal()
    handle = pynvml.nvmlDeviceGetHandleByIndex(int(name)) if is_index else pynvml.nvmlDeviceGetHandleByUUID(name)
    try:  # the second form leaves out what the driver keeps for itself
        used = int(pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used)
    except (AttributeError, pynvml.NVMLError):
        used = int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
    holders: dict[int, int] = {}
    for pid, size in _holders(pynvml, handle):
        holders[pid] = max(holders.get(pid, 0), size >> 20)
    return Gpu(name=name, used_mib=used >> 20, holders=holders)


def _holders(pynvml: Any, handle: Any) -> Iterator[tuple[int, int]]:
    for get in (pynvml.nvmlDeviceGetComputeRunningProcesses, pynvml.nvmlDeviceGetGraphicsRunningProcesses):
        with contextlib.suppress(pynvml.NVMLError):  # not every GPU tells of both
            for process in get(handle):
                yield int(process.pid), int(process.usedGpuMemory or 0)
