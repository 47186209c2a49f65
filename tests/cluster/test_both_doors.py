"""Both doors on the real Slurm, as an ordinary user: `python -m hpc.submit` and sbin/ddp.sbatch."""

from __future__ import annotations

import json
import re
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from canaries import MARK, SECRETS, holders
from cluster_rig import FIRST_USER, Rig, give_to

SCRIPT = """\
import os, socket, sys
print("WORKER", os.environ["RANK"], os.environ["WORLD_SIZE"], socket.gethostname(), sys.argv[1:], flush=True)
"""
Done = subprocess.CompletedProcess[str]


class User:
    """The ordinary user in a working directory whose name is not plain, with a script written for torchrun."""

    def __init__(self, rig: Rig, folder: Path) -> None:
        self.rig, self.folder = rig, folder
        self.write("train.py", SCRIPT)

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        give_to(self.folder, FIRST_USER)
        return path

    def submit(self, *words: str, cwd: Path | None = None, timeout: float = 120, **environ: str) -> Done:
        env = {"PYTHONPATH": str(self.rig.clone), "HPC_SITE_CONFIG": "", **environ}
        argv = [self.rig.python, "-m", "hpc.submit", *words]
        done = self.rig.run(argv, cwd=cwd or self.folder, env=env, timeout=timeout)
        for job_id in re.findall(r"^job (\d+) submitted", done.stdout, re.MULTILINE):
            self.rig.track(job_id)
        return done

    def sbatch(self, *words: str, **environ: str) -> Done:
        env = {"HPC_PYTHON": self.rig.python, **environ}
        return self.rig.run(["sbatch", "--wait", *words], cwd=self.folder, env=env, timeout=120)

    def runs(self) -> list[Path]:
        return sorted((self.folder / "runs").glob("*"))


@pytest.fixture
def user(cluster: Rig, request: pytest.FixtureRequest) -> Iterator[User]:
    folder = cluster.home() / f"my work (v2) é {request.node.name[:30]} {time.time_ns()}"
    folder.mkdir()
    yield User(cluster, folder)


def workers(text: str) -> list[tuple[int, int, str]]:
    return sorted((int(rank), int(world), host) for rank, world, host in re.findall(r"WORKER (\d+) (\d+) (\S+)", text))


