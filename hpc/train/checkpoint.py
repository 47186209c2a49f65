"""Checkpoints: each is whole or does not exist.

    checkpoints/step-<n>/model.pt       the model's state_dict
                         trainer.pt     optimizer, schedule, scaler, random generators, position: tensors and plain values
                         manifest.json  sizes and SHA-256 of both, written last

All of it is written and synced in a folder beside (.step-<n>.<pid>.tmp) and published by one rename. Both files load
with torch's safe loading (weights_only=True). Only rank 0 writes here and makes folders.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
import shutil
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import torch

from hpc.errors import HpcError

log = logging.getLogger("hpc.train")

MODEL, TRAINER, MANIFEST = "model.pt", "trainer.pt", "manifest.json"
FORMAT = 1
_STEP = re.compile(r"step-([0-9]+)")
_STALE = re.compile(r"\.step-[0-9]+\..*")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.Tensor, torch.Size, torch.dtype, torch.device)
_MAPPINGS = (dict, OrderedDict, Counter)


class CheckpointError(HpcError):
    """A checkpoint that cannot be written, or a run that has checkpoints of which none is whole."""


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder = folder
        self.keep = keep

    def prepare(self) -> None:
        """Make the folder, and clear what a killed attempt left half written."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        for entry in os.scandir(self.folder):
            if _STALE.fullmatch(entry.name):
                shutil.rmtree(entry.path, ignore_errors=True)

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
            log.warning("checkpoint %s is damaged and skipped: %s", self.path(step), fault)
        if steps:
            raise CheckpointError(
                f"none of the {len(steps)} checkpoints in {self.folder} is whole: put one back from a copy, "
                f"or remove that folder to begin at step 0"
            )
        return None

    def write(self, step: int, model: dict[str, Any], trainer: dict[str, Any]) -> Path:
        """Publish a checkpoint, then remove the oldest whole ones beyond `keep`.

        Raises:
            CheckpointError: a value that safe loading would refuse, or the file system's refusal.
        """
        require_plain(model, "model")
        require_plain(trainer, "trainer")
        target = self.path(step)
        beside = self.folder / f".step-{step}.{os.getpid()}.tmp"
        try:
            beside.mkdir(mode=0o700)
            files = {MODEL: _write(beside / MODEL, model), TRAINER: _write(beside / TRAINER, trainer)}
            manifest = json.dumps({"format": FORMAT, "step": step, "files": files}, indent=1) + "\n"
            _write_bytes(beside / MANIFEST, manifest.encode("ascii"))
            _sync_folder(beside)
            self._publish(beside, target)
        except (OSError, RuntimeError) as error:  # torch's archive writer turns a full disk into a RuntimeError
            shutil.rmtree(beside, ignore_errors=True)
            raise CheckpointError(
                f"cannot write the checkpoint {target}: {error}; the ones before it are untouched"
            ) from error
        self._remove_oldest()
        return target

    def _publish(self, beside: Path, target: Path) -> None:
        if target.exists():  # a damaged one, or a resumed run that comes here again
            os.rename(target, self._discarded(target))
        os.rename(beside, target)
        _sync_folder(self.folder)

    def _remove_oldest(self) -> None:
        whole = [step for step in self.steps() if _quick_damage(self.path(step)) is None]
        for step in whole[: -self.keep]:
            discarded = self._discarded(self.path(step))
            os.rename(self.path(step), discarded)  # so that no half-removed folder bears a checkpoint's name
            shutil.rmtree(discarded, ignore_errors=True)
        for entry in os.scandir(self.folder):
            if _STALE.fullmatch(entry.name):
                shutil.rmtree(entry.path, ignore_errors=True)

    def _discarded(self, path: Path) -> Path:
        return path.with_name(f".{path.name}.{secrets.token_hex(4)}.old")


def read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The model's and the trainer's state of a checkpoint, on the CPU."""
    model: dict[str, Any] = torch.load(path / MODEL, map_location="cpu", weights_only=True)
    trainer: dict[str, Any] = torch.load(path / TRAINER, map_location="cpu", weights_only=True)
    return model, trainer


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, in words; None when every byte is as it was written."""
    fault = _quick_damage(path)
    if fault is not None:
        return fault
    for name, facts in json.loads((path / MANIFEST).read_bytes())["files"].items():
        digest = hashlib.sha256()
        try:
            with open(path / name, "rb") as stream:
                while block := stream.read(1 << 20):
                    digest.update(block)
        except OSError as error:
            return f"{name}: {error.strerror or error}"
        if digest.hexdigest() != facts["sha256"]:
            return f"{name} is not what was written (its SHA-256 differs from the manifest's)"
    return None


def _quick_damage(path: Path) -> str | None:
    """As `damage`, by names and sizes alone."""
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        files = {str(name): int(facts["size"]) for name, facts in manifest["files"].items() if facts["sha256"]}
        version = manifest["format"]
    except FileNotFoundError:
        return f"no {MANIFEST}, so it was never finished"
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return f"{MANIFEST} cannot be read: {type(error).__name__}: {error}"
    if version != FORMAT:
        return f"it has format {version}, and this version of the toolkit reads format {FORMAT}"
    if set(files) != {MODEL, TRAINER}:
        return f"{MANIFEST} lists {', '.join(sorted(files))}; {MODEL} and {TRAINER} were needed"
    for name, size in files.items():
        try:
            found = os.path.getsize(path / name)
        except OSError as error:
            return f"{name}: {error.strerror or error}"
        if found != size:
            return f"{name} has {found} bytes of {size}"
    return None


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


class _Hashing:
    """A file that knows the SHA-256 and size of what was written to it; torch.save writes strictly forward."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._digest = hashlib.sha256()
        self._size = 0

    def write(self, data: Any) -> int:
        self._stream.write(data)
        self._digest.update(data)
        length = memoryview(data).nbytes
        self._size += length
        return length

    def flush(self) -> None:
        self._stream.flush()

    def facts(self) -> dict[str, Any]:
        return {"size": self._size, "sha256": self._digest.hexdigest()}


def _write(path: Path, state: dict[str, Any]) -> dict[str, Any]:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
        hashing = _Hashing(stream)
        torch.save(state, hashing)  # type: ignore[arg-type]
        stream.flush()
        os.fsync(stream.fileno())
    return hashing.facts()


def _write_bytes(path: Path, data: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
