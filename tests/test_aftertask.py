"""What slurmstepd runs after a task: it waits for the sentinel of a killed agent, and for nothing else."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

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


V1 = "11:memory:/slurm_n1/uid_1000/job_7/step_batch/task_0\n8:freezer:{}\n1:name=systemd:/system.slice\n0::/\n"


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        (V1.format("/slurm_n1/uid_1000/job_7/step_batch"), True),
        (V1.format("/"), False),  # proctrack/linuxproc with task/cgroup
        ("0::/system.slice/slurmstepd.scope/job_7/step_batch/user/task_0\n", True),
        ("0::/system.slice/slurmd.service\n", False),
        ("0::/user.slice/a:b/job_of_mine\n", False),
        ("", False),
    ],
)
def test_where_slurm_keeps_no_step_in_a_group_it_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: str, expected: bool
) -> None:
    file = tmp_path / "cgroup"
    file.write_text(groups)
    monkeypatch.setattr(aftertask, "GROUPS", file)
    assert aftertask.is_in_group_of_slurm(groups) is expected
    assert (aftertask.write(tmp_path, {"SLURM_TASK_PID": "77"}) is not None) is expected
    assert aftertask.write(tmp_path, {}) is not None  # in salloc's shell nobody can tell
