"""Secrets of the environment: the job gets them, and nothing that we write, print or hand to Slurm's programs does."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from canaries import MARK, SECRETS, holders
from submit_shell import ROOT, Shell

ALLOCATION = {
    "SLURM_JOB_ID": "101", "SLURM_JOB_NUM_NODES": "1", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "n1",
    "SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "1", "SLURM_TASKS_PER_NODE": "1", "SLURM_JOB_CPUS_PER_NODE": "2",
}  # fmt: skip
ATTEMPT = {"error-0.json", "outcome.json", "rank-0.log"}


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


def test_s6_what_is_refused_is_refused_without_them(shell: Shell) -> None:
    """Our own error lines; each is about something of the user's that is near the secrets, and names none of them."""
    (shell.folder / ".env").write_text("A_TOKEN=s3cret-file\n")
    faults = [["--nodes", "0"], ["slurm.acount=x"], ["launch.python=none"], ["--", "gone.py"], ["name=${oc.env:JWT}/x"]]
    for words in faults:
        done = shell.send(*words, **SECRETS)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
        assert MARK.decode() not in done.stdout + done.stderr
    assert (
        shell.send("--name", "${oc.env:JWT}", **SECRETS).returncode == 0
    )  # text, and not what it would mean elsewhere
    (shell.folder / ".env").unlink()
    assert not holders(shell.folder)


@pytest.mark.slow
def test_s3_s6_thirty_secrets_are_in_nothing_that_a_failed_run_leaves_and_others_can_read_none_of_it(
    shell: Shell,
) -> None:
    """A whole run: submission, batch step, srun, a rank that saves a checkpoint and then fails, status. Its umask is 0.

    The job itself has them all (sbatch gets the user's environment, and Slurm's --export=ALL hands it on): training needs
    its keys. Slurm's own copy of the environment is its administrator's to read alone. What a program of the user's
    prints or raises itself is its own affair; this one does neither. That the search finds what is there is shown by
    the files of keys in the working directory, which are not copied with the code.
    """
    assert len(SECRETS) >= 30
    (shell.folder / "keys").mkdir()
    for name in (".env", "deploy.pem", "id_rsa", ".netrc"):
        (shell.folder / "keys" / name).write_text(SECRETS["DEPLOY_KEY"])
    subprocess.run(["git", "init", "-q", "."], cwd=shell.folder, check=True)
    words = ["toy", "samples=64", "train.batch_size=8", "train.save_every_steps=1", "train.loader_workers=0"]
    trouble = ["trouble=raise", "trouble_step=4"]
    environ = {**SECRETS, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    before = os.umask(0)
    try:
        sent = shell.send(*words, *trouble, **environ)
    finally:
        os.umask(before)
    assert sent.returncode == 0, sent.stderr
    assert "SBATCH_MY_TOKEN" in sent.stderr and "SBATCH_EXPORT" in sent.stderr  # named, not shown
    (run_dir,) = shell.runs()
    assert "\numask 0000\n" in (run_dir / "job.sh").read_text()
    handed_on = json.loads(shell.kept("environ.json"))
    assert {name for name in SECRETS if name in handed_on} == {n for n in SECRETS if not n.startswith("SBATCH_")}
    batch = {**shell.environ, **handed_on, **ALLOCATION}
    argv = ["/bin/bash", str(run_dir / "job.sh")]
    ran = subprocess.run(argv, env=batch, cwd=shell.folder, capture_output=True, text=True, timeout=150)
    assert ran.returncode == 1 and "bad batch 17" in ran.stderr, ran.stdout + ran.stderr
    status = subprocess.run(
        [sys.executable, "-m", "hpc.status", str(run_dir)], env=batch, capture_output=True, text=True, timeout=60
    )
    assert status.returncode == 0 and "productive" in status.stdout
    left = {path.relative_to(run_dir).parts[0] for path in run_dir.rglob("*") if path.is_file()}
    assert left >= {"config.yaml", "job.sh", "record.jsonl", "attempt-0", "checkpoints", "code", "metrics.jsonl"}
    assert left >= {"tensorboard"} and {path.name for path in (run_dir / "attempt-0").iterdir()} >= ATTEMPT
    for path in (run_dir.parent, run_dir, *run_dir.rglob("*")):
        program = path.name == "after-task"  # Slurm runs it
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() or program else 0o600), path
    assert shell.calls("srun")
    assert MARK not in shell.log.read_bytes()  # the argv of sbatch, srun and all others
    for done in (sent, ran, status):
        assert MARK.decode() not in done.stdout + done.stderr
    assert not holders(run_dir)
    assert {Path(name).parent for name in holders(shell.folder)} == {shell.folder / "keys"}
    assert not list(shell.folder.rglob("CANARY"))
