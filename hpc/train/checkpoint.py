"""Checkpoints: each is whole or does not exist.

    checkpoints/step-<n>/model.pt       the model's state_dict
                         trainer.pt     optimizer, schedule, scaler, random generators, position: tensors and plain values
                         config.yaml    the configuration that it was made with
                         manifest.json  sizes and SHA-256 of them and of itself, written last

All of it is written and synced in a folder beside (.step-<n>.<pid>.tmp) and published by one rename. Both .pt files load
with torch's safe loading (weights_only=True); the CRCs inside these archives are left empty, since the manifest's
checksums serve, and torch would compute them while it keeps all other threads of the process waiting.
Only rank 0 writes here and makes folders.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import stat
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.utils.serialization import config as torch_options

from hpc.errors import HpcError
from hpc.train.best import Best

log = logging.getLogger("hpc.train")

MODEL, TRAINER, CONFIG, MANIFEST = "model.pt", "trainer.pt", "config.yaml", "manifest.json"
FORMAT = 2
READABLE = (1, 2)
"""Format 1 had neither config.yaml nor the manifest's own checksum."""
PIECE = 8 << 20
"""Bytes that are handed to the file at once; with each, the disk is told to begin with what it has."""
VISIBLE_S = 35.0
"""How long a rank waits for a shared file system to show it what rank 0 sees. NFS keeps what it knows of a folder that has
changed lately for 30 s. Source: nfs(5), acdirmin."""
_STEP = re.compile(r"step-([0-9]+)")
_STALE = re.compile(r"\.step-[0-9]+\..*")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.Tensor, torch.Size, torch.dtype, torch.device)
_MAPPINGS = (dict, OrderedDict, Counter)


class CheckpointError(HpcError):
    """A checkpoint that cannot be written, or a run that has checkpoints of which none is whole."""


class Checkpoints:
    """The checkpoints of one run: the `keep` newest whole ones, those at multiples of `keep_every` steps, and the best."""

    def __init__(self, folder: Path, keep: int = 2, keep_every: int | None = None, best: Best | None = None) -> None:
        self.folder = folder
        self.keep = keep
        self.keep_every = keep_every
        self.best = best
        self._damaged: set[int] = set()  # found so by `newest`, and not written anew since

    def prepare(self) -> None:
        """Make the folder, and clear what a killed attempt left half written.

        Raises:
            CheckpointError: the folder cannot be made or looked into.
        """
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            self._clear()
        except OSError as error:
            raise CheckpointError(f"cannot use the checkpoint folder {self.folder}: {_why(error)}") from error

    def require_writable(self) -> None:
        """Find out before the first step, and not after an hour, that nothing can be written.

        Raises:
            CheckpointError: names the folder and the cause.
        """
        beside = self._beside(0)
        try:
            beside.mkdir(mode=0o700)
            _write_bytes(beside / MANIFEST, bytes(4096))
        except OSError as error:
            raise CheckpointError(f"no checkpoint could be written to {self.folder}: {_why(error)}") from error
        finally:
            shutil.rmtree(beside, ignore_errors=True)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    def steps(self) -> list[int]:
        """The steps that have a published checkpoint, whole or not, oldest first."""
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        return sorted(int(match[1]) for name in names if (match := _STEP.fullmatch(name)))

    def newest(self) -> Path | None:
        """The newest whole checkpoint; each newer one that is damaged is named in the log. None: there is none at all.

        Raises:
            CheckpointError: there are checkpoints, but none is whole (a silent start from nothing would lose the run).
        """
        steps = self.steps()
        for step in reversed(steps):
            fault = damage(self.path(step))
            if fault is None:
                return self.path(step)
            self._damaged.add(step)
            log.warning("checkpoint %s is damaged and skipped: %s", self.path(step), fault)
        if steps:
            raise CheckpointError(
                f"none of the {len(steps)} checkpoints in {self.folder} is whole: put one back from a copy, "
                f"or remove that folder to begin at step 0"
            )
        return None

    def best_step(self) -> int | None:
        """The step of the best checkpoint that there is."""
        return None if self.best is None else self.best.of(self.steps())

    def write(self, step: int, model: dict[str, Any], trainer: dict[str, Any], config: str = "") -> Path:
        """Publish a checkpoint, then remove what is not to be kept. See `publish`."""
        path = self.publish(step, model, trainer, config)
        self.remove_old()
        return path

    def publish(self, step: int, model: dict[str, Any], trainer: dict[str, Any], config: str = "") -> Path:
        """Write a checkpoint; when this returns it is whole and durable. The states must not change meanwhile.

        Raises:
            CheckpointError: a value that safe loading would refuse, or the file system's refusal. What was half written
                is removed.
        """
        require_plain(model, "model")
        require_plain(trainer, "trainer")
        target, beside = self.path(step), self._beside(step)
        try:
            beside.mkdir(mode=0o700)
            files = {MODEL: _write(beside / MODEL, model), TRAINER: _write(beside / TRAINER, trainer)}
            if config:
                files[CONFIG] = _write_bytes(beside / CONFIG, config.encode("utf-8"))
            _write_bytes(beside / MANIFEST, _manifest({"format": FORMAT, "step": step, "files": files}))
            _sync_folder(beside)
            if os.path.lexists(target):  # a damaged one
                os.rename(target, self._discarded(target))
            os.rename(beside, target)
            self._damaged.discard(step)
            _sync_folder(self.folder)
        except (OSError, RuntimeError) as error:
            shutil.rmtree(beside, ignore_errors=True)
            raise CheckpointError(
                f"cannot write the checkpoint {target}: {_why(error)}; the ones before it are untouched"
            ) from error
        return target

    def remove_old(self) -> None:
        """Remove the oldest whole checkpoints beyond those that are kept, and whatever is no checkpoint any more."""
        try:
            # a later one whose bytes are wrong must not drive out those that are written after a return to an earlier one
            known = [step for step in self.steps() if step not in self._damaged]
            whole = [step for step in known if _quick_damage(self.path(step)) is None]
            best = None if self.best is None else self.best.of(whole)
            for step in whole[: -self.keep]:
                if step != best and (self.keep_every is None or step % self.keep_every):
                    # renamed first, so that no half-removed folder bears a checkpoint's name
                    os.rename(self.path(step), self._discarded(self.path(step)))
            self._clear()
        except OSError as error:
            log.warning("old checkpoints in %s could not be removed: %s", self.folder, _why(error))

    def _clear(self) -> None:
        for entry in os.scandir(self.folder):
            if _STALE.fullmatch(entry.name):
                shutil.rmtree(entry.path, ignore_errors=True)

    def _beside(self, step: int) -> Path:
        return self.folder / f".step-{step}.{os.getpid()}.tmp"

    def _discarded(self, path: Path) -> Path:
        return path.with_name(f".{path.name}.{secrets.token_hex(4)}.old")


