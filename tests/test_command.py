"""What follows "--" on the command line."""

import sys
from pathlib import Path

import pytest

from hpc.command import check, target_of
from hpc.errors import UsageError


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "no-suffix", "a b.py"):
        (tmp_path / name).write_text("")
    program = tmp_path / "binary"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)


@pytest.mark.parametrize(
    ("command", "kind", "name", "arguments"),
    [
        (["train.py", "--lr", "0.1"], "script", "train.py", ("--lr", "0.1")),
        (["a b.py"], "script", "a b.py", ()),
        (["-m", "pkg.mod", "-x"], "module", "pkg.mod", ("-x",)),
        ([sys.executable, "train.py", "-u"], "script", "train.py", ("-u",)),
        ([sys.executable, "-u", "no-suffix"], "script", "no-suffix", ()),
        ([sys.executable, "-u", "-m", "pkg"], "module", "pkg", ()),
        ([sys.executable, "-O", "train.py"], "program", sys.executable, ("-O", "train.py")),
        (["./binary", "train.py"], "program", "./binary", ("train.py",)),
    ],
)
def test_what_is_run(command: list[str], kind: str, name: str, arguments: tuple[str, ...]) -> None:
    target = target_of(command)
    assert (target.kind, target.name, target.arguments) == (kind, name, arguments)


@pytest.mark.parametrize(
    "command",
    [
        ["torchrun", "--nproc-per-node", "4", "train.py"],
        ["/opt/bin/torchrun", "train.py"],
        ["python", "-m", "torch.distributed.run", "train.py"],
        ["accelerate", "launch", "train.py"],
        ["srun", "python", "train.py"],
        ["-m", "torch.distributed.run", "train.py"],
        ["-m", "accelerate.commands.launch", "train.py"],
        ["accelerate-launch", "train.py"],
        ["/usr/bin/mpiexec.hydra", "-n", "4", "python", "train.py"],
        ["ibrun", "python", "train.py"],
    ],
)
def test_l04_launchers_are_refused_wherever_they_are_typed(command: list[str]) -> None:
    with pytest.raises(UsageError, match="train.py arguments"):
        check(command)


@pytest.mark.parametrize("command", [["nothere.py"], ["./nothere"], ["./no-suffix"], ["/etc"], [""], [" ", "x"]])
def test_what_is_seen_to_be_wrong_is_refused_where_it_is_typed(command: list[str]) -> None:
    with pytest.raises(UsageError):
        check(command)
    check(["/only/on/the/nodes", "x"])


@pytest.mark.parametrize("command", [["nothere.py"], ["./nothere"], ["no-suffix"], ["-m"], ["/etc"]])
def test_what_cannot_be_run_is_named(command: list[str]) -> None:
    with pytest.raises(UsageError):
        target_of(command)
