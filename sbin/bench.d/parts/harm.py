"""Random damage to a checkpoint: a flipped bit, a cut, bytes too many, swapped blocks, a missing file, one of an older save."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

KINDS = ("flip", "cut", "longer", "swap", "missing", "mixed")


def harm(folder: Path, older: Path, files: Sequence[str], chance: random.Random) -> str:
    """Do one damage to the checkpoint in `folder`; returns what was done. `older`: another checkpoint of the run."""
    while True:
        kind, file = chance.choice(KINDS), folder / chance.choice(files)
        before = file.read_bytes()
        if kind == "missing":
            file.unlink()
            return f"{kind} {file.name}"
        at = chance.randrange(len(before))
        after = _damaged(kind, before, at, older / file.name, chance)
        if after != before:
            file.write_bytes(after)
            return f"{kind} {file.name} at {at} of {len(before)}"


def _damaged(kind: str, data: bytes, at: int, older: Path, chance: random.Random) -> bytes:
    if kind == "flip":
        return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
    if kind == "cut":
        return data[:at]
    if kind == "longer":
        return data + bytes(at + 1)
    if kind == "mixed":
        return older.read_bytes()
    size = min(chance.choice([1, 16, 512, 4096]), len(data) // 2)
    one = chance.randrange(len(data) - 2 * size + 1)
    two = chance.randrange(one + size, len(data) - size + 1)
    return data[:one] + data[two : two + size] + data[one + size : two] + data[one : one + size] + data[two + size :]