def read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The model's and the trainer's state of a checkpoint, on the CPU.

    The tensors are mapped, so that the ranks of a node share the memory: copy what is to outlive the checkpoint's files.

    Raises:
        CheckpointError: a file that safe loading refuses, which `Checkpoints` cannot have written.
    """
    return _load(path / MODEL), _load(path / TRAINER)


def _load(path: Path) -> dict[str, Any]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a file that is none of ours can make anything of it
        kind = type(error).__name__
        cause = kind if kind == "UnpicklingError" else f"{kind}: {' '.join(_why(error).split())[:200]}"
        raise CheckpointError(
            f"{path} is refused by safe loading ({cause}): tensors and plain values were needed, and nothing else is "
            f"loaded; put this checkpoint back from a copy, or remove its folder to go on from the one before"
        ) from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds a {type(state).__name__}; a state_dict was needed")
    return state


def configuration(path: Path) -> str:
    """The configuration that a checkpoint was made with, as YAML; empty when it does not say."""
    try:
        return (path / CONFIG).read_text(encoding="utf-8")
    except OSError:
        return ""


def sizes(path: Path) -> dict[str, int]:
    """The size of each file of a whole checkpoint, the manifest's too."""
    names = [*json.loads((path / MANIFEST).read_bytes())["files"], MANIFEST]
    return {name: os.path.getsize(path / name) for name in names}


def await_visible(path: Path, expected: Mapping[str, int], limit_s: float = VISIBLE_S) -> None:
    """Return when this rank sees the files of a checkpoint in the sizes that rank 0 has seen.

    Raises:
        CheckpointError: it does not after `limit_s`; names the first file that is missing or has another size.
    """
    deadline, wait_s = time.monotonic() + limit_s, 0.05
    while fault := _unseen(path, expected):
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"rank 0 has chosen the checkpoint {path}, but here {fault}, {limit_s:.0f} s later: "
                f"the run directory has to be on a file system that all nodes share"
            )
        time.sleep(wait_s)
        wait_s = min(1.0, 2 * wait_s)
        _look_again(path)


def _unseen(path: Path, expected: Mapping[str, int]) -> str | None:
    for name, size in expected.items():
        try:
            found = os.path.getsize(path / name)
        except OSError as error:
            return f"{name} cannot be found ({_why(error)})"
        if found != size:
            return f"{name} has {found} bytes of {size}"
    return None


