"""Each worker's own share of the cores that the task may use, those near its GPU first."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path


def share_cores(allowed: Sequence[int], near: Sequence[frozenset[int]]) -> list[list[int]]:
    """Split `allowed` among `len(near)` workers: equal shares (they differ by at most one), none shared.

    `near[i]` are the cores near worker i's GPU, empty when unknown. A worker takes from its near cores first, in the
    order given; what is left fills the shares up. With fewer cores than workers every worker may use all of them.
    """
    workers = len(near)
    if len(allowed) < workers:
        return [list(allowed) for _ in range(workers)]
    size, extra = divmod(len(allowed), workers)
    quota = [size + (1 if index < extra else 0) for index in range(workers)]
    shares: list[list[int]] = [[] for _ in range(workers)]
    free = list(allowed)
    for want in (near, [frozenset(allowed)] * workers):
        for index in range(workers):
            # workers that share a socket split it evenly: each takes its quota before the next one does
            for core in [core for core in free if core in want[index]][: quota[index] - len(shares[index])]:
                shares[index].append(core)
                free.remove(core)
    return [sorted(share) for share in shares]


def allowed_cores() -> list[int]:
    """The cores that this process may use, hyper-threads of one core side by side.

    Source: sched_setaffinity(2); the kernel's Documentation/admin-guide/cputopology.rst.
    """
    allowed = sorted(os.sched_getaffinity(0))

    def place(core: int) -> tuple[int, int, int]:
        topology = Path(f"/sys/devices/system/cpu/cpu{core}/topology")
        try:
            package = int((topology / "physical_package_id").read_text())
            return package, int((topology / "core_id").read_text()), core
        except (OSError, ValueError):
            return 0, core, core

    return sorted(allowed, key=place)


def cores_near_gpus(visible: Sequence[str], note: Callable[[str], None]) -> list[frozenset[int]]:
    """For each visible GPU (an index or a UUID, as in CUDA_VISIBLE_DEVICES) the cores of its PCI bus; empty if unknown.

    Asks NVML for the bus and sysfs for the cores; starts no CUDA context.
    Source: NVML API, nvmlDeviceGetPciInfo; the kernel's Documentation/ABI/testing/sysfs-bus-pci, local_cpulist.
    """
    unknown: list[frozenset[int]] = [frozenset() for _ in visible]
    if not visible or not Path("/proc/driver/nvidia").exists():
        return unknown
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:
        note(f"NVML is not to be had ({error}): cores are shared out without regard to where the GPUs are")
        return unknown
    found = []
    for name in visible:
        try:
            if name.isdigit():
                handle = pynvml.nvmlDeviceGetHandleByIndex(int(name))
            else:
                handle = pynvml.nvmlDeviceGetHandleByUUID(name)
            bus = pynvml.nvmlDeviceGetPciInfo(handle).busId
            bus = bus.decode() if isinstance(bus, bytes) else str(bus)
            folder = bus.lower()[-12:]  # NVML writes the PCI domain with eight digits, sysfs with four
            found.append(parse_cpulist(Path(f"/sys/bus/pci/devices/{folder}/local_cpulist").read_text()))
        except Exception as error:
            note(f"the cores near GPU {name} are unknown: {error}")
            found.append(frozenset())
    pynvml.nvmlShutdown()
    return found


def parse_cpulist(text: str) -> frozenset[int]:
    """The kernel's list format: "0-3,8" gives {0, 1, 2, 3, 8}. Source: cpuset(7), "List format"."""
    cores: set[int] = set()
    for item in text.strip().split(","):
        first, dash, last = item.partition("-")
        if item:
            cores.update(range(int(first), int(last if dash else first) + 1))
    return frozenset(cores)
