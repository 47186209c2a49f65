"""Stacks at a hang: what every rank does is asked for on every node before anybody is ended, and says who the cause is."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from steps import Step, step_environ

from hpc.node.inquest import Inquest
from hpc.node.outcome import Failure
from hpc.node.stacks import Stack, culprits, groups_of, main_frames, spied_frames, waits, words_of

if TYPE_CHECKING:
    from hpc.node.environment import TaskEnvironment

LOADER = """
import os, time
import torch, torch.distributed as dist
from torch.utils.data import DataLoader
from hpc.beats import beat

class Numbers:
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if index == 9 and os.environ["RANK"] == "2":
            time.sleep(600)
        return index

dist.init_process_group("gloo")
for batch in DataLoader(Numbers(), num_workers=1 if os.environ["RANK"] == "2" else 0):
    dist.all_reduce(torch.ones(1))
    beat()
"""


@pytest.fixture
def step(tmp_path: Path) -> Iterator[Step]:
    with Step(tmp_path) as running:
        yield running


def environ_of(step: Step, task: int = 0, *, tasks_per_node: tuple[int, ...] = (1, 1)) -> dict[str, str]:
    """As the controller would start an agent: with a run directory and an attempt's folder."""
    (step.folder / "run" / "attempt-0").mkdir(parents=True, exist_ok=True)
    environ = step_environ(task, tasks_per_node=tasks_per_node)
    return {**environ, "HPC_RUN_DIR": str(step.folder / "run"), "HPC_ATTEMPT": "0", "HPC_SECRET": "s" * 32}


def outcome_of(step: Step) -> dict[str, object]:
    return json.loads((step.folder / "run" / "attempt-0" / "outcome.json").read_text())


@pytest.mark.slow
def test_the_rank_in_the_loader_is_the_cause_and_not_those_that_wait_for_it(step: Step) -> None:
    """Three ranks of two nodes are in a collective, whose C code does not let Python's own handlers run."""
    (step.folder / "train.py").write_text(LOADER)
    arguments = ("--workers-per-node", "2", "--allow-loopback", "--hang-timeout", "6", "--", "train.py")
    for task in range(2):
        step.agent(environ_of(step, task), *arguments)
    ended = step.ends()
    assert [one.code for one in ended] == [124, 124], [one.stderr for one in ended]
    first = outcome_of(step)["first"]
    assert isinstance(first, dict)
    line = (
        LOADER.split("\n").index(
            'for batch in DataLoader(Numbers(), num_workers=1 if os.environ["RANK"] == "2" else 0):'
        )
        + 1
    )
    waiting = f"3 ranks (0,1,3) in all_reduce at train.py:{line + 1}"
    assert first["stacks"] == f"{waiting}; rank 2 in DataLoader next at train.py:{line}", ended[0].stderr
    assert first["rank"] == 2 and first["hung"] is True and first["message"].startswith("hung")
    assert f'train.py", line {line}, in <module>' in first["traceback"] and "hpc/node" not in first["traceback"]
    folder = step.folder / "run" / "attempt-0" / "stacks"
    assert sorted(path.name for path in folder.iterdir()) == [*(f"rank-{n}.txt" for n in range(4)), "summary.txt"]
    assert "most recent call first" in (folder / "rank-3.txt").read_text()
    assert waiting in (folder / "summary.txt").read_text()
    assert step.gone(10), step.left()


DUMP = """\
Thread 0x00007f8a276c46c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 975 in run
  File "/usr/lib/python3.11/threading.py", line 995 in _bootstrap

Current thread 0x00007f8a27983040 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 2501 in all_reduce
  File "/venv/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/you/project/loop.py", line 120 in <module>
  File "/home/you/toolkit/hpc/node/worker.py", line 190 in run_as_main
  File "/home/you/toolkit/hpc/node/__main__.py", line 30 in main
"""


def test_the_words_name_the_call_and_the_line_that_is_the_users() -> None:
    frames = main_frames(DUMP)
    assert [frame.function for frame in frames] == ["all_reduce", "wrapper", "<module>"]
    assert words_of(frames) == "in all_reduce at loop.py:120" and waits(words_of(frames))
    assert words_of(main_frames("nothing")) == "with no Python stack"
    assert words_of(frames[:1]) == "in all_reduce at distributed_c10d.py:2501"
    assert words_of(frames[2:]) == "in <module> at loop.py:120" and not waits("in <module> at loop.py:120")
    assert waits("in backward at loop.py:3") and not waits("in backwards at loop.py:3")


def stack(rank: int, words: str) -> Stack:
    return Stack(rank=rank, host="n1", words=words, waits=waits(words))


