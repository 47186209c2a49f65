"""One run, one directory: fixed at submission, the same for every attempt and every rank.

    runs/<name>-<id>/
      config.yaml  job.sh  record.jsonl           what was asked, what was sent, what happened
      slurm-<job id>.out                          the screen of the batch step
      code/                                       the code as it was at submission
      attempt-0/ attempt-1/ ...                   rank-<n>.log, error-<rank>.json
      checkpoints/step-<n>/  metrics.jsonl  tensorboard/

The directory is 0700 and its files 0600, whatever the umask, unless the user opens them. Nobody but the user and root
may be able to put another one in its place: see `RunDirectory.open`.
"""

from __future__ import annotations

import errno
import grp
import json
import math
import os
import pwd
import re
import secrets
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpc.errors import RunDirectoryError, printable
from hpc.schema import Config

RUN_DIR_VARIABLE = "HPC_RUN_DIR"
ATTEMPT_VARIABLE = "HPC_ATTEMPT"
RESTART_VARIABLE = "HPC_RESTART"
"""Starts of the step in this allocation before the present one."""
BEGAN_VARIABLE = "HPC_BEGAN"
"""When the controller began with this start, in seconds since 1970."""
END_TIME_VARIABLE = "HPC_END_TIME"
"""When the allocation ends, in seconds since 1970; unset when nobody knows."""
MARK_VARIABLE = "HPC_MARK"
"""One start of the step: job id, restart count, start and a random word, "1234.0.1.9f3a51c2"; "local..." without a job."""
SECRET_VARIABLE = "HPC_SECRET"
"""What only the agents of one start know; never handed on to workers."""
STANDBY_VARIABLE = "HPC_STANDBY"
"""The name of the socket by which rank zero's agent tells the controller that it waits for its word."""
STANDING_VARIABLE = "HPC_STANDING"
"""What a controller has to know that goes on for a killed one, as JSON."""
WORKDIR_VARIABLE = "HPC_WORKDIR"
"""The directory to work in, for a process that was started in the copy of the code so that it imports from there."""
RECORD_LIMIT = 1 << 20
"""Bytes of one event: the places of thousands of nodes fit in."""
TEXT_LIMIT = 16 * 1024
"""Characters of one text in an event that would be long: an exception may say any amount."""
_TRIES = 20
_TORN_LOOKS = 5
_LINKS = 40
"""As many as the kernel follows: path_resolution(7)."""


