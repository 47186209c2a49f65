"""The main job on the real Slurm, as an ordinary user: trained by every door, mapped in every layout, gone at the end."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_rig import FIRST_USER, Rig, give_to

SHOW = """\
import os, socket
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "DEVICE_INDEX", "CUDA_VISIBLE_DEVICES")
print("PLACE", socket.gethostname(), *(os.environ.get(name, "-") or "none" for name in names), flush=True)
"""
MEET = """\
import os, socket, subprocess, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
if "children" in sys.argv:
    subprocess.Popen(["sleep", "987"], start_new_session=True)
    subprocess.Popen(["sh", "-c", "sleep 986 & exit 0"], start_new_session=True).wait()
for step in range(100000):
    value = torch.ones(1)
    dist.all_reduce(value)
    if step == 3:
        print("MET", rank, int(value.item()), socket.gethostname(), flush=True)
        if "fail" in sys.argv and rank == 5:
            raise ValueError("bad batch 17")
        if "go-on" not in sys.argv and "fail" not in sys.argv:
            break
    time.sleep(0.02)
dist.destroy_process_group()
"""


@pytest.fixture
def folder(cluster: Rig, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A working directory of the ordinary user with two torchrun-style scripts."""
    folder = cluster.home() / f"work {request.node.name[:40]} {time.time_ns()}"
    folder.mkdir()
    (folder / "show.py").write_text(SHOW)
    (folder / "meet.py").write_text(MEET)
    give_to(folder, FIRST_USER)
    yield folder


def environ(cluster: Rig) -> dict[str, str]:
    return {"PYTHONPATH": str(cluster.clone), "HPC_SITE_CONFIG": ""}


def places(text: str) -> list[list[str]]:
    """Host, rank, world, local rank, local world, node rank, device, visible GPUs; by rank."""
    return sorted((line.split()[1:] for line in re.findall(r"PLACE .*", text)), key=lambda place: int(place[1]))


