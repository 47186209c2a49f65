"""Which nodes failed this user's runs lately: one file per user, over all runs and clusters. Entries expire.

    $XDG_STATE_HOME/hpc/failed-nodes.jsonl, by default ~/.local/state/hpc/failed-nodes.jsonl; 0600, one event per line

Whoever decides that a node was lost or is not fit adds a line; submission and requeue leave such nodes out of the next
attempt, within bounds. Nothing here fails a run: what cannot be written is told, what cannot be read counts as nothing.
Source: XDG Base Directory Specification, XDG_STATE_HOME.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from hpc.errors import printable

LONGEST_H = 24.0 * 30
"""What is older is of no use to anybody, and is dropped when the file is tidied up."""
SIZE_LIMIT = 256 * 1024
LINE_LIMIT = 4096
SHARE = 4
"""At most one in so many of the nodes that could be used is left out; of few nodes, one."""
LOCK_LIMIT_S = 2.0
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One node that failed once."""

    node: str
    time: float
    """In seconds since 1970."""
    why: str
    job_id: str = ""
    cluster: str = ""
    """Slurm's name of the cluster; "" when it was not known."""

    def told(self, now: float) -> str:
        """For people: "node7 (lost 3 h ago, job 12)"."""
        job = f", job {self.job_id}" if self.job_id else ""
        return printable(f"{self.node} ({self.why} {_ago(now - self.time)} ago{job})")


def path() -> Path:
    """The file of this user."""
    state = os.environ.get("XDG_STATE_HOME", "")
    base = Path(state) if os.path.isabs(state) else Path(os.path.expanduser("~/.local/state"))
    return base / "hpc" / "failed-nodes.jsonl"


def clock() -> float:
    """Now, in seconds since 1970, as the entries have it."""
    return time.time()


def add(failures: Sequence[Failure]) -> None:
    """Append these, each as one whole line.

    Raises:
        OSError: the file cannot be written, or is not this user's own.
    """
    file = path()
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(file) as alone:
        size = _append(file, b"".join(_line(failure) for failure in failures))
        if size > SIZE_LIMIT and alone:
            _rewrite(file, ())


def forget(nodes: Collection[str]) -> list[str]:
    """Strike out all failures of these nodes; returns those that had any.

    Raises:
        OSError: the file cannot be written, or is not this user's own.
    """
    file = path()
    if not file.exists():
        return []
    with _locked(file):
        known = recent(LONGEST_H)
        _rewrite(file, nodes)
    return sorted({failure.node for failure in known} & set(nodes))


def recent(hours: float, *, cluster: str = "", now: float | None = None) -> list[Failure]:
    """The failures of the last hours, oldest first; with a cluster's name those of other clusters are left out.

    Lines that are damaged, and a file that somebody else could have written, count as nothing.
    """
    try:
        with _opened(path()) as stream:
            data = stream.read(16 * SIZE_LIMIT)
    except OSError:
        return []
    return _fresh(data, hours, cluster, time.time() if now is None else now)


def _opened(file: Path) -> BinaryIO:
    """The file, to read.

    Raises:
        OSError: it is not there, or not this user's own.
    """
    stream = open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb")
    try:
        _checked(stream.fileno())
    except OSError:
        stream.close()
        raise
    return stream


def _fresh(data: bytes, hours: float, cluster: str, now: float) -> list[Failure]:
    found = [failure for line in data.split(b"\n") if (failure := _read(line)) is not None]
    # a clock that ran ahead somewhere may not keep a node out for ever
    fresh = [one for one in found if -3600.0 <= now - one.time <= hours * 3600.0]
    return sorted((one for one in fresh if not cluster or one.cluster in ("", cluster)), key=lambda one: one.time)


def to_leave_out(
    failures: Sequence[Failure], usable: Collection[str], *, already: Collection[str] = (), wanted: int = 1
) -> list[Failure]:
    """Which nodes to do without: of each its last failure, those that failed most often and last first. Pure.

    `usable` are the nodes that the job could run on, `already` those that it does without anyway. Never more than a
    share of them (see SHARE), nor so many that fewer than `wanted` are left.
    """
    counts: dict[str, int] = {}
    last: dict[str, Failure] = {}
    for failure in failures:
        counts[failure.node] = counts.get(failure.node, 0) + 1
        last[failure.node] = failure
    free = [node for node in usable if node not in already]
    candidates = sorted((node for node in last if node in free), key=lambda node: (-counts[node], -last[node].time))
    most = min(max(1, len(free) // SHARE), len(free) - wanted)
    return [last[node] for node in candidates[: max(0, most)]]


def _line(failure: Failure) -> bytes:
    fields = {"time": round(failure.time, 3), "node": failure.node, "why": failure.why[:200]}
    fields |= {"job_id": failure.job_id, "cluster": failure.cluster}
    return json.dumps(fields).encode() + b"\n"


def _read(line: bytes) -> Failure | None:
    if not line.strip() or len(line) > LINE_LIMIT:
        return None
    try:
        fields = json.loads(line)
        node, moment = fields["node"], float(fields["time"])
        texts = {name: str(fields.get(name, ""))[:200] for name in ("why", "job_id", "cluster")}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    if not isinstance(node, str) or not _NODE.fullmatch(node) or moment != moment:
        return None
    return Failure(node=node, time=moment, **texts)


def _checked(descriptor: int) -> os.stat_result:
    """The file's status, which is this user's alone to write.

    Raises:
        PermissionError: it belongs to somebody else, or others may write to it.
    """
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError(1, f"it is not a file that you alone may write to; look at it, then remove it: {path()}")
    return status


def _append(file: Path, lines: bytes) -> int:
    """Add whole lines; returns how large the file was before.

    Who did not get the lock may have written to a file that was exchanged meanwhile, and writes again: rather twice than
    not at all.
    """
    for _ in range(10):
        descriptor = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            status = _checked(descriptor)
            size = status.st_size
            torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
            os.write(descriptor, b"\n" + lines if torn else lines)
        finally:
            os.close(descriptor)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(status, os.stat(file, follow_symlinks=False)):
                break
    return size


def _rewrite(file: Path, without: Collection[str]) -> None:
    """Leave out what is too old, damaged, or of these nodes; what somebody adds meanwhile without the lock is kept."""
    with _opened(file) as old:
        data = old.read()
        whole = data.rfind(b"\n") + 1
        kept = [one for one in _fresh(data[:whole], LONGEST_H, "", time.time()) if one.node not in without]
        beside = file.with_name(f".{file.name}.{os.getpid()}.{secrets.token_hex(4)}")
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "wb") as stream:
            stream.write(b"".join(map(_line, kept)))
        os.replace(beside, file)
        late = data[whole:] + old.read()
    if late:
        _append(file, late)


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[bool]:
    """Alone among the writers; False when somebody held the lock too long, or this process had no core meanwhile.

    Where the file system has no locks nobody is kept away.
    """
    alone = False
    descriptor = os.open(f"{file}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + LOCK_LIMIT_S
        while time.monotonic() < deadline:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                alone = True
                break
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:
                alone = True
                break
        yield alone
    finally:
        os.close(descriptor)


def _ago(seconds: float) -> str:
    minutes = max(0, round(seconds / 60))
    return f"{minutes} min" if minutes < 120 else f"{round(minutes / 60)} h"
