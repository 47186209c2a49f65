"""What a run tells on the real Slurm: stacks of a hang over two nodes, verdicts, and its logs through restart and requeue."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_rig import FIRST_USER, Rig, give_to

# Hangs in the first start, wants another attempt in the second one, and raises in that.
SCRIPT = """\
import os, sys, time
import torch, torch.distributed as dist
from hpc.beats import beat

def stuck():
    time.sleep(600)

rank, start = int(os.environ["RANK"]), os.environ["HPC_ATTEMPT"] + os.environ["HPC_RESTART"]
dist.init_process_group("gloo")
print("start", start, flush=True)
for step in range(1, 9):
    if step == 6 and start == "00" and rank == 2:
        stuck()
    if step == 6 and start == "01":
        sys.exit(75)
    if step == 6 and start == "10" and rank == 3:
        raise ValueError("bad batch 17")
    dist.all_reduce(torch.ones(1))
    beat()
    print("rank", rank, "step", step, flush=True)
"""


@pytest.fixture
def folder(cluster: Rig) -> Iterator[Path]:
    folder = cluster.home() / f"told {time.time_ns()}"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    give_to(folder, FIRST_USER)
    yield folder


def test_a_hang_a_requeue_and_an_exception_are_told(cluster: Rig, folder: Path) -> None:
    def door(*words: str | Path, timeout: float = 60) -> str:
        environ = {"PYTHONPATH": str(cluster.clone), "HPC_SITE_CONFIG": ""}
        done = cluster.run([cluster.python, "-m", *words], cwd=folder, env=environ, timeout=timeout)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    shape = ("--partition", "low", "--nodes", "2", "--gpus-per-node", "2", "launch.hang_timeout_s=8")
    said = door("hpc.submit", *shape, "--", "train.py")
    (job_id,) = re.findall(r"^job (\d+) submitted", said, re.MULTILINE)
    (place,) = re.findall(r"^ +directory +(.*)$", said, re.MULTILINE)
    cluster.track(job_id)
    followed: list[str] = []
    follower = threading.Thread(target=lambda: followed.append(door("hpc.logs", "-f", place, timeout=200)))
    follower.start()
    assert cluster.wait(job_id, timeout=180) == "FAILED", cluster.report(job_id)
    events = [json.loads(line) for line in (Path(place) / "record.jsonl").read_text().splitlines()]
    hang, saved, error = [event for event in events if event["event"] == "verdict"]
    check_hang(hang, Path(place), cluster.node_names[:2])
    assert (saved["code"], saved["next"]) == (75, "back into the queue")
    screen = (Path(place) / f"slurm-{job_id}.out").read_text()
    check_error(error, screen, cluster.node_names[1])
    follower.join(60)
    check_logs(followed[0], cluster.node_names[:2])
    errors = door("hpc.logs", place, "--errors", "--attempt", "1")
    assert errors.startswith(f"==== attempt 1: exception, first in rank 3 on {cluster.node_names[1]} ====")
    assert "ValueError: bad batch 17" in errors and "hang" not in errors


def check_hang(verdict: dict[str, Any], place: Path, nodes: list[str]) -> None:
    """Rank 2 sits on the second node; the ranks of the first one wait for it, and so does its neighbour."""
    assert verdict["cause"] == "hang" and (verdict["rank"], verdict["host"], verdict["gpu"]) == (2, nodes[1], "0")
    assert verdict["step"] == 5 and verdict["next"].startswith("started again inside this allocation")
    lines = SCRIPT.split("\n")
    sleep, reduce = (
        next(n for n, line in enumerate(lines, 1) if text in line) for text in ("sleep(600)", "all_reduce")
    )
    assert (
        verdict["stacks"] == f"3 ranks (0,1,3) in all_reduce at train.py:{reduce}; rank 2 in stuck at train.py:{sleep}"
    )
    assert {path.name for path in (place / "attempt-0" / "stacks").iterdir()} >= {f"rank-{n}.txt" for n in range(4)}


def check_error(verdict: dict[str, Any], screen: str, host: str) -> None:
    """The verdict is the last thing on the screen."""
    assert verdict["cause"] == "exception" and (verdict["rank"], verdict["attempt"], verdict["gpu"]) == (3, 1, "1")
    last = screen.rstrip().splitlines()
    begin = max(number for number, line in enumerate(last) if line.startswith("hpc.launch: verdict: "))
    block = last[begin:]
    assert block[0].startswith(
        f"hpc.launch: verdict: exception, first in rank 3 (GPU 1) on {host}, attempt 1, after step 5"
    )
    assert any(
        line.startswith("hpc.launch: next: given up, the job ends with exit code 1; look further: ") for line in block
    )
    assert block[-2] == "ValueError: bad batch 17" and block[-1].startswith(
        f"hpc.launch: rank 3 on {host}, attempt 1: "
    )


def check_logs(text: str, nodes: list[str]) -> None:
    """Three headings, each start's lines under its own, each rank's steps in order, equal lines together."""
    parts = re.split(r"^==== (attempt .*) ====$", text, flags=re.MULTILINE)[1:]
    headings, bodies = parts[::2], parts[1::2]
    assert [heading.split(", began")[0] for heading in headings] == ["attempt 0", "attempt 0, restart 1", "attempt 1"]
    assert all(f"on {nodes[0]}, {nodes[1]}, job " in heading for heading in headings)
    for name, body in zip(("00", "01", "10"), bodies, strict=True):
        assert f"] start {name}\n" in body
        for rank in range(4):
            steps = re.findall(rf"^\[rank {rank} {nodes[rank // 2]}\] rank {rank} step (\d)$", body, re.MULTILINE)
            assert steps == list("12345"), text