class RunDirectory:
    """The paths of one run, and its record. Make one with `create` or `open`, which check whose it is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.yaml"
        self.job_script = path / "job.sh"
        self.record_file = path / "record.jsonl"
        self.code = path / "code"
        self.checkpoints = path / "checkpoints"
        self.metrics_file = path / "metrics.jsonl"
        self.tensorboard = path / "tensorboard"

    @classmethod
    def create(
        cls, root: Path, name: str, run_id: str | None = None, *, shared: bool = False, local: bool = False
    ) -> RunDirectory:
        """Make `root/name-run_id` (a new unique id when None) and return it; an existing one of ours is opened.

        Folders that are missing on the way are made 0700, too.

        Raises:
            RunDirectoryError: it cannot be made, or what is there can be changed by somebody else, as `open` says.
        """
        for tries_left in reversed(range(_TRIES)):
            path = Path(os.path.abspath(root)) / f"{name}-{run_id or new_run_id()}"
            try:
                return cls.make(path, fresh=run_id is None, shared=shared, local=local)
            except RunDirectoryError as error:
                drawn = run_id is None and isinstance(error.__context__, FileExistsError) and path.is_dir()
                if not (drawn and tries_left):  # else somebody drew the same id in the same second
                    raise
        raise AssertionError("the last try returns or raises")

    @classmethod
    def make(cls, path: Path, *, fresh: bool = False, shared: bool = False, local: bool = False) -> RunDirectory:
        """Make the run directory at `path`, and the folders on the way to it, and return it; one of ours is opened.

        Raises:
            RunDirectoryError: as `create`; `fresh`: or there is one.
        """
        path = Path(os.path.abspath(path))
        if not shared:
            _check_way(path, local=local)
        try:
            make_folders(path.parent)
            path.mkdir(mode=0o700, exist_ok=not fresh)
        except OSError as error:
            raise RunDirectoryError(
                f"cannot make the run directory {path}: {error.strerror or error}; give another place with run_root=DIR"
            ) from None
        return cls.open(path, shared=shared or local)

    @classmethod
    def open(cls, path: Path, *, shared: bool = False, local: bool = False) -> RunDirectory:
        """The run directory at `path`, after a check that nobody else can have put things into it, or it into its place.

        Links on the way to it may be root's or this user's; so may the folder that it lies in, where nobody else may write
        (in a sticky one, such as /tmp, everybody may). Folders further up may belong to a project's people, and be written
        by their group, but not by everybody: they could put away what is here, but what they put in its place is not the
        user's own, and refused. `shared` (run_root_shared) lets everything pass on the way; of a `local` run, which stays
        with who has started it, folders of root's or one's own that others may write in are only warned of.

        Raises:
            RunDirectoryError: not a directory, a link, owned by somebody else, writable by others, or below such.
        """
        path = Path(os.path.abspath(path))
        if not shared:
            _check_way(path, local=local)
        try:
            status = os.lstat(path)
        except OSError as error:
            raise RunDirectoryError(f"run directory {path}: {error.strerror or error}") from None
        if not stat.S_ISDIR(status.st_mode):
            raise RunDirectoryError(f"{path} is not a directory (links are refused); a run directory was needed")
        if status.st_uid != os.geteuid():
            raise RunDirectoryError(
                f"{path} belongs to user id {status.st_uid}, not to you ({os.geteuid()}): "
                f"use a directory of your own, run_root=DIR"
            )
        if status.st_mode & 0o022:
            raise RunDirectoryError(
                f"{path} can be written by others (mode {stat.S_IMODE(status.st_mode):04o}): chmod go-w {path}"
            )
        return cls(path)

    @classmethod
    def from_environ(cls) -> RunDirectory | None:
        """The run directory that the controller named for this process, or None."""
        text = os.environ.get(RUN_DIR_VARIABLE)
        return cls(Path(text)) if text else None

    def batch_script(self) -> tuple[Path, str | None] | None:
        """The script that hpc.submit sent for this run, and the index of the array's element that it is, if it is one.

        None when it was not sent by hpc.submit.
        """
        if self.job_script.is_file():
            return self.job_script, None
        element, script = re.fullmatch("array-([0-9]+)", self.path.name), self.path.parent / self.job_script.name
        return (script, element[1]) if element is not None and script.is_file() else None

    def attempt(self, number: int) -> Path:
        """The folder of one attempt (not made here)."""
        return self.path / f"attempt-{number}"

    def output_file(self, job_id: str) -> Path:
        """What the batch step prints; `job_id` may be Slurm's pattern "%j"."""
        return self.path / f"slurm-{job_id}.out"

    def append_event(self, event: str, **fields: Any) -> None:
        """Append one event to the record: one whole line, by one write, so that writers never mix.

        In a long event, texts are cut to 16 Ki characters. A line that a crash has torn is ended first, so that it takes
        no other one with it.

        Raises:
            OSError: it cannot be written, or not whole.
            ValueError: the event is longer than 1 MiB all the same.
        """
        content = {"time": round(time.time(), 3), "event": event, **fields}
        data = _line(content)
        if len(data) > TEXT_LIMIT:
            data = _line(_cut(content))
        if len(data) > RECORD_LIMIT:
            raise ValueError(f"an event of {len(data)} bytes: the record takes {RECORD_LIMIT}")
        descriptor = os.open(self.record_file, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            data = b"\n" + data if _is_torn(descriptor) else data
            if os.write(descriptor, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.record_file))
        finally:
            os.close(descriptor)

    def events(self) -> Iterator[dict[str, Any]]:
        """The events of the record, in order; a line torn by a crash is left out."""
        try:
            data = self.record_file.read_bytes()
        except FileNotFoundError:
            return
        for line in data.split(b"\n"):
            try:
                event = json.loads(line, parse_int=_whole, parse_float=_finite, parse_constant=_finite)
            except (ValueError, RecursionError):
                continue
            if isinstance(event, dict):
                yield event


