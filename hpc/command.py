"""What follows "--": the script, module or program that the workers run."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc.errors import UsageError

LAUNCHERS = {
    "accelerate": "accelerate launch",
    **{
        name: name
        for name in (
            "torchrun", "accelerate-launch", "deepspeed", "composer", "colossalai", "horovodrun", "msrun",
            "srun", "mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun", "aprun", "ibrun", "jsrun",
        )
    },
}  # fmt: skip
LAUNCHER_MODULES = frozenset(
    ["torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch", "deepspeed.launcher.runner"]
)


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a worker runs: a Python "script" or "module" by its name, or any "program"."""

    kind: str
    name: str
    arguments: tuple[str, ...] = ()

    @property
    def is_training(self) -> bool:
        """The training core itself: it takes SIGTERM as a notice from its first line on."""
        return self.kind == "module" and self.name == "hpc.train"

    def argv(self, python: str) -> list[str]:
        """The command line that runs it in an interpreter or process of its own."""
        if self.kind == "program":
            return [self.name, *self.arguments]
        start = [python, "-u", "-m", self.name] if self.kind == "module" else [python, "-u", self.name]
        return [*start, *self.arguments]


def target_of(command: Sequence[str]) -> Target:
    """What follows "--" on the command line: `train.py ...`, `-m pkg ...`, `python [-u] train.py|-m pkg ...`, `./binary ...`.

    `python` counts as the interpreter that runs this when it is the same file; another one is a program.

    Raises:
        UsageError: the script or program does not exist, may not be executed, or is a launcher itself.
    """
    check(command)
    words, in_python = list(command), False
    if Path(words[0]).name.startswith("python") and _is_this_python(words[0]):
        rest = words[1:]
        while rest and rest[0] == "-u":
            rest.pop(0)
        if rest and (rest[0] == "-m" or not rest[0].startswith("-")):
            words, in_python = rest, True
    if words[0] == "-m":
        if len(words) < 2:
            raise UsageError("`-m` needs the name of a module: -- -m package.module arguments")
        return Target(kind="module", name=words[1], arguments=tuple(words[2:]))
    if in_python or words[0].endswith((".py", ".pyc")):
        if not os.path.isfile(words[0]):
            raise UsageError(f"no script {words[0]!r} in {os.getcwd()}: give its path from there, or an absolute one")
        return Target(kind="script", name=words[0], arguments=tuple(words[1:]))
    program = shutil.which(words[0])
    if program is None:
        hint = "chmod +x it, or put its interpreter before it" if os.path.exists(words[0]) else "give its path"
        raise UsageError(f"no program {words[0]!r} that may be executed, on PATH or in {os.getcwd()}: {hint}")
    return Target(kind="program", name=program, arguments=tuple(words[1:]))


def check(command: Sequence[str]) -> None:
    """Refuse early what can be known wherever the command is typed: a launcher, or a script that is not there.

    Raises:
        UsageError: the command starts workers itself, or names a Python script that does not exist.
    """
    words = list(command)
    launcher = LAUNCHERS.get(os.path.basename(words[0]))
    in_python = words[0] == "-m" or os.path.basename(words[0]).startswith("python")
    module = words[words.index("-m") + 1] if in_python and "-m" in words[:-1] else ""
    if launcher is None and module in LAUNCHER_MODULES:
        launcher = module
    if launcher is not None:
        raise UsageError(
            f"{launcher} starts a process per GPU itself, and so does this toolkit; mixed, every GPU would get several: "
            f"give the script alone, -- train.py arguments"
        )
    if words[0].endswith(".py") and not os.path.isfile(words[0]):
        raise UsageError(f"no script {words[0]!r} in {os.getcwd()}: give its path from there, or an absolute one")
    if not words[0].strip():
        raise UsageError("an empty word follows --; a script or a program was needed")
    there = os.path.exists(words[0])  # an absolute path may be there on the nodes alone
    if os.sep in words[0] and not os.path.isfile(words[0]) and (there or not os.path.isabs(words[0])):
        raise UsageError(
            f"no program {words[0]!r} in {os.getcwd()}: {'it is no file' if there else 'give its path from there'}"
        )
    if os.sep in words[0] and there and not words[0].endswith((".py", ".pyc")) and not os.access(words[0], os.X_OK):
        raise UsageError(f"{words[0]!r} may not be executed: chmod +x it, or put its interpreter before it")


def _is_this_python(word: str) -> bool:
    found = shutil.which(word)
    if found is None:
        return False
    same_environment = os.path.dirname(os.path.abspath(found)) == os.path.dirname(os.path.abspath(sys.executable))
    return same_environment and os.path.realpath(found) == os.path.realpath(sys.executable)
