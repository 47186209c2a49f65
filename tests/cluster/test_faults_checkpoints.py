"""The fault matrix on the real Slurm, third part: checkpoints that cannot be written, and ones that are not what was written."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_rig import ROOT, Rig
from fault_rig import DRILL, EVERY, SMALL, Drill, Quiet, new_drill

# ---- no space --------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(cluster: Rig, request: pytest.FixtureRequest) -> Drill:
    return new_drill(cluster, request.node.name)


@pytest.fixture
def quiet(cluster: Rig) -> Quiet:
    return Quiet(cluster)


@pytest.fixture
def small_disk(run: Drill) -> Iterator[list[str]]:
    """A held job of the run on the first node, which has a small file system of its own for the checkpoints."""
    node = run.rig.node_names[0]
    daemon = run.rig.daemon(f"slurmd-{node}")
    shape = ["--nodes", "1", "--gpus-per-node", "4", f"slurm.nodelist={node}"]
    run.submit(*shape, "slurm.extra.hold=true")
    folder = run.path / "checkpoints"
    owner = run.path.stat()
    folder.mkdir(mode=0o700)
    inside = ["nsenter", f"--target={daemon}", "--mount"]
    options = f"size=4m,mode=700,uid={owner.st_uid},gid={owner.st_gid}"
    subprocess.run([*inside, "mount", "-t", "tmpfs", "-o", options, "small", str(folder)], check=True)
    run.checkpoint_folder = Path(f"/proc/{daemon}/root{folder}")
    yield shape
    run.rig.cancel_jobs()
    subprocess.run([*inside, "umount", str(folder)], check=True)


def test_the_checkpoint_folder_is_full(run: Drill, quiet: Quiet, small_disk: list[str]) -> None:
    run.rig.slurm("scontrol", "release", run.job_id)
    run.reaches(8, saved=EVERY)
    filler = run.checkpoint_folder / "filler"
    with open(filler, "wb", buffering=0) as stream, pytest.raises(OSError, match="No space"):
        while True:
            stream.write(bytes(4096))
    assert run.ends() == "FAILED", run.report()
    run.check_gone()
    assert "No space left on device" in run.text and str(run.path / "checkpoints") in run.text
    assert run.decisions() == ["fail"] and run.checkpoints()[0] == EVERY
    filler.unlink()
    run.hurry()
    run.submit(*small_disk)
    # noticed at a later step than the one that could not be saved
    run.check(quiet(), lost=[3 * EVERY], cause="exited 1")


# ---- not what was written --------------------------------------------------------------------------------------------


def cut(file: Path) -> None:
    with open(file, "r+b") as stream:
        stream.truncate(file.stat().st_size // 2)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_the_newest_whole_checkpoint_is_used_and_each_damaged_one_is_named(run: Drill, quiet: Quiet) -> None:
    run.submit(*SMALL, "train.keep_checkpoints=10")
    run.reaches(30, saved=28)
    run.rig.slurm("scancel", run.job_id)
    assert run.ends() == "CANCELLED", run.report()
    *older, newest = run.checkpoints()
    assert older[:4] == [7, 14, 21, 28] and newest > 28  # saved at the notice
    folders = {step: run.checkpoint_folder / f"step-{step}" for step in (14, 21, 28, newest)}
    cut(folders[newest] / "model.pt")
    (folders[28] / "trainer.pt").write_bytes(b"")
    (folders[21] / "model.pt").unlink()
    flip(folders[14] / "trainer.pt")
    run.hurry()
    run.submit(*SMALL, "train.keep_checkpoints=10")
    run.check(quiet(), lost=[newest], cause="")
    for step, folder in folders.items():
        assert f"{folder} is damaged and skipped" in run.text, step
    assert run.starts()[1].steps()[0] == 8


# ---- killed while it saves -------------------------------------------------------------------------------------------

# Forks a rank, lets it come to a new save, kills it a little later; a line "step seconds" orders it, "-1 0" lets it end.
KILLER = """\
import os, signal, sys, time
from pathlib import Path
import torch._dynamo
import hpc.train.__main__ as trainer
run, arguments = Path(os.environ["HPC_RUN_DIR"]), sys.argv[1:]
for line in sys.stdin:
    after, seconds = line.split()
    pid = os.fork()
    if not pid:
        log = os.open(run / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        code = 1
        try:
            code = trainer.main(arguments)
            sys.stdout.flush()
        finally:
            os._exit(code)
    if after != "-1":
        saving = lambda: [n for n in os.listdir(run / "checkpoints") if n.startswith(".step-") and n.endswith(".tmp")]
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if (run / "checkpoints").exists() and any(int(n.split(".")[1][5:]) > int(after) for n in saving()):
                break
            time.sleep(0.0005)
        time.sleep(float(seconds))
        os.kill(pid, signal.SIGKILL)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Killer:
    """One rank after the other of a run without Slurm."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.run_dir = folder / "run"
        self.run_dir.mkdir(parents=True, mode=0o700)
        shutil.copytree(DRILL, folder / "jobs" / "drill")
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("HPC_", "SLURM_", "TORCHELASTIC_"))}
        environ |= {"PYTHONPATH": f"{folder}:{ROOT}", "HPC_SITE_CONFIG": "", "OMP_NUM_THREADS": "1"}
        environ |= {"HPC_RUN_DIR": str(self.run_dir), "HPC_ATTEMPT": "0", "MASTER_PORT": "0", "RANK": "0"}
        environ |= {"WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        self.child = subprocess.Popen(
            [sys.executable, "-c", KILLER, "jobs.drill", "step_s=0", *arguments],
            env=environ, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def start(self, after: int, seconds: float) -> int:
        """Start a rank, and kill it so long after it has begun a save of a step after this one; its exit code."""
        assert self.child.stdin is not None and self.child.stdout is not None
        print(after, seconds, file=self.child.stdin, flush=True)
        return int(self.child.stdout.readline())

    def close(self) -> None:
        self.child.communicate(timeout=60)


@pytest.mark.timeout(300)
def test_killed_at_20_moments_of_a_save(tmp_path: Path) -> None:
    from hpc.train import checkpoint  # late: torch is not for every test of this folder

    settings = ("ballast_mib=16", "train.save_every_steps=1", "train.eval_every_epochs=0")
    straight = Killer(tmp_path / "straight", *settings)
    assert straight.start(-1, 0) == 0
    straight.close()
    whole = straight.run_dir / "checkpoints"

    killer, chance = Killer(tmp_path / "killed", *settings), random.Random(7)
    folder, log = killer.run_dir / "checkpoints", killer.run_dir / "log"
    before, torn = 0, 0
    for _ in range(20):
        assert killer.start(before, chance.uniform(0, 0.12)) == -9, log.read_text()[-2000:]
        torn += any(folder.glob(".step-*"))
        found = checkpoint.Checkpoints(folder)
        steps = found.steps()
        assert all(checkpoint.damage(found.path(step)) is None for step in steps)  # what bears a name is whole
        assert not before or steps[-1] >= before
        before = steps[-1] if steps else 0
    assert torn >= 10 and before < 40, (torn, before)
    assert killer.start(-1, 0) == 0, log.read_text()[-2000:]
    killer.close()
    assert f"resuming at step {before} of" in log.read_text().split("jobs.drill: 1 rank")[-1] or before == 0
    one, two = checkpoint.read(whole / "step-40")[0], checkpoint.read(folder / "step-40")[0]
    assert one.keys() == two.keys() and all(one[name].equal(two[name]) for name in one)
