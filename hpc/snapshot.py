"""The code as it was at submission: small source files copied into the run directory, each with its sha256.

Inside a git work tree these are the tracked files and the untracked ones that are not ignored; elsewhere the *.py,
*.yaml and *.sh files below the working directory. Run directories, files of keys and passwords (.env, *.pem and the
like) and what links lead out to are left out.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hpc.errors import RunDirectoryError
from hpc.rundir import write_private

FILE_LIMIT_BYTES = 1 << 20
TOTAL_LIMIT_BYTES = 50 << 20
FILES_LIMIT = 2_000
WALK_LIMIT = 20_000
"""Directory entries looked at outside git, so that a submission from a full home directory does not walk for hours."""
COPIERS = 8
"""Threads that copy: making a file on a shared file system is a wait for its server."""
GIT_TIMEOUT_S = 30.0
SOURCE_SUFFIXES = (".py", ".yaml", ".yml", ".sh")
MANIFEST_NAME = ".manifest.json"
_KEPT_OUT = re.compile(
    r"\.env(rc)?(\..*)?|.*\.(pem|key|p12|pfx|jks|keytab|kdbx)|id_(rsa|dsa|ecdsa|ed25519)(_sk)?"
    r"|\.(netrc|pgpass|pypirc|npmrc|git-credentials|htpasswd)|credentials(\.(json|ya?ml|toml|ini))?",
    re.IGNORECASE,
)
"""Names of files that hold keys and passwords, and no code."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What was taken. Paths are relative to `root` and use "/"."""

    root: str
    """The top of the work tree; outside git the working directory."""
    directory: str
    """The working directory relative to the root, "." for the root itself."""
    commit: str | None = None
    """The commit that was checked out; None outside git or before the first one."""
    dirty: bool = False
    """Whether the work tree differed from the commit, untracked files included."""
    files: Mapping[str, str] = field(default_factory=dict)
    """sha256 of each copied file."""
    left_out: int = 0
    """Files over 1 MiB, links that lead out of the tree, and files that could not be read."""
    note: str | None = None
    """Why nothing was copied, when nothing was."""

    def working_directory(self, copy: Path) -> Path:
        """The place in the copy that stands for the directory of the submission."""
        return copy / self.directory

    def to_json(self) -> str:
        """The manifest as one JSON object."""
        return json.dumps(asdict(self), ensure_ascii=True, indent=1, sort_keys=True) + "\n"


def take(source: Path, destination: Path) -> Manifest:
    """Copy the code around the directory `source` to the new directory `destination`, with a manifest in it.

    Beyond 2,000 files or 50 MiB nothing is copied, and the manifest's note says so; commit and dirty flag are
    recorded all the same. Files get mode 0600 (0700 if executable), directories 0700.

    Raises:
        RunDirectoryError: the destination cannot be written.
    """
    source = Path(os.path.abspath(source))
    root = work_tree(source)
    listing = _git_listing(root) if root is not None else None
    if root is None or listing is None:
        root, listing = source, _Listing(names=_walk(source))
    manifest = Manifest(
        root=str(root), directory=os.path.relpath(source, root), commit=listing.commit, dirty=listing.dirty
    )
    names = None if listing.names is None else _without_runs(listing.names, destination.parent, root)
    try:
        destination.mkdir(mode=0o700)
        _make_directory(destination / manifest.directory, destination)
        sizes, note = _choose(root, names)
        for name in sizes:
            _make_directory((destination / name).parent, destination)
        with ThreadPoolExecutor(COPIERS) as pool:
            digests = pool.map(lambda name: _copy(root / name, destination / name), sizes)
            hashes = {name: digest for name, digest in zip(sizes, digests, strict=True) if digest is not None}
    except OSError as error:
        raise RunDirectoryError(f"cannot copy the code to {destination}: {error.strerror or error}") from None
    left_out = len(names or ()) - len(hashes) if note is None else 0
    manifest = _replace(manifest, files=hashes, left_out=left_out, note=note)
    write_private(destination / MANIFEST_NAME, manifest.to_json())
    return manifest


def read(destination: Path) -> Manifest | None:
    """The manifest of a copy, or None when there is none that can be read."""
    try:
        values = json.loads((destination / MANIFEST_NAME).read_text(encoding="utf-8"))
        return Manifest(**values)
    except (OSError, ValueError, TypeError):
        return None


def changed(manifest: Manifest, source: Path) -> list[str]:
    """The files of the manifest that are gone or different now, sorted; `source` is the directory of the submission."""
    root = Path(os.path.normpath(os.path.abspath(source)))
    for part in Path(manifest.directory).parts:
        root = root.parent if part != "." else root
    different = []
    for name, digest in manifest.files.items():
        data = _read_limited(root / name)
        if data is None or hashlib.sha256(data).hexdigest() != digest:
            different.append(name)
    return sorted(different)


