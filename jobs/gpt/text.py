"""The text that jobs.gpt trains on: the standard library's files, read once, split by a hash of their paths."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hpc.errors import ConfigError
from jobs.gpt.config import DataConfig

FILE_MARK = b"\0"
"""Stands before each file; no Python source holds it."""
IGNORED = -100
"""Target of the padding after the last byte: cross_entropy leaves it out."""
LEFT_OUT = frozenset(
    # tests, and what is not the interpreter's own
    {"test", "tests", "site-packages", "dist-packages", "__pycache__"}
    # what distributions put into packages of their own, so that it may be missing
    | {"distutils", "ensurepip", "idlelib", "lib2to3", "tkinter", "turtledemo", "turtle.py"}
    # written at build time or by the site
    | {"sitecustomize.py", "usercustomize.py"}
    # generated: tables of characters, and the manual in one file that outweighs all others
    | {"encodings", "pydoc_data"}
)


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """A text cut into windows: sample i is (bytes, next bytes), both [context] int64.

    Every byte but the first (the first file's mark) is a target exactly once if `pad`; the last window is then
    filled up with targets that count for nothing. Without `pad` a remainder shorter than a window is dropped.
    """

    def __init__(self, text: Tensor, context: int, *, pad: bool) -> None:
        self.text = text  # [bytes] uint8
        self.context = context
        targets = len(text) - 1
        self.windows = -(-targets // context) if pad else targets // context

    def __len__(self) -> int:
        return self.windows

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self.windows:
            raise IndexError(f"window {index} of {self.windows}")
        piece = self.text[index * self.context : (index + 1) * self.context + 1].long()
        inputs, targets = piece[:-1], piece[1:]
        missing = self.context - len(targets)
        if missing:
            inputs = torch.cat([inputs, inputs.new_zeros(missing)])
            targets = torch.cat([targets, targets.new_full((missing,), IGNORED)])
        return inputs, targets


def read_split(data: DataConfig, *, held_out: bool) -> Tensor:
    """The whole text of one side of the split, [bytes] uint8: each file after its mark, in the order of their paths.

    Under a limit, files are taken in the order of a hash of their paths until it is reached, so that a small text
    is a fair sample, and only the files that are used are opened.

    Raises:
        ConfigError: the folder is missing or unreadable, or this side of the split is shorter than one sample.
    """
    root = Path(sysconfig.get_paths()["stdlib"] if data.folder is None else data.folder)
    limit = data.max_eval_bytes if held_out else data.max_bytes
    paths = [path for path in list_files(root, data.suffix) if is_held_out(path, data.held_out) is held_out]
    if limit is not None:
        paths.sort(key=lambda path: _digest(path)[8:])
    texts: dict[str, bytes] = {}
    room = limit
    for path in paths:
        if room is not None and room <= 0:
            break
        texts[path] = FILE_MARK + _read(root / path, room)
        if room is not None:
            room -= len(texts[path]) - 1
    whole = b"".join(texts[path] for path in sorted(texts))
    if len(whole) <= (1 if held_out else data.context):
        raise ConfigError(
            f"{root}: {len(whole)} bytes of {'held-out' if held_out else 'training'} text in {len(texts)} files "
            f"*{data.suffix}, too few for data.context={data.context}; "
            f"check data.folder, data.suffix, data.held_out and the limits data.max_bytes and data.max_eval_bytes"
        )
    return torch.frombuffer(bytearray(whole), dtype=torch.uint8)


def list_files(root: Path, suffix: str) -> list[str]:
    """The paths of all files below `root` with this suffix, relative, with "/", sorted; LEFT_OUT is left out.

    Links are not followed, so that nothing outside the folder is read.

    Raises:
        ConfigError: `root` is no folder that can be listed.
    """
    try:
        return sorted(_walk(os.fspath(root), "", suffix))
    except OSError as error:
        raise ConfigError(
            f"{error.filename}: {error.strerror}; data.folder must be a folder of text that every rank can read"
        ) from error


def is_held_out(path: str, share: float) -> bool:
    """Whether the file of this relative path is held out; the same on every machine, whatever other files there are."""
    return int.from_bytes(_digest(path)[:8], "big") < share * 2**64


def _digest(path: str) -> bytes:
    return hashlib.sha256(os.fsencode(path)).digest()


def _walk(root: str, prefix: str, suffix: str) -> Iterator[str]:
    with os.scandir(os.path.join(root, prefix)) as entries:
        for entry in entries:
            if entry.name in LEFT_OUT or entry.name.startswith("_sysconfigdata"):
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(root, f"{prefix}{entry.name}/", suffix)
            elif entry.is_file(follow_symlinks=False) and entry.name.endswith(suffix):
                yield prefix + entry.name


def _read(path: Path, limit: int | None) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(-1 if limit is None else limit)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; every file of data.folder must be readable") from error
