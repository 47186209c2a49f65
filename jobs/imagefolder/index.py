"""Which images there are: listed from the folder, or read from an index file that was written once.

    python -m jobs.imagefolder.index /data/imagenet                  writes /data/imagenet/index.txt
    python -m hpc.submit ... jobs.imagefolder data.root=/data/imagenet data.index=/data/imagenet/index.txt

Without an index every rank lists every class folder when it starts: with 1,000 classes and 8,000 ranks, 16 million
directory reads of one metadata server at the same moment. With it each rank reads one file. The index has one path
below the root per line, sorted ("train/cat/1.jpg"), so `find train val -type f | LC_ALL=C sort` makes one too.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shlex
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc.errors import ConfigError, HpcError, report

SPLITS = ("train", "val")
SUFFIXES = (".jpg", ".jpeg", ".png")


@dataclass(frozen=True)
class Split:
    """The images of one split, in three flat pieces instead of a list of a million strings.

    A data-loader process shares its parent's memory until somebody writes to it, and counting the references to a
    string writes to it: each process would end up with a copy of the whole list.
    """

    root: Path
    names: bytes
    """All paths below the root, joined without a separator."""
    ends: array[int]
    """Where each path ends in `names`."""
    labels: array[int]
    """Each image's class, as its place in `classes`."""
    classes: tuple[str, ...]
    """The class folders' names, sorted."""

    def __len__(self) -> int:
        return len(self.ends)

    def path(self, index: int) -> Path:
        """The image's file."""
        start = self.ends[index - 1] if index else 0
        return self.root / os.fsdecode(self.names[start : self.ends[index]])


def read_splits(root: Path, index: Path | None) -> dict[str, Split]:
    """The images of both splits: {"train": ..., "val": ...}, from the index file or else from the folder.

    Classes are the folders of train/, whether or not val/ has images of each.

    Raises:
        ConfigError: the root or the index is missing or unreadable; there are no classes or no images; a line of the
            index is of another form; val/ has a class that train/ has not.
    """
    if not root.is_dir():
        raise ConfigError(
            f"data.root={os.fspath(root)!r} is not a folder here; it must hold train/<class>/ and val/<class>/"
        )
    paths = list_images(root) if index is None else _read_index(index)
    source = root if index is None else index
    by_split: dict[str, list[str]] = {split: [] for split in SPLITS}
    for path in paths:
        by_split[path.partition("/")[0]].append(path)
    classes = tuple(sorted({path.split("/", 2)[1] for path in by_split["train"]}))
    if not classes:
        raise ConfigError(
            f"{source}: no image in train/<class>/; needed are files *{', *'.join(SUFFIXES)} in one folder per class"
        )
    if not by_split["val"]:
        raise ConfigError(
            f"{source}: no image in val/<class>/; put some images aside there, in the same classes as train/"
        )
    return {split: _split(root, by_split[split], classes) for split in SPLITS}


def list_images(root: Path) -> list[str]:
    """The paths of all images of both splits below `root`, sorted: "train/cat/1.jpg". One listing per folder.

    Raises:
        ConfigError: train/ or val/ is missing or unreadable, or a name has a line break.
    """
    found: list[str] = []
    for split in SPLITS:
        try:
            with os.scandir(root / split) as entries:
                classes = sorted(entry.name for entry in entries if entry.is_dir())
            for name in classes:
                found.extend(_walk(root, f"{split}/{name}"))
        except OSError as error:
            raise ConfigError(
                f"{error.filename}: {error.strerror}; data.root must hold train/<class>/ and val/<class>/, readable for you"
            ) from error
    for path in found:
        if "\n" in path or "\r" in path:
            raise ConfigError(f"{path!r} has a line break in its name; rename it")
    return sorted(found)


def write_index(root: Path, target: Path) -> int:
    """Write the index of `root` to `target`, whole or not at all; the number of images.

    Raises:
        ConfigError: as `list_images` and `read_splits`, or the target cannot be written.
    """
    paths = list_images(root)
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with open(beside, "xb") as file:
            file.write(b"".join(os.fsencode(path) + b"\n" for path in paths))
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, target)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise ConfigError(f"{target}: {error.strerror}; give a file that you can write with --output") from error
    return len(paths)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.imagefolder.index",
        description="List a folder of images once, for data.index of jobs.imagefolder.",
    )
    parser.add_argument("root", type=Path, metavar="ROOT", help="the folder with train/<class>/ and val/<class>/")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where to write; by default ROOT/index.txt")
    arguments = parser.parse_args(argv)
    target = arguments.output or arguments.root / "index.txt"
    try:
        count = write_index(arguments.root, target)
        splits = read_splits(arguments.root, target)
    except HpcError as error:
        return report(parser.prog, error)
    train, val = splits["train"], splits["val"]
    print(
        f"{target}: {count} images, {len(train)} to train on and {len(val)} held out, in {len(train.classes)} classes"
    )
    words = (f"data.root={arguments.root.absolute()}", f"data.index={target.absolute()}")
    print(f"next: python -m hpc.submit jobs.imagefolder {shlex.join(words)}")
    return 0


def _walk(root: Path, folder: str) -> Iterator[str]:
    with os.scandir(root / folder) as entries:
        for entry in entries:
            if entry.is_dir():
                yield from _walk(root, f"{folder}/{entry.name}")
            elif entry.name.lower().endswith(SUFFIXES):
                yield f"{folder}/{entry.name}"


def _read_index(index: Path) -> list[str]:
    try:
        lines = os.fsdecode(index.read_bytes()).split("\n")
    except OSError as error:
        raise ConfigError(
            f"data.index={os.fspath(index)!r}: {error.strerror}; write it with `python -m jobs.imagefolder.index ROOT`"
        ) from error
    paths = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        parts = line.split("/")
        if len(parts) < 3 or parts[0] not in SPLITS or ".." in parts:
            raise ConfigError(
                f"{index}, line {number}: {line!r} is not of the form train/<class>/<image> or val/<class>/<image>"
            )
        if line.lower().endswith(SUFFIXES):
            paths.append(line)
    return sorted(paths)


def _split(root: Path, paths: list[str], classes: tuple[str, ...]) -> Split:
    number_of = {name: number for number, name in enumerate(classes)}
    names = [os.fsencode(path) for path in paths]
    labels = array("q")
    for path in paths:
        name = path.split("/", 2)[1]
        if name not in number_of:
            raise ConfigError(
                f"{root / path}: there is no train/{name}/ with images; val/ may only have classes of train/"
            )
        labels.append(number_of[name])
    return Split(root, b"".join(names), array("q", itertools.accumulate(map(len, names))), labels, classes)


if __name__ == "__main__":
    sys.exit(main())