def _choose(root: Path, names: list[str] | None) -> tuple[dict[str, int], str | None]:
    """The files to copy and their sizes in bytes; none, and why, when the tree is not for copying."""
    if names is None or len(names) > FILES_LIMIT:
        return {}, f"more than {FILES_LIMIT:,} files below {root}: no copy of the code was kept"
    for name in names:
        if os.path.isdir(root / name) and not os.path.islink(root / name):
            return {}, f"{name} is a git submodule: no copy of the code was kept"
    sizes = {name: size for name in names if (size := _size_to_copy(root, name)) is not None}
    if sum(sizes.values()) > TOTAL_LIMIT_BYTES:
        return {}, f"more than {TOTAL_LIMIT_BYTES >> 20} MiB of code below {root}: no copy of it was kept"
    return sizes, None


@dataclass(frozen=True)
class _Listing:
    names: list[str] | None
    commit: str | None = None
    dirty: bool = False


def _replace(manifest: Manifest, **values: object) -> Manifest:
    return Manifest(**{**asdict(manifest), **values})


def work_tree(source: Path) -> Path | None:
    for directory in (source, *source.parents):
        if (directory / ".git").exists():
            return directory
    return None


def _git_listing(root: Path) -> _Listing | None:
    """What git says of the work tree; None when git is missing, refuses, or takes too long."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environ |= {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    base = ["git", "-c", "core.fsmonitor=false", "-C", str(root)]
    commands = (
        [*base, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        [*base, "status", "--porcelain=v2", "--branch", "-z", "--untracked-files=normal", "--ignore-submodules=all"],
    )
    running: list[subprocess.Popen[bytes]] = []
    outputs: list[bytes] = []
    try:
        for command in commands:
            running.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env=environ,
                )
            )
        outputs = [process.communicate(timeout=GIT_TIMEOUT_S)[0] for process in running]
    except (OSError, subprocess.TimeoutExpired):
        return None
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.communicate()
    if any(process.returncode != 0 for process in running):
        return None
    commit, dirty = None, False
    for entry in outputs[1].split(b"\0"):
        if entry.startswith(b"# branch.oid "):
            commit = entry.removeprefix(b"# branch.oid ").decode("ascii", "replace")
            commit = None if commit == "(initial)" else commit
        elif entry and not entry.startswith(b"#"):
            dirty = True
    names = sorted({os.fsdecode(name) for name in outputs[0].split(b"\0") if name})  # of a conflict git tells three
    return _Listing(names=names, commit=commit, dirty=dirty)


def _walk(source: Path) -> list[str] | None:
    """The source files below a directory outside git; None when there is too much to look at."""
    names: list[str] = []
    seen = 0
    for directory, directories, files in os.walk(source):
        seen += len(directories) + len(files)
        if seen > WALK_LIMIT:
            return None
        directories[:] = sorted(
            name
            for name in directories
            if not name.startswith(".")
            and name not in ("__pycache__", "node_modules", "site-packages")
            and not os.path.exists(os.path.join(directory, name, "pyvenv.cfg"))
        )
        kept = [name for name in sorted(files) if name.endswith(SOURCE_SUFFIXES) or name == "record.jsonl"]
        names += [os.path.relpath(os.path.join(directory, name), source) for name in kept]
    return names


def _without_runs(names: Iterable[str], run_dir: Path, root: Path) -> list[str]:
    """The names without those below a run directory (one with a record) and without those of keys and passwords."""
    runs = {os.path.dirname(name) for name in names if os.path.basename(name) == "record.jsonl"} - {""}
    runs.add(os.path.relpath(run_dir, root))
    return [
        name
        for name in names
        if not any(parent in runs for parent in _parents(name))
        and os.path.basename(name) != "record.jsonl"
        and not _KEPT_OUT.fullmatch(os.path.basename(name))
    ]


def _parents(name: str) -> Iterator[str]:
    while name := os.path.dirname(name):
        yield name


def _size_to_copy(root: Path, name: str) -> int | None:
    """The file's size in bytes; None for what is left out: too large, no regular file, a link out of the tree."""
    path = root / name
    try:
        name.encode("utf-8")
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode):
            target = Path(os.path.realpath(path))
            if not target.is_relative_to(os.path.realpath(root)):
                return None
            status = os.lstat(target)
    except (OSError, UnicodeEncodeError):
        return None
    if not stat.S_ISREG(status.st_mode) or status.st_size > FILE_LIMIT_BYTES:
        return None
    if not Path(os.path.realpath(path.parent)).is_relative_to(os.path.realpath(root)):
        return None
    return status.st_size


def _read_limited(path: Path) -> bytes | None:
    """The content of a regular file of at most 1 MiB; None for anything else."""
    try:
        descriptor = os.open(os.path.realpath(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with open(descriptor, "rb") as stream:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        try:
            data = stream.read(FILE_LIMIT_BYTES + 1)
        except OSError:
            return None
    return data if len(data) <= FILE_LIMIT_BYTES else None


def _make_directory(path: Path, top: Path) -> None:
    """Make a directory and those above it, up to `top`, each 0700 (mkdir's own `parents` follow the umask)."""
    if path != top and not path.exists():
        _make_directory(path.parent, top)
        path.mkdir(mode=0o700)


def _copy(path: Path, target: Path) -> str | None:
    """Copy one file and return its sha256; None when it cannot be read any more."""
    data = _read_limited(path)
    if data is None:
        return None
    executable = os.access(path, os.X_OK)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with open(os.open(target, flags, 0o700 if executable else 0o600), "wb") as stream:
        stream.write(data)
    return hashlib.sha256(data).hexdigest()