def eight(cluster: Rig) -> list[tuple[int, int, str]]:
    return [(rank, 8, cluster.node_names[rank // 4]) for rank in range(8)]


@pytest.mark.parametrize("layout", ["task-per-node", "task-per-gpu"])
def test_submit_runs_a_torchrun_script_on_every_gpu(cluster: Rig, user: User, layout: str) -> None:
    words = ["--nodes", "2", "--gpus-per-node", "4", "--layout", layout, "--time", "5", "--follow"]
    done = user.submit(*words, "--", "train.py", "a  b", "$(touch CANARY)", "--lr", "0.1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert workers(done.stdout) == eight(cluster)
    assert done.stdout.count("['a  b', '$(touch CANARY)', '--lr', '0.1']") == 8
    (job_id,) = re.findall(r"^job (\d+) submitted", done.stdout, re.MULTILINE)
    assert cluster.job(job_id)["JobState"] == "COMPLETED" and "ended: COMPLETED" in done.stderr
    assert not list(user.folder.rglob("CANARY*"))
    (run_dir,) = user.runs()
    assert [json.loads(line)["event"] for line in (run_dir / "record.jsonl").read_text().splitlines()][0] == "submitted"
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in run_dir.iterdir() if path.is_file()}
    assert set(modes.values()) == {0o600} and f"slurm-{job_id}.out" in modes


@pytest.mark.parametrize("export", ["--export=ALL", "--export=NONE"])
def test_ddp_sbatch_does_the_same_from_any_directory(cluster: Rig, user: User, export: str) -> None:
    assert cluster.clone is not None
    script = cluster.clone / "sbin" / "ddp.sbatch"
    if export == "--export=NONE":  # HPC_PYTHON does not arrive: the file is edited, as it says
        text = script.read_text().replace("\nexport PATH", f"\nHPC_PYTHON='{cluster.python}'\nexport PATH", 1)
        copy = cluster.clone / "sbin" / "my ddp é.sbatch"
        copy.write_text(text, encoding="utf-8")
        script = copy
    done = user.sbatch(export, "--nodes=2", "--gpus-per-node=4", str(script), "--", "train.py", "a  b", "$(touch C)")
    (output,) = user.folder.glob("slurm-*.out")
    text = output.read_text()
    assert done.returncode == 0, text + done.stderr
    assert workers(text) == eight(cluster) and text.count("['a  b', '$(touch C)']") == 8


def test_s06_s07_s09_a_job_sent_from_inside_another_one_is_a_job_of_its_own(cluster: Rig, user: User) -> None:
    """From a step of an array's element: which step, which element, whose memory, how many GPUs a task: all of it leaks."""
    outer = user.write(
        "outer.sh",
        "#!/bin/bash\nsrun sbatch --wait --nodes=2 --ntasks-per-node=2 --gpus-per-task=1 --mem=800 --output=inner.out "
        f"'{cluster.clone}/sbin/ddp.sbatch' launch.fork=false launch.max_restarts=0 -- train.py\n",
    )
    words = ["--array=3", "--gpus-per-task=1", "--ntasks=1", "--mem-per-cpu=500", "--output=outer.out", str(outer)]
    done = user.sbatch(*words, SLURM_CPU_BIND="quiet,mask_cpu:0x1", SLURM_CPU_BIND_LIST="0x1")
    text = (user.folder / "inner.out").read_text()
    assert done.returncode == 0, text + done.stderr
    assert workers(text) == [(rank, 4, cluster.node_names[rank // 2]) for rank in range(4)]
    (inner,) = re.findall(r"Submitted batch job (\d+)", (user.folder / "outer.out").read_text())
    assert [path.name for path in user.runs()] == [f"train-{inner}"], text


def test_f04_exit_code_of_both_doors(cluster: Rig, user: User) -> None:
    user.write("bad.py", "raise SystemExit(42)\n")
    done = user.submit("--follow", "--", "bad.py")
    assert done.returncode == 42 and "FAILED, exited 42" in done.stderr
    assert user.sbatch("--gpus-per-node=1", str(cluster.clone) + "/sbin/ddp.sbatch", "--", "bad.py").returncode == 42


def test_s13_s15_names_and_directories_reach_slurm_as_meant(cluster: Rig, user: User) -> None:
    name = 'it\'s "q" \\ # $(x) 50%j é;=1'
    for folder in ("50%j", "back\\slash %j", "a%%b %A"):
        place = user.write(f"{folder}/train.py", SCRIPT).parent
        done = user.submit("--name", name, "--", "train.py", cwd=place)
        assert done.returncode == 0, done.stderr
        (job_id,) = re.findall(r"^job (\d+) submitted", done.stdout, re.MULTILINE)
        assert cluster.wait(job_id) == "COMPLETED", cluster.report(job_id)
        assert cluster.job(job_id)["JobName"] == name
        (output,) = (place / "runs").glob("*/slurm*.out")
        assert workers(output.read_text()) in [[(0, 1, name)] for name in cluster.node_names]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--partition", "lo"], "no such partition"),
        (["--nodes", "99"], "can ever give"),
        (["--cpus-per-task", "900"], "can ever give"),
        (["--gpus-per-node", "9"], "can ever give"),
        (["--gpus-per-node", "a100:2"], "can ever give"),
        (["--constraint", "foo"], "no node has such a feature"),
        (["--mem", "9999G"], "can ever give"),
        (["--nodelist", "zz"], "no such node"),
        (["slurm.reservation=zz"], "no such reservation"),
    ],
)
def test_what_the_cluster_can_never_run_is_refused_with_what_it_offers(
    cluster: Rig, user: User, words: list[str], said: str
) -> None:
    before = cluster.slurm("squeue", "--noheader", "--format=%i", f"--user={FIRST_USER}")
    done = user.submit(*words, "--", "train.py")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stdout + done.stderr
    assert said in done.stderr and "nothing was submitted" in done.stderr
    assert "low (the default): 2 nodes with gpu:4" in done.stderr or "reservation" in said
    assert cluster.slurm("squeue", "--noheader", "--format=%i", f"--user={FIRST_USER}") == before
    assert not (user.folder / "runs").exists()


def test_f03_f16_follow_through_a_requeue_and_one_log(cluster: Rig, user: User) -> None:
    user.write(
        "again.py",
        "import os, subprocess, time\n"
        "print('ATTEMPT', os.environ.get('SLURM_RESTART_COUNT', '0'), flush=True)\n"
        "if not os.environ.get('SLURM_RESTART_COUNT'):\n"
        "    subprocess.run(['scontrol', 'requeue', os.environ['SLURM_JOB_ID']], check=True)\n"
        "    time.sleep(60)\n",
    )
    done = user.submit("--follow", "--", "again.py", timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"ATTEMPT (\d)", done.stdout) == ["0", "1"]
    assert re.search(r"RUNNING.*(PENDING|COMPLETING).*RUNNING.*ended: COMPLETED", done.stderr, re.DOTALL)
    (output,) = [path for run_dir in user.runs() for path in run_dir.glob("slurm-*.out")]
    assert re.findall(r"ATTEMPT (\d)", output.read_text()) == ["0", "1"]


def test_x06_setup_lines_run_on_the_node_and_a_failing_one_is_named(cluster: Rig, user: User) -> None:
    user.write("env.sh", "export FROM_SETUP=yes\n")
    user.write("show.py", "import os\nprint('SETUP', os.environ.get('FROM_SETUP'))\n")
    done = user.submit("--follow", "slurm.setup=['source ./env.sh']", "--", "show.py")
    assert done.returncode == 0 and "SETUP yes" in done.stdout, done.stdout + done.stderr
    done = user.submit("--follow", "slurm.setup=['source ./no.sh']", "--", "show.py")
    assert done.returncode == 78 and "set-up line 1 (slurm.setup) failed on this node: source ./no.sh" in done.stdout


def test_s23_queued_training_job_runs_the_code_of_its_submission(cluster: Rig, user: User) -> None:
    user.write("jobs/mine/__init__.py", "")
    user.write(
        "jobs/mine/config.py", "from dataclasses import dataclass\n\n\n@dataclass\nclass Config:\n    a: int = 1\n"
    )
    user.write("jobs/mine/job.py", "raise RuntimeError('code of the submission')\n")
    done = user.submit("jobs.mine", "slurm.extra.begin=now+3")
    assert done.returncode == 0, done.stderr
    user.write("jobs/mine/job.py", "raise RuntimeError('code of later')\n")
    (job_id,) = re.findall(r"^job (\d+) submitted", done.stdout, re.MULTILINE)
    assert cluster.wait(job_id) == "FAILED", cluster.report(job_id)
    (output,) = [path for run_dir in user.runs() for path in run_dir.glob("slurm-*.out")]
    assert "code of the submission" in output.read_text() and "code of later" not in output.read_text()


def test_array_elements_have_a_directory_each(cluster: Rig, user: User) -> None:
    done = user.submit("slurm.extra.array=3,5", "--", "train.py")
    assert done.returncode == 0, done.stderr
    (job_id,) = re.findall(r"^job (\d+) submitted", done.stdout, re.MULTILINE)
    (run_dir,) = user.runs()
    outputs = [run_dir / f"slurm-{job_id}_{index}.out" for index in (3, 5)]
    deadline = time.monotonic() + 90
    while not all(path.exists() and "WORKER" in path.read_text() for path in outputs):
        assert time.monotonic() < deadline, cluster.report(job_id)
        time.sleep(0.5)
    assert {path.name for path in run_dir.glob("array-*")} == {"array-3", "array-5"}
    assert all((run_dir / name / "record.jsonl").exists() for name in ("array-3", "array-5"))


def test_s6_secrets_are_in_no_output_of_slurm_and_in_no_file(cluster: Rig, user: User) -> None:
    done = user.submit("--follow", "--", "train.py", **SECRETS)
    assert done.returncode == 0, done.stderr
    (job_id,) = re.findall(r"^job (\d+) submitted", done.stdout, re.MULTILINE)
    told = done.stdout + done.stderr + cluster.slurm("scontrol", "show", "job", job_id)
    told += cluster.slurm("squeue", "--states=all", "--format=%all", f"--jobs={job_id}")
    assert MARK.decode() not in told and not holders(user.folder)
