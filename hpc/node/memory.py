"""Whether the kernel killed a process of this task for want of memory: by the counters of its cgroup, or the kernel's log."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

_UNLIMITED = 1 << 60
_LOG_LIMIT = 8 << 20


class OomWatch:
    """The kills of this task's memory cgroup, counted from now on. The workers are in the agent's cgroup.

    Source: the kernel's documentation, admin-guide/cgroup-v2.rst, "memory.events", and cgroup-v1/memory.rst, "OOM Control".
    """

    def __init__(self) -> None:
        self._folder, self._counter, self._limit_name = _memory_cgroup()
        self._before, self._began = self._kills(), time.monotonic()

    def evidence(self, pid: int | None) -> str | None:
        """What tells that this process (None: one of this task's) was killed for want of memory; None when nothing does.

        Each kill that the cgroup has counted stands for one answer.
        """
        kills = self._kills()
        if kills is not None and self._before is not None and kills > self._before:
            self._before += 1
            limit = self._smallest_limit()
            if limit is None:
                return "out of memory: the node's memory ran out, as its memory cgroup has counted"
            return f"out of memory: the memory cgroup's limit of {_size(limit)} was reached ({self._folder})"
        if pid is not None and (line := _in_kernel_log(pid, self._began)) is not None:
            return f"out of memory, says the kernel's log: {line}"
        return None

    def _kills(self) -> int | None:
        if self._folder is None:
            return None
        match = re.search(r"^oom_kill (\d+)$", _text(self._folder / self._counter), re.MULTILINE)
        return int(match[1]) if match else None

    def _smallest_limit(self) -> int | None:
        """The smallest limit of this cgroup and those above it, in bytes; None for no limit."""
        found = []
        for folder in (self._folder, *self._folder.parents) if self._folder is not None else ():
            text = _text(folder / self._limit_name).strip()
            if text.isdecimal() and int(text) < _UNLIMITED:
                found.append(int(text))
        return min(found, default=None)


def _memory_cgroup() -> tuple[Path | None, str, str]:
    """This process's memory cgroup, the name of its file of counters, and that of its limit. Source: cgroups(7)."""
    places = {}
    for line in _text(Path("/proc/self/cgroup")).split("\n"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        places["v2" if number == "0" and not controllers else controllers] = path
    mounts: dict[str, tuple[str, str]] = {}
    for line in _text(Path("/proc/self/mountinfo")).split("\n"):
        before, _, after = line.partition(" - ")
        fields, kind = before.split(" "), after.split(" ")
        if len(fields) > 4 and kind[0] == "cgroup2":
            mounts["v2"] = (fields[3], fields[4])
        elif len(fields) > 4 and kind[0] == "cgroup" and "memory" in kind[-1].split(","):
            mounts["memory"] = (fields[3], fields[4])
    files = {"memory": ("memory.oom_control", "memory.limit_in_bytes"), "v2": ("memory.events", "memory.max")}
    for name, (counter, limit) in files.items():
        paths = [path for controllers, path in places.items() if name in controllers.split(",")]
        if not paths or name not in mounts:
            continue
        root, mount = mounts[name]
        inside = os.path.relpath(paths[0], root) if paths[0].startswith(root) else paths[0].lstrip("/")
        folder = Path(os.path.normpath(os.path.join(mount, inside)))
        if (folder / counter).is_file():
            return folder, counter, limit
    return None, "", ""


def _in_kernel_log(pid: int, since: float) -> str | None:
    """The kernel's line about the kill of a process, where users may read its log; an older one is of another process.

    `since`: by time.monotonic, which is what the log counts in. Source: the kernel's documentation, ABI/testing/dev-kmsg.
    """
    killed = re.compile(rf"Killed process {pid} \(|oom-kill:.*\bpid={pid},")
    found: str | None = None
    size = 0
    with contextlib.suppress(OSError):
        descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            while size < _LOG_LIMIT:
                try:
                    record = os.read(descriptor, 8192).decode("utf-8", "replace")
                except BrokenPipeError:  # overwritten meanwhile: the next read goes on behind it
                    continue
                size += len(record)
                head, _, text = record.partition(";")
                text, fields = text.split("\n")[0], head.split(",")
                moment_us = int(fields[2]) if len(fields) > 2 and fields[2].isdecimal() else 0
                if killed.search(text) and moment_us / 1e6 > since - 1.0:
                    found = text
        finally:
            os.close(descriptor)
    return found


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 1 << 30 else f"{count / 2**20:.0f} MiB"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