def _look_again(path: Path) -> None:
    """Have a network file system ask its server: opening a folder does, a look at a name may be answered from memory."""
    for folder in (path.parent, path):
        try:
            os.listdir(folder)
        except OSError:
            return


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, in words; None when every byte is as it was written."""
    fault = _quick_damage(path)
    if fault is not None:
        return fault
    for name, facts in json.loads((path / MANIFEST).read_bytes())["files"].items():
        digest, block = hashlib.sha256(), memoryview(bytearray(1 << 20))
        try:
            with open(path / name, "rb", buffering=0) as stream:
                while count := stream.readinto(block):
                    digest.update(block[:count])
        except OSError as error:
            return f"{name}: {_why(error)}"
        if digest.hexdigest() != facts["sha256"]:
            return f"{name} is not what was written (its SHA-256 differs from the manifest's)"
    return None


def _quick_damage(path: Path) -> str | None:
    """As `damage`, by the manifest, names, kinds and sizes alone."""
    if path.is_symlink() or (path / MANIFEST).is_symlink():
        return "a link stands for it or for its manifest, and what that leads to is not the run's"
    try:
        data = (path / MANIFEST).read_bytes()
        manifest = json.loads(data)
        files = {str(name): int(facts["size"]) for name, facts in manifest["files"].items() if facts["sha256"]}
        version, step = manifest["format"], manifest["step"]
        own = manifest.pop("sha256", None)
    except FileNotFoundError:
        return f"no {MANIFEST}, so it was never finished"
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return f"{MANIFEST} cannot be read: {type(error).__name__}: {error}"
    if version not in READABLE:
        return f"it has format {version}, and this version of the toolkit reads format {READABLE[0]} to {READABLE[-1]}"
    if (version >= 2 or own is not None) and data != _manifest(manifest):
        return f"{MANIFEST} is not what was written (its own SHA-256 differs)"
    if path.name != f"step-{step}":
        return f"{MANIFEST} is that of step {step}"
    if not {MODEL, TRAINER} <= set(files) <= {MODEL, TRAINER, CONFIG}:
        return f"{MANIFEST} lists {', '.join(sorted(files))}; {MODEL} and {TRAINER} were needed"
    for name, size in files.items():
        try:
            found = os.lstat(path / name)
        except OSError as error:
            return f"{name}: {_why(error)}"
        if not stat.S_ISREG(found.st_mode):
            return f"{name} is a link or no file"
        if found.st_size != size:
            return f"{name} has {found.st_size} bytes of {size}"
    return None


def _manifest(content: Mapping[str, Any]) -> bytes:
    """A manifest's text, with the checksum of its content; the same content gives the same bytes."""
    digest = hashlib.sha256(json.dumps(content, indent=1).encode("ascii")).hexdigest()
    return (json.dumps({**content, "sha256": digest}, indent=1) + "\n").encode("ascii")


def _why(error: BaseException) -> str:
    """The cause alone, since the message around it names the path."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error) or type(error).__name__


def require_plain(value: Any, where: str) -> None:
    """Check that safe loading will take a value back.

    Raises:
        CheckpointError: names the place and the type of what is not a tensor, a plain value or a container of these.
    """
    if type(value) in _PLAIN or isinstance(value, torch.Tensor):
        return
    if type(value) in _MAPPINGS:
        for key, item in value.items():
            require_plain(key, where)
            require_plain(item, f"{where}.{key}")
    elif type(value) in (list, tuple, set):
        for index, item in enumerate(value):
            require_plain(item, f"{where}[{index}]")
    else:
        raise CheckpointError(
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}: a checkpoint holds tensors and plain "
            f"values only; let the state_dict of that object return these"
        )


class _Archive:
    """What torch.save writes to: the file and, by a thread beside, its SHA-256. torch.save writes strictly forward.

    Nothing is raised from inside torch.save, which would lose the cause: what fails is in `error` afterwards. Nothing is
    kept in a buffer of Python's either, which a process forked meanwhile would write out a second time.
    """

    def __init__(self, descriptor: int, hasher: ThreadPoolExecutor) -> None:
        self.error: OSError | None = None
        self._descriptor = descriptor
        self._hasher = hasher
        self._digest = hashlib.sha256()
        self._size = 0
        self._small = bytearray()

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if view.nbytes < PIECE // 8:
            self._small += view
            if len(self._small) >= PIECE // 8:
                self.flush()
        else:
            self.flush()
            self._put(view)
        return view.nbytes

    def flush(self) -> None:
        if self._small:
            small, self._small = self._small, bytearray()
            self._put(memoryview(small))

    def facts(self) -> dict[str, Any]:
        return {"size": self._size, "sha256": self._digest.hexdigest()}

    def _put(self, view: memoryview) -> None:
        if self.error is not None:
            return
        hashed = self._hasher.submit(self._digest.update, view)
        done = 0
        try:
            while done < view.nbytes:
                count = os.write(self._descriptor, view[done : done + PIECE])
                os.posix_fadvise(self._descriptor, self._size + done, count, os.POSIX_FADV_DONTNEED)
                done += count
        except OSError as error:
            self.error = error
        finally:
            hashed.result()  # the memory is torch.save's, and may be gone once this returns
        self._size += done


def _write(path: Path, state: dict[str, Any]) -> dict[str, Any]:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with ThreadPoolExecutor(1, "checksum") as hasher:
            archive = _Archive(descriptor, hasher)
            with torch_options.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
                torch.save(state, archive)  # type: ignore[arg-type]
            archive.flush()
        if archive.error is not None:
            raise archive.error
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return archive.facts()


def _write_bytes(path: Path, data: bytes) -> dict[str, Any]:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        if os.write(descriptor, data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _sync_folder(path: Path) -> None:
    """Where the file system can: some network file systems have no fsync for folders. Source: fsync(2), EINVAL."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(descriptor)
