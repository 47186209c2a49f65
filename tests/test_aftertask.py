"""What slurmstepd runs after a task: it waits for the sentinel of a killed agent, and for nothing else."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from hpc.allocation import aftertask
from hpc.node import processes


def test_it_waits_until_the_folder_of_its_own_task_is_gone(tmp_path: Path) -> None:
    program = aftertask.write(tmp_path, {})
    assert program is not None
    for start, task in (("7.0.0", "1"), ("7.0.1", "2"), ("17.0.0", "2")):
        folder = tmp_path / f"hpc-1000-c.{start}-abcdefgh"
        folder.mkdir()
        (folder / f"task-{task}").touch()

    def after(task: str) -> subprocess.Popen[bytes]:
        job = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURMD_NODENAME": "n", "SLURM_PROCID": task}
        return subprocess.Popen([program], env={**job, "TMPDIR": str(tmp_path), "HPC_MARK": "7.0.0.ab12"})

    assert after("0").wait(30) == after("2").wait(30) == 0  # ended well; of another start, and of another job

    waiting = after("1")
    deadline = time.monotonic() + 30
    while (seen := processes.look_at(waiting.pid)) is None or seen.tag:
        assert time.monotonic() < deadline and waiting.poll() is None
    os.unlink(tmp_path / "hpc-1000-c.7.0.0-abcdefgh" / "task-1")
    assert waiting.wait(30) == 0


def test_a_task_epilog_of_the_users_own_stays(tmp_path: Path) -> None:
    assert aftertask.write(tmp_path, {"SLURM_TASK_EPILOG": "/home/me/after"}) is None
    assert aftertask.write(tmp_path / "not there", {}) is None
