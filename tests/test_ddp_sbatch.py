"""sbin/ddp.sbatch as Slurm runs it: a copy in a spool folder, started with the user's working directory."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
STUBS = ROOT / "tests" / "fake_slurm" / "bin"
TEXT = (ROOT / "sbin" / "ddp.sbatch").read_text()
COMMANDS = "\n".join(line for line in TEXT.splitlines() if not line.startswith("#"))


class Job:
    """A toolkit that only reports, the spooled copy of its batch file, and a working directory."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "tool kit é"
        self.workdir = folder / "my work (v2)"
        self.spool = folder / "spool" / "job00101"
        for path in (self.home / "hpc", self.home / "sbin", self.workdir, self.spool):
            path.mkdir(parents=True)
        (self.home / "hpc" / "__init__.py").write_text("")
        (self.home / "hpc" / "launch.py").write_text(
            "import json, os, sys\n"
            "print(json.dumps([sys.argv[1:], os.getcwd(), sys.executable, sys.flags.utf8_mode]))\n"
            "sys.exit(int(os.environ.get('CODE', '0')))\n"
        )
        self.original = self.home / "sbin" / "ddp.sbatch"
        self.original.write_text(TEXT)
        self.spooled = self.spool / "slurm_script"
        self.spooled.write_text(TEXT)

    def run(self, *words: str, script: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run the spooled copy with nothing but the given variables; scontrol knows where the original is."""
        command = f"{self.original} {' '.join(words)}" if script is None else f"{script}"
        variables = {
            "PATH": f"{STUBS}:/usr/local/bin:/usr/bin:/bin",
            "SLURM_JOB_ID": "101",
            "FAKE_SCONTROL_SHOW_STDOUT": f"JobId=101 JobName=ddp\n   Command={command}\n   WorkDir={self.workdir}\n",
            **environ,
        }
        return subprocess.run(
            ["/bin/bash", str(script or self.spooled), *words],
            cwd=self.workdir, env=variables, capture_output=True, text=True, timeout=30,
        )  # fmt: skip


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def report(done: subprocess.CompletedProcess[str]) -> list[object]:
    assert done.returncode == 0, done.stderr
    import json

    found: list[object] = json.loads(done.stdout)
    return found


def test_x06_spooled_copy_finds_its_toolkit_and_keeps_the_arguments(job: Job) -> None:
    words = ["jobs.digits", "optim.lr=0.1", "--", "train.py", "a  b", "$(touch CANARY)", "--lr", "0.1", "", "é"]
    arguments, directory, _, utf8 = report(job.run(*words))
    assert arguments == words and directory == str(job.workdir) and utf8 == 1
    assert not list(job.workdir.rglob("CANARY"))


def test_script_run_by_hand_needs_no_slurm(job: Job) -> None:
    done = job.run("x", script=job.original, SLURM_JOB_ID="", PATH="/usr/bin:/bin")
    assert report(done)[0] == ["x"]


def test_empty_environment(job: Job) -> None:
    done = subprocess.run(
        ["/bin/bash", str(job.original), "x"], cwd=job.workdir, env={}, capture_output=True, text=True, timeout=30
    )
    assert report(done)[0] == ["x"]


def test_link_to_the_file(job: Job) -> None:
    link = job.workdir / "go.sbatch"
    link.symlink_to(job.original)
    assert report(job.run("x", script=link, SLURM_JOB_ID=""))[0] == ["x"]


def test_edited_copy_elsewhere_is_told_where_the_toolkit_is(job: Job) -> None:
    copy = job.workdir / "mine.sbatch"
    copy.write_text(TEXT)
    done = job.run("x", script=copy)
    assert done.returncode == 78 and "HPC_HOME" in done.stderr.splitlines()[-1]
    assert report(job.run("x", script=copy, HPC_HOME=str(job.home)))[0] == ["x"]


def test_interpreter_hpc_python_then_the_toolkits_own_then_the_path(job: Job, tmp_path: Path) -> None:
    def interpreter(path: Path) -> Path:
        path.parent.mkdir(parents=True)
        path.write_text(f'#!/bin/sh\necho "{path.parent.parent.name}" "$@"\n')
        path.chmod(0o755)
        return path

    assert report(job.run())[2] == shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin")
    interpreter(job.home / ".venv" / "bin" / "python")
    assert job.run("x").stdout == ".venv -u -m hpc.launch x\n"
    other = interpreter(tmp_path / "other" / "bin" / "python")
    assert job.run("x", HPC_PYTHON=str(other)).stdout == "other -u -m hpc.launch x\n"


def test_pythonpath_of_the_user_stays(job: Job) -> None:
    (job.home / "hpc" / "launch.py").write_text("import os\nprint(os.environ['PYTHONPATH'])\n")
    assert job.run(PYTHONPATH="/mine").stdout == f"{job.home}:/mine\n"
    assert job.run().stdout == f"{job.home}\n"


def test_f04_exit_code_is_passed_on(job: Job) -> None:
    assert job.run(CODE="42").returncode == 42
    assert job.run(CODE="75").returncode == 75


def test_f03_q10_directives() -> None:
    found = re.findall(r"^#SBATCH (.*)$", TEXT, re.MULTILINE)
    assert found == [
        "--job-name=ddp",
        "--ntasks-per-node=1",
        "--output=slurm-%j.out",
        "--open-mode=append",
        "--requeue",
        "--signal=USR2@120",
    ]
    assert TEXT.index("#SBATCH --signal") < TEXT.index("\nexport"), "sbatch reads no directive behind a command"


def test_r15_r23_x10_nothing_of_a_task_is_decided_here() -> None:
    assert not re.search(r"PROCID|LOCALID|NODEID|CUDA_VISIBLE_DEVICES|gpus-per-task|gpu-bind|MASTER_|WORLD_SIZE", TEXT)
    assert len(re.findall(r"^exec ", COMMANDS, re.MULTILINE)) == 1 and COMMANDS.rstrip().endswith('hpc.launch "$@"')


def test_c13_no_trap_and_nothing_removed() -> None:
    assert not re.search(r"\b(trap|rm|mv|kill)\b", COMMANDS)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_is_content() -> None:
    done = subprocess.run(["shellcheck", str(ROOT / "sbin" / "ddp.sbatch")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_l16_r25_started_workers_are_nodes_times_gpus(tmp_path: Path) -> None:
    """The real controller and agents, started by a stand-in for srun on 2 "nodes" of 2 workers."""
    (tmp_path / "t.py").write_text("import os\nprint('WORKER', os.environ['RANK'], os.environ['WORLD_SIZE'])\n")
    import sys

    words = ["launch.workers_per_node=2", "slurm.gpus_per_node=null", "launch.allow_loopback=true", "--", "t.py"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "HPC_"))}
    environ |= {
        "PATH": f"{STUBS}{os.pathsep}{os.environ['PATH']}",
        "HPC_PYTHON": sys.executable,
        "HPC_SITE_CONFIG": "",
        "SLURM_JOB_ID": "101",
        "SLURM_NNODES": "2",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_TASKS_PER_NODE": "1(x2)",
        "SLURM_JOB_NODELIST": "localhost,localhost2",
        "FAKE_SLURM_LOG": str(tmp_path / "log"),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29611",
    }
    done = subprocess.run(
        ["/bin/bash", str(ROOT / "sbin" / "ddp.sbatch"), *words],
        cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(re.findall(r"WORKER (\d) (\d)", done.stdout)) == [(str(rank), "4") for rank in range(4)]


@pytest.mark.slow
def test_x06_an_interpreter_without_the_packages_is_told_in_one_line(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    venv.create(bare, with_pip=False)
    doors = ["hpc.launch jobs.digits", "hpc.submit --dry-run", "hpc.node jobs.digits", "hpc.doctor --signals"]
    for words in map(str.split, doors):
        done = subprocess.run(
            [bare / "bin" / "python", "-m", *words], cwd=ROOT, env={}, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 78 and "Traceback" not in done.stderr, done.stderr
        assert re.search(rf"^{words[0]}: error: {bare}/bin/python has no package \w+, .*HPC_PYTHON", done.stderr), (
            done.stderr
        )