@pytest.mark.parametrize(
    ("words", "guilty"),
    [
        (["in all_reduce at a:1"] * 3 + ["in DataLoader next at a:2"], (3,)),
        (["in DataLoader next at a:2", "in all_reduce at a:1"], (0,)),  # whoever has the majority
        (["in all_reduce at a:1", "in read at d:5", "in read at d:5"], (1, 2)),
        (["in backward at a:9", "in barrier at a:7", "in backward at a:9"], (1,)),  # ranks that took different ways
        (["in item at a:4", "in item at a:4", "in load at d:5"], (2,)),
        (["in join at saving.py:9", "in await_rank_zero at loop.py:5", "in await_rank_zero at loop.py:5"], (0,)),
        (["in all_reduce at a:1"] * 4, ()),
        (["in load at d:5", "in item at a:4"], ()),
    ],
)
def test_the_cause_is_who_does_not_wait(words: list[str], guilty: tuple[int, ...]) -> None:
    stacks = [stack(rank, text) for rank, text in enumerate(words)]
    assert culprits(groups_of(stacks)) == guilty
    assert Stack.from_dict(json.loads(json.dumps(stacks[0].to_dict()))) == stacks[0]


def test_a_cause_whose_own_silence_nobody_has_noticed_yet_is_told_as_fully() -> None:
    """Another node's agent was quicker: its rank only waits, and the cause is known by its stack alone."""
    inquest = Inquest(cast("TaskEnvironment", SimpleNamespace(task_rank=0, tasks=2)), "n1", print)
    cause = replace(stack(2, "in <module> at train.py:16"), host="n2", gpu="0", step=7, log="rank-2.log")
    inquest.hear(0, [stack(0, "in all_reduce at a:1")])
    inquest.hear(1, [cause.to_dict(), stack(3, "in all_reduce at a:1").to_dict()])
    assert inquest.complete
    waiting = Failure(rank=0, host="n1", code=124, time=50.0, message="hung: no step for 8 s", hung=True)
    first = inquest.conclude([waiting])[0]
    assert (first.rank, first.host, first.gpu, first.step, first.log) == (2, "n2", "0", 7, "rank-2.log")
    assert first.hung and first.time < waiting.time and "2 ranks (0,3) in all_reduce at a:1" in first.stacks


def test_the_main_thread_of_what_py_spy_shows_is_the_one_with_the_process_number() -> None:
    """Its name is shown where the program knows names; py-spy 0.4.3 tells a method with its class."""
    below = [
        "    _MultiProcessingDataLoaderIter._next_data (/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py:1511)",
        "    _BaseDataLoaderIter.__next__ (/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py:741)",
        "    <module> (/home/you/project/loop.py:7)",
        "    run_as_main (/home/you/toolkit/hpc/node/worker.py:190)",
        "    main (/home/you/toolkit/hpc/node/__main__.py:30)",
    ]
    another = ["    Thread._bootstrap (/usr/lib/python3.11/threading.py:995)"]
    for heads in (
        ("Thread 4712 (idle)", "Thread 4711 (idle)"),
        ("Thread 0x7F1 (idle)", 'Thread 0x7F0 (idle): "MainThread"'),
    ):
        frames = spied_frames("\n".join([heads[0], *another, heads[1], *below, ""]), 4711)
        assert words_of(frames) == "in DataLoader next at loop.py:7"
        assert [frame.function for frame in frames] == ["_next_data", "__next__", "<module>"]
    assert spied_frames("Process 4711: python train.py\n", 4711) == []


SILENT = """
import os, time
from hpc.beats import beat
def stuck():
    time.sleep(600)
if os.environ["RANK"] == "1":
    print("step", flush=True)
    beat()
    stuck()
while True:
    print("step", flush=True)
    time.sleep(0.2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("spy", [False, True], ids=["kernel", "py-spy"])
def test_a_script_that_prints_no_more_is_ended_where_output_counts_as_a_step(step: Step, spy: bool) -> None:
    """Fresh interpreters: the one that has called beat() shows its stack, the other is looked at from outside and not hurt."""
    (step.folder / "silent.py").write_text(SILENT)
    program = Path(sys.executable).parent / "py-spy"
    assert program.exists(), "the tests' packages have it (pyproject.toml)"
    environ = environ_of(step, tasks_per_node=(1,))
    others = [name for name in environ["PATH"].split(os.pathsep) if not (Path(name) / "py-spy").exists()]
    environ["PATH"] = os.pathsep.join([str(program.parent), *others] if spy else others)
    arguments = ("--no-fork", "--workers-per-node", "2", "--hang-timeout", "4", "--output-beats", "--", "silent.py")
    step.agent(environ, *arguments)
    (ended,) = step.ends()
    first = outcome_of(step)["first"]
    assert isinstance(first, dict) and ended.code == 124, ended.stderr
    assert first["rank"] == 1 and first["message"].startswith("hung: no sign of life for ")
    assert "rank 1 in stuck at silent.py:5" in first["stacks"], first["stacks"]
    other = f"rank 0 in <module> at silent.py:{len(SILENT.splitlines())}" if spy else "rank 0 without"
    assert other in first["stacks"], first["stacks"]
    assert step.gone(10), step.left()
