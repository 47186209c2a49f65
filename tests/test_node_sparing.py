"""A worker that writes a checkpoint while another one fails: the checkpoint is finished first, within limits."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from steps import ROOT, Step
from test_node_agent import run_dir_environ

from hpc.train import checkpoint

JOB = ("toy", "samples=400", "train.batch_size=8", "train.save_every_steps=2", "train.loader_workers=0", "held_out=0")
FAILS = ("trouble=raise", "trouble_step=3", "trouble_rank=1")


@pytest.fixture
def step(tmp_path: Path) -> Iterator[Step]:
    with Step(tmp_path) as running:
        yield running


def outcome(step: Step) -> dict[str, object]:
    found: dict[str, object] = json.loads((step.folder / "run" / "attempt-0" / "outcome.json").read_text())
    return found


def whole(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step-*") if checkpoint.damage(path) is None)


@pytest.mark.slow
@pytest.mark.parametrize(("slow_s", "grace", "expected"), [("3", "30", ["step-2"]), ("60", "2", [])])
def test_a_save_under_way_is_finished_when_another_rank_fails(
    step: Step, slow_s: str, grace: str, expected: list[str]
) -> None:
    """Its first file takes `slow_s` to sync. The rank that failed is the first one all the same."""
    environ = {**run_dir_environ(step, tasks_per_node=(1,)), "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    begun = time.monotonic()
    step.agent(
        environ, "--workers-per-node", "2", "--grace", grace, *JOB, *FAILS, f"slow_sync_s={slow_s}", "slow_sync_only=2"
    )
    (ended,) = step.ends()
    first = outcome(step)["first"]
    assert isinstance(first, dict) and ended.code == 1 and first["rank"] == 1 and "bad batch 17" in first["message"]
    assert whole(step.folder / "run" / "checkpoints") == expected, ended.stderr
    assert time.monotonic() - begun < 50 and step.gone(5)
