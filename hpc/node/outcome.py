"""How a worker ended, and which of several failures came first."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc.errors import HpcError, UnfitNode
from hpc.ranks import ranges

# What a rank says when another one has gone: a consequence, never the cause.
SECONDARY = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|Socket closed|remote process exited"
    r"|NCCL communicator was aborted|ncclRemoteError|DistNetworkError|DistBackendError|recvValue failed|sendBytes failed"
    r"|Connection was likely closed|Timed out waiting \d+ms",
    re.IGNORECASE,
)
# What torch raises in a rank when one of its data-loader processes was killed: by the kernel for want of memory, mostly.
LOADER_KILLED = re.compile(r"DataLoader worker \(pid [^)]*\) is killed by signal: ([^.]+)\.")
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(: |$)")
LOG_TAIL = 16 * 1024
LINES_AFTER = 10
MESSAGE_LIMIT = 500
GROUPS_LIMIT = 8


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A worker (or a whole node, rank -1 worker-less) that ended badly. `code` is the exit code as a shell gives it."""

    rank: int
    host: str
    code: int
    time: float
    """Seconds since 1970, by the clock of rank zero's node."""
    message: str
    traceback: str = ""
    log: str = ""
    silent: bool = False
    """The whole node does not answer."""
    hung: bool = False
    """Ended by its agent because it was stopped or made no step."""
    by_us: bool = False
    """Ended by its agent because another one had failed or a signal had come."""
    gpu: str | None = None
    """The rank's GPU, by its name in CUDA_VISIBLE_DEVICES."""
    step: int | None = None
    """Steps that the rank had done, as its heartbeat told."""
    oom: str = ""
    """What tells that the kernel killed it, or a data-loader process of it, for want of memory."""
    stacks: str = ""
    """After a hang: what all ranks did, in one line."""

    def to_dict(self) -> dict[str, Any]:
        """All fields, whether it says no more than that another rank has gone ("peer_gone"), and "loader_killed": what
        killed one of its data-loader processes, in the C library's words, or None."""
        killed = LOADER_KILLED.search(f"{self.message}\n{self.traceback}")
        more = {"peer_gone": bool(SECONDARY.search(self.message)), "loader_killed": killed[1] if killed else None}
        return {**asdict(self), **more}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Failure:
        return cls(**{name: fields[name] for name in cls.__dataclass_fields__ if name in fields})


def first_failure(failures: Iterable[Failure]) -> Failure | None:
    """The cause among several failures.

    Workers that we ended ourselves come last; one that only says that its peer has gone comes after any other
    cause, whenever it was noticed; otherwise the earliest.
    """
    return min(
        failures,
        key=lambda failure: (failure.by_us, bool(SECONDARY.search(failure.message)), failure.time, failure.rank),
        default=None,
    )


def read_traceback(log: Path) -> tuple[str, str]:
    """Message and traceback of the last exception at the end of a rank's log; empty when there is none.

    For programs that write no error file. What follows the traceback by more than some lines is a later story.
    """
    try:
        with open(os.open(log, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - LOG_TAIL))
            text = stream.read().decode("utf-8", "replace")
    except OSError:
        return "", ""
    lines = text.rstrip("\n").split("\n")
    begins = [number for number, line in enumerate(lines) if line.startswith("Traceback (most recent call last):")]
    if not begins:
        return "", ""
    begin = begins[-1]
    end = next((n for n in range(begin + 1, len(lines)) if lines[n] and not lines[n].startswith(" ")), None)
    if end is None or len(lines) - end > LINES_AFTER or not _EXCEPTION.match(lines[end]):
        return "", ""
    return lines[end][:MESSAGE_LIMIT], "\n".join(lines[begin : end + 1]) + "\n"


def alike(first: Failure, others: Iterable[Failure]) -> list[dict[str, Any]]:
    """What the other ranks that failed by themselves say, each text once with its ranks, the most frequent first.

    Numbers do not count: ports, addresses and process ids differ between ranks that fail for one reason.
    """
    found: dict[str, list[Failure]] = {}
    for other in sorted(others, key=lambda failure: failure.rank):
        text = other.traceback or other.message
        found.setdefault(_NUMBERS.sub("#", text), []).append(other)
    same = _NUMBERS.sub("#", first.traceback or first.message)
    groups = [
        {
            "ranks": ranges({one.rank for one in group}),
            "count": len(group),
            "message": group[0].message[:MESSAGE_LIMIT],
            "same": text == same,
        }
        for text, group in found.items()
    ]
    return sorted(groups, key=lambda group: -int(group["count"]))[:GROUPS_LIMIT]  # type: ignore[call-overload]


def outcome_of(code: int, first: Failure | None, failures: Iterable[Failure]) -> dict[str, Any]:
    """How a start has ended: its code, the first failure, and which others failed by themselves."""
    others = [failure for failure in failures if failure is not first and not failure.by_us]
    return {
        "code": code,
        "first": first.to_dict() if first else None,
        "others": len(others),
        "alike": alike(first, others) if first else [],
    }


def write_outcome(folder: Path, outcome: Mapping[str, Any]) -> None:
    """Tell the controller how the step ended.

    Raises:
        OSError: it cannot be written.
    """
    _write_whole(folder, "outcome.json", outcome)


def write_refusal(folder: Path, task_rank: int, host: str, error: HpcError) -> None:
    """Tell the controller why a task cannot start; its line on the screen is there also where this cannot be written."""
    facts = {"rank": -1, "host": host, "code": error.exit_code, "time": time.time(), "message": str(error)}
    facts["unfit"] = isinstance(error, UnfitNode)
    with contextlib.suppress(OSError):
        _write_whole(folder, f"error-task-{task_rank}.json", facts)


def _write_whole(folder: Path, name: str, content: Mapping[str, Any]) -> None:
    beside = folder / f".{name}.{os.getpid()}.{secrets.token_hex(4)}"
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "w", encoding="utf-8") as stream:
        json.dump(content, stream)
    os.replace(beside, folder / name)