def by_hand(cluster: Rig, folder: Path, *srun: str, script: str = "show.py") -> str:
    """`srun ... python -m hpc.node -- script`, typed on the login node; torch is imported only where the script does."""
    fork = [] if script == "meet.py" else ["--no-fork"]
    argv = ["srun", *srun, cluster.python, "-m", "hpc.node", *fork, "--", script]
    done = cluster.run(argv, cwd=folder, env=environ(cluster), timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def nothing_left(cluster: Rig, limit_s: float) -> None:
    """No process of the ordinary user on any node, within the limit."""
    deadline = time.monotonic() + limit_s
    while left := cluster.processes_of(FIRST_USER):
        assert time.monotonic() < deadline, left
        time.sleep(0.3)


def submitted(cluster: Rig, folder: Path, *words: str) -> tuple[str, Path]:
    """Submit without waiting; job id and run directory."""
    done = cluster.run([cluster.python, "-m", "hpc.submit", *words], cwd=folder, env=environ(cluster), timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    (job_id,) = re.findall(r"^job (\d+) submitted", done.stdout, re.MULTILINE)
    (run_dir,) = re.findall(r"^ +directory +(.*)$", done.stdout, re.MULTILINE)
    return cluster.track(job_id), Path(run_dir)


def wait_for(file: Path, text: str, count: int = 1, limit_s: float = 90) -> None:
    deadline = time.monotonic() + limit_s
    while not file.exists() or file.read_text(errors="replace").count(text) < count:
        assert time.monotonic() < deadline, file.read_text() if file.exists() else f"no {file}"
        time.sleep(0.2)


def answers(cluster: Rig, node: str, limit_s: float = 90) -> None:
    """A node that was just booted: wait until a step on it starts, so that the next test finds a whole cluster."""
    deadline = time.monotonic() + limit_s
    while (done := cluster.run(["srun", "--nodelist", node, "true"], timeout=120)).returncode != 0:
        assert time.monotonic() < deadline, done.stderr
        time.sleep(1)


# ---- the main job ----------------------------------------------------------------------------------------------------


def check_digits(cluster: Rig, text: str, run_dir: Path) -> None:
    (accuracy,) = re.findall(r"done: .*accuracy ([0-9.]+) %", text)
    assert float(accuracy) >= 97.0
    events = [json.loads(line) for line in (run_dir / "record.jsonl").read_text().splitlines()]
    started = next(event for event in events if event["event"] == "started")
    assert started["world_size"] == 8
    ranks = {host: 0 for host, _, _ in started["nodes"]}
    for host, _, count in started["nodes"]:
        ranks[host] += count
    assert ranks == dict.fromkeys(cluster.node_names, 4)
    assert events[-1]["event"] == "ended" and events[-1]["code"] == 0
    assert list((run_dir / "checkpoints").glob("step-*"))


@pytest.mark.parametrize("layout", ["task-per-node", "task-per-gpu"])
def test_submit_trains_digits_on_eight_ranks_of_two_nodes(cluster: Rig, folder: Path, layout: str) -> None:
    words = ["--nodes", "2", "--gpus-per-node", "4", "--follow", "--layout", layout]
    argv = [cluster.python, "-m", "hpc.submit", *words]
    done = cluster.run(argv, cwd=folder, env=environ(cluster), timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    (job_id,) = re.findall(r"^job (\d+) submitted", done.stdout, re.MULTILINE)
    assert cluster.job(job_id)["JobState"] == "COMPLETED"
    (run_dir,) = (folder / "runs").iterdir()
    check_digits(cluster, done.stdout, run_dir)
    nothing_left(cluster, 5)


def test_raw_sbatch_trains_digits_too(cluster: Rig, folder: Path) -> None:
    script = f"{cluster.clone}/sbin/ddp.sbatch"
    argv = ["sbatch", "--wait", "--nodes", "2", "--gpus-per-node", "4", script, "jobs.digits", "train.seed=1"]
    done = cluster.run(argv, cwd=folder, env={"HPC_PYTHON": cluster.python}, timeout=240)
    (output,) = folder.glob("slurm-*.out")
    assert done.returncode == 0, output.read_text() + done.stderr
    job_id = output.stem.removeprefix("slurm-")
    (run_dir,) = (folder / "runs").iterdir()
    assert run_dir.name == f"digits-{job_id}"
    assert "seed: 1" in (run_dir / "config.yaml").read_text()
    check_digits(cluster, output.read_text(), run_dir)


# ---- every layout ----------------------------------------------------------------------------------------------------


def test_srun_by_hand_in_both_layouts(cluster: Rig, folder: Path) -> None:
    expected = [
        [cluster.node_names[r // 4], str(r), "8", str(r % 4), "4", str(r // 4), str(r % 4), "0,1,2,3"] for r in range(8)
    ]
    gpus = ("--nodes=2", "--gpus-per-node=4")
    assert places(by_hand(cluster, folder, *gpus, "--ntasks-per-node=1")) == expected
    assert places(by_hand(cluster, folder, *gpus, "--ntasks-per-node=4")) == expected
    for tasks in ("1", "4"):
        text = by_hand(cluster, folder, *gpus, f"--ntasks-per-node={tasks}", script="meet.py")
        assert sorted(map(int, re.findall(r"MET (\d+) 8", text))) == list(range(8))


def test_uneven_task_counts(cluster: Rig, folder: Path) -> None:
    text = by_hand(cluster, folder, "--nodes=2", "--ntasks=5", "--gpus-per-node=4", "-m", "block")
    found = places(text)
    assert [place[1] for place in found] == list("01234") and {place[2] for place in found} == {"5"}
    hosts = [place[0] for place in found]
    for host in cluster.node_names:
        mine = [place for place in found if place[0] == host]
        assert [place[3] for place in mine] == [str(n) for n in range(hosts.count(host))]
        assert {place[4] for place in mine} == {str(hosts.count(host))}
    assert "MET 4 5" in by_hand(cluster, folder, "--nodes=2", "--ntasks=5", "-m", "cyclic", script="meet.py")


def test_one_visible_gpu_per_task_is_device_0(cluster: Rig, folder: Path) -> None:
    text = by_hand(cluster, folder, "--nodes=1", "--ntasks=4", "--gpus-per-task=1", "--gpu-bind=single:1")
    found = places(text)
    assert [place[3] for place in found] == list("0123")
    if all("," not in place[7] for place in found):
        assert {place[6] for place in found} == {"0"} and "device index 0" in text
    else:
        assert [place[6] for place in found] == list("0123")


def test_gpus_2_and_3_of_a_shared_node_are_devices_0_and_1(cluster: Rig, folder: Path) -> None:
    holder = cluster.sbatch(
        f"--nodelist={cluster.node_names[0]}", "--gpus-per-node=2", "--wrap", "sleep 60", cwd=folder
    )
    deadline = time.monotonic() + 30
    while cluster.state(holder) != "RUNNING":
        assert time.monotonic() < deadline
        time.sleep(0.3)
    found = places(by_hand(cluster, folder, f"--nodelist={cluster.node_names[0]}", "--gpus-per-node=2", "--ntasks=1"))
    assert [(place[1], place[6], place[7]) for place in found] == [("0", "0", "2,3"), ("1", "1", "2,3")]


def test_a_step_smaller_than_its_job(cluster: Rig, folder: Path) -> None:
    srun = f"srun --nodes=1 --ntasks=2 --ntasks-per-node=2 --gpus-per-node=4 '{cluster.python}' -m hpc.node --no-fork -- show.py"
    (folder / "small.sh").write_text(f"#!/bin/bash\n{srun}\n")
    argv = [
        "sbatch",
        "--wait",
        "--nodes=2",
        "--ntasks-per-node=4",
        "--gpus-per-node=4",
        "--output=small.out",
        "small.sh",
    ]
    done = cluster.run(argv, cwd=folder, env=environ(cluster), timeout=120)
    text = (folder / "small.out").read_text()
    assert done.returncode == 0, text
    found = places(text)
    assert [place[1:3] for place in found] == [["0", "2"], ["1", "2"]] and len({place[0] for place in found}) == 1


def test_the_controller_inside_salloc(cluster: Rig, folder: Path) -> None:
    argv = ["salloc", "--nodes=2", "--gpus-per-node=4", "--ntasks-per-node=1"]
    argv += [cluster.python, "-m", "hpc.launch", "--", "meet.py"]
    done = cluster.run(argv, cwd=folder, env=environ(cluster), timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(map(int, re.findall(r"MET (\d+) 8", done.stdout))) == list(range(8))


# ---- the end ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["task-per-node", "task-per-gpu"])
def test_one_rank_fails_all_go_and_its_traceback_is_last(cluster: Rig, folder: Path, layout: str) -> None:
    words = ["--nodes", "2", "--gpus-per-node", "4", "--layout", layout, "--", "meet.py", "fail", "children"]
    job_id, run_dir = submitted(cluster, folder, *words)
    assert cluster.wait(job_id, timeout=90) == "FAILED"
    assert cluster.job(job_id)["ExitCode"] == "1:0"
    last = (run_dir / f"slurm-{job_id}.out").read_text().rstrip().splitlines()[-2:]
    assert last[0] == "ValueError: bad batch 17"
    assert f"rank 5 on {cluster.node_names[1]}, attempt 0" in last[1] and "rank-5.log" in last[1]
    nothing_left(cluster, 5)


def test_scancel_leaves_nothing(cluster: Rig, folder: Path) -> None:
    words = ["--nodes", "2", "--gpus-per-node", "4", "--", "meet.py", "go-on", "children"]
    job_id, run_dir = submitted(cluster, folder, *words)
    wait_for(run_dir / f"slurm-{job_id}.out", "MET", 8)
    cluster.slurm("scancel", job_id)
    assert cluster.wait(job_id, timeout=60) == "CANCELLED"
    nothing_left(cluster, 10)


def test_a_lost_node_takes_the_other_ones_ranks_along(cluster: Rig, folder: Path) -> None:
    words = ["--nodes", "2", "--gpus-per-node", "4", "slurm.requeue=false", "--", "meet.py", "go-on", "children"]
    job_id, run_dir = submitted(cluster, folder, *words)
    wait_for(run_dir / f"slurm-{job_id}.out", "MET", 8)
    try:
        cluster.devcluster("kill", cluster.node_names[1])
        assert cluster.wait(job_id, timeout=90) in ("NODE_FAIL", "FAILED")
        nothing_left(cluster, 15)
    finally:
        cluster.devcluster("heal", cluster.node_names[1])
        answers(cluster, cluster.node_names[1])
