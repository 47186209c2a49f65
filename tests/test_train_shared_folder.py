"""A run directory that is slow, or that one rank's node alone cannot write to: nobody is taken to hang, and it is told."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import pytest
from rank_server import Ranks
from steps import LIMIT_S, ROOT, Step, step_environ
from test_train_loop import RUN

from hpc.beats import SIZE, VARIABLE, read
from hpc.train.checkpoint import Checkpoints, damage

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="a view of its own on a folder needs root")
SHAPE = ("toy", "samples=80", "train.batch_size=8", "train.loader_workers=0", "held_out=0")


@pytest.mark.slow
def test_ranks_that_wait_for_a_slow_save_neither_hang_nor_time_out(tmp_path: Path) -> None:
    """The first save takes longer than a step may take, and than a collective may wait; the next one waits for it."""
    environ = {**step_environ(0, tasks_per_node=(1,)), "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    environ |= {"HPC_RUN_DIR": str(tmp_path / "run"), "HPC_ATTEMPT": "0"}
    (tmp_path / "run" / "attempt-0").mkdir(parents=True, mode=0o700)
    slow = ("slow_sync_s=7", "slow_sync_only=2", "train.save_every_steps=9", "train.timeout_s=5", "train.threads=1")
    with Step(tmp_path) as step:
        step.agent(environ, "--workers-per-node", "2", "--hang-timeout", "5", *SHAPE, *slow)
        (ended,) = step.ends()
    assert ended.code == 0 and "hung" not in step.text() and "done: 10 steps" in step.text(), step.text()
    events = [json.loads(line) for line in (tmp_path / "run" / "record.jsonl").read_text().splitlines()]
    saved = {event["step"]: event for event in events if event["event"] == "saved"}
    assert saved[10]["stall_s"] > 5 and saved[9]["seconds"] > 7, saved  # longer than both limits
    assert damage(tmp_path / "run/checkpoints/step-10") is None


@pytest.mark.slow
def test_a_long_evaluation_gives_a_sign_of_life_with_each_batch(tmp_path: Path) -> None:
    """The limit is that of a batch, not of all of them together."""
    beats = os.open(tmp_path / "beats", os.O_RDWR | os.O_CREAT)
    os.truncate(beats, SIZE)
    memory, done = mmap.mmap(beats, SIZE), threading.Event()
    silent_s: list[float] = []

    def watch() -> None:
        while not done.wait(0.02):
            beat = read(memory)
            if beat is not None and beat.phase == "evaluate":
                silent_s.append(beat.age_s)

    thread = threading.Thread(target=watch)
    thread.start()
    argv = [sys.executable, "-m", "hpc.train", "toy", RUN, "samples=8", "train.batch_size=8", "held_out=48"]
    argv += [
        "trouble=notice CONT",
        "trouble_at=evaluate",
        "trouble_step=1",
        "slow_after_s=0.3",
        "train.loader_workers=0",
    ]
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "HPC_SITE_CONFIG": ""}
    environ |= {VARIABLE: str(beats), "OMP_NUM_THREADS": "1"}
    try:
        subprocess.run(argv, cwd=tmp_path, env=environ, pass_fds=[beats], check=True, timeout=LIMIT_S)
    finally:
        done.set()
        thread.join()
        os.close(beats)
    assert sum(later < sooner for sooner, later in pairwise(silent_s)) >= 2  # it would only grow


@pytest.mark.slow
@needs_root
def test_a_read_only_folder_on_another_node_than_rank_zeros_hurts_nobody(ranks: Ranks, tmp_path: Path) -> None:
    trouble = ("trouble=readonly", "trouble_at=data", "trouble_step=1", "trouble_rank=1")
    ranks(tmp_path, *SHAPE, RUN, *trouble, "train.save_every_steps=4", ranks=2).check()
    assert Checkpoints(tmp_path / "run/checkpoints").steps() == [8, 10]
    assert damage(tmp_path / "run/checkpoints/step-10") is None


@pytest.mark.slow
@needs_root
@pytest.mark.parametrize(
    ("log_every", "told"),
    [
        (100, "CheckpointError: cannot write the checkpoint {}/checkpoints/step-8: Read-only file system"),
        (1, "MetricsError: the figures of the run cannot be written to {}/metrics.jsonl: Read-only file system"),
    ],
)
def test_k19_a_folder_that_becomes_read_only_on_rank_zeros_node_is_told_with_the_old_one_intact(
    ranks: Ranks, tmp_path: Path, log_every: int, told: str
) -> None:
    trouble = ("trouble=readonly", "trouble_step=6", "trouble_rank=0", f"train.log_every_steps={log_every}")
    trial = ranks(tmp_path, *SHAPE, RUN, *trouble, "train.save_every_steps=4", ranks=2)
    line = told.format(tmp_path / "run").partition(": ")[2]
    assert trial.codes[0] == 1 and trial.codes[1] not in (0, 75), trial.text()
    assert line in trial.logs[0] and "untouched" in trial.logs[0], trial.text()
    folder = tmp_path / "run/checkpoints"
    assert os.listdir(folder) == ["step-4"] and Checkpoints(folder).newest() == folder / "step-4"