def _is_torn(descriptor: int) -> bool:
    """Whether a file ends in the middle of a line, and not only while another writer is at it."""
    for _ in range(_TORN_LOOKS):
        size = os.fstat(descriptor).st_size
        if size == 0 or os.pread(descriptor, 1, size - 1) in (b"\n", b""):
            return False
        time.sleep(0.01)
    return True


def _line(event: dict[str, Any]) -> bytes:
    return json.dumps(event, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


def _cut(value: Any) -> Any:
    """The value with its long texts cut."""
    if isinstance(value, str) and len(value) > TEXT_LIMIT:
        return f"{value[:TEXT_LIMIT]}... ({len(value)} characters)"
    if isinstance(value, dict):
        return {key: _cut(inner) for key, inner in value.items()}
    return [_cut(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _whole(text: str) -> int:
    if len(text) > 18:
        raise ValueError("a number that no event has")
    return int(text)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number that no event has")
    return number


def read_error_file(path: Path) -> tuple[str, str, float | None]:
    """Message, traceback and time from torchrun's error file (ours or @record's); empty when there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))["message"]
    except (OSError, ValueError, KeyError, TypeError):
        return "", "", None
    if not isinstance(content, dict):
        return str(content), "", None
    extra = content.get("extraInfo")
    extra = extra if isinstance(extra, dict) else {}
    moment = extra.get("time")
    return (
        str(content.get("message", "")),
        str(extra.get("py_callstack", "")),
        moment if isinstance(moment, float) else None,
    )


def make_folders(path: Path) -> None:
    """Make a folder and those above it that are missing, each 0700 (the standard library's parents follow the umask).

    Raises:
        OSError: one of them cannot be made.
    """
    try:
        path.mkdir(mode=0o700)
    except FileNotFoundError:
        make_folders(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)
    except FileExistsError:
        if not path.is_dir():
            raise


def check_own(path: Path) -> None:
    """Check that a file in the run directory is this user's own and was not put there by anybody else.

    Raises:
        RunDirectoryError: it is missing, a link or no file, owned by somebody else, or writable by others.
    """
    try:
        status = os.lstat(path)
    except OSError as error:
        raise RunDirectoryError(f"{path}: {error.strerror or error}") from None
    if not stat.S_ISREG(status.st_mode):
        raise RunDirectoryError(f"{path} is a link or no file; the file of the run was needed")
    if status.st_uid != os.geteuid() or _others_may_write(status):
        raise RunDirectoryError(
            f"{path} belongs to user id {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}: somebody else can have "
            f"written it; look at it, then make it yours alone (chmod go-w) or take it away"
        )


def _check_way(path: Path, *, local: bool) -> None:
    """Follow the way to a path, link by link, and refuse what somebody else could exchange. What is missing ends it.

    Raises:
        RunDirectoryError: names the link or the folder, whose it is, and what to do.
    """
    here, ahead, links = Path("/"), list(reversed(path.parent.parts[1:])), 0
    _check_on_way(here, path, last=not ahead, local=local)
    while ahead:
        part = ahead.pop()
        if part == "..":
            here = here.parent
            continue
        if not _check_on_way(here / part, path, last=not ahead, local=local):
            return
        if not os.path.islink(here / part):
            here /= part
            continue
        links += 1
        if links > _LINKS:
            raise RunDirectoryError(f"{path}: too many links on the way; a run directory was needed")
        target = Path(os.readlink(here / part))
        if target.is_absolute():
            here = Path("/")
        ahead += reversed([name for name in target.parts if name != "/"])


def _check_on_way(entry: Path, path: Path, *, last: bool, local: bool) -> bool:
    """Check one link or folder on the way to a path, or the `last` one; False when it is not there (yet)."""
    try:
        status = os.lstat(entry)
    except OSError:
        return False
    warn, is_link = False, stat.S_ISLNK(status.st_mode)
    foreign = status.st_uid not in (0, os.geteuid()) and not _stands_for_root(status.st_uid)
    writable = _others_may_write(status) if last else bool(status.st_mode & stat.S_IWOTH)
    exchangeable = writable and not is_link and not status.st_mode & stat.S_ISVTX
    if foreign and (last or is_link or exchangeable):
        fault = f"belongs to user id {status.st_uid}"
    elif exchangeable:
        fault, warn = f"can be written by others (mode {stat.S_IMODE(status.st_mode):04o})", local
    else:
        return True
    what = "link" if is_link else "folder"
    message = (
        f"run directory {path}: the {what} {entry} on the way to it {fault}, who could put other files in its place: "
        f"give another place with run_root=DIR, or, where these people are trusted, run_root_shared=true"
    )
    if not warn:
        raise RunDirectoryError(message)
    print(f"hpc: warning: {printable(message)}", file=sys.stderr, flush=True)
    return True


def _others_may_write(status: os.stat_result) -> bool:
    """Whether anybody but the owner may; a group that is the user's own and has nobody else in it does not count.

    Such groups are the rule where the umask is 002. Source: useradd(8), USERGROUPS_ENAB in login.defs(5).
    """
    if status.st_mode & stat.S_IWOTH:
        return True
    if not status.st_mode & stat.S_IWGRP:
        return False
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(status.st_gid)
    except KeyError:
        return True
    own = group.gr_name == user.pw_name and group.gr_gid == user.pw_gid
    return not own or any(member != user.pw_name for member in group.gr_mem)


def _stands_for_root(owner: int) -> bool:
    """Whether the owner is the one that a user namespace (a container) shows for all users that it does not have.

    Source: user_namespaces(7), "Unmapped user and group IDs".
    """
    try:
        whole = Path("/proc/self/uid_map").read_text(encoding="ascii").split() == ["0", "0", "4294967295"]
        overflow = int(Path("/proc/sys/fs/overflowuid").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return False
    return not whole and owner == overflow


def run_name(config: Config) -> str:
    """The run's name: the given one, else that of the training job, the script or the module that runs."""
    if config.name is not None:
        return config.name
    words = list(config.command)
    if not words:
        return config.job.rpartition(".")[2]
    if re.fullmatch(r"python[0-9.]*", Path(words[0]).name) and len(words) > 1:
        words = [word for word in words[1:] if word not in ("-m", "-u")] or words
    return Path(words[0]).name.removesuffix(".py") or "command"


def directory_name(name: str) -> str:
    """The run's name as part of a directory name: letters, digits, "._-" kept, all else "_", at most 60 characters."""
    return re.sub(r"[^\w.-]", "_", name)[:60].lstrip("-.") or "run"


def new_run_id() -> str:
    """A new id that sorts by time: "20261130-041500-9f3a"."""
    return time.strftime("%Y%m%d-%H%M%S-", time.localtime()) + secrets.token_hex(2)


def write_private(path: Path, text: str) -> None:
    """Write a UTF-8 text of mode 0600, whole or not at all: beside it, then renamed over it.

    Raises:
        RunDirectoryError: it cannot be written.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.replace(beside, path)
    except OSError as error:
        raise RunDirectoryError(f"cannot write {printable(str(path))}: {error.strerror or error}") from None
