"""`python -m hpc.submit` as a user types it, against stand-ins of Slurm's programs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from canaries import MARK, SECRETS, holders
from submit_shell import AS_ROOT, ROOT, TASKENV, Shell, tree

from hpc import submit


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


# --- what is printed, and what is made -------------------------------------------------------------------------------


def test_submission_makes_the_run_directory_and_says_what_to_do_next(shell: Shell) -> None:
    done = shell.send("--nodes", "2", "--gpus-per-node", "4", "optim.lr=0.05")
    assert (done.returncode, done.stderr) == (0, "")
    (run_dir,) = shell.runs()
    assert done.stdout.splitlines() == [
        "job 101 submitted: digits",
        f"  directory  {run_dir}",
        f"  follow     tail -F '{run_dir}'/slurm-101.out",
        "  cancel     scancel 101",
        "  look       scontrol show job 101",
    ]
    assert json.loads(shell.kept("argv.json")) == [str(run_dir / "job.sh")]
    assert shell.kept("script") == (run_dir / "job.sh").read_text()
    assert "lr: 0.05" in (run_dir / "config.yaml").read_text()
    (event,) = [json.loads(line) for line in (run_dir / "record.jsonl").read_text().splitlines()]
    assert event["event"] == "submitted" and event["job_id"] == "101" and event["name"] == "digits"
    assert shell.submissions() == 1


def test_x07_a_screen_that_lacks_a_character_stops_nobody(shell: Shell) -> None:
    done = shell.send("--name", "dédé-实验", PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and shell.submissions() == 1, done.stderr
    assert done.stdout.startswith("job 101 submitted: d\\xe9d\\xe9-\\u5b9e\\u9a8c\n")
    assert shell.submit("--dry-run", "--name", "dédé-实验", PYTHONIOENCODING="ascii").returncode == 0


@pytest.mark.slow
def test_a_screen_or_a_directory_that_has_gone_is_told_in_one_line(shell: Shell) -> None:
    def bash(line: str) -> subprocess.CompletedProcess[str]:
        line = line.replace("SUBMIT", f"{sys.executable} -m hpc.submit {' '.join(AS_ROOT)}")
        return subprocess.run(
            ["bash", "-c", line], cwd=shell.folder, env=shell.environ, capture_output=True, text=True, timeout=90
        )

    done = bash("SUBMIT >/dev/full")
    assert done.returncode == 0 and "job 101 was submitted, but" in done.stderr and done.stderr.count("\n") == 1
    assert (bash("SUBMIT >&-").returncode, shell.submissions()) == (0, 2)
    for line in ("SUBMIT --dry-run >/dev/full", "mkdir gone; cd gone; rmdir ../gone; SUBMIT"):
        done = bash(line)
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and shell.submissions() == 2, done.stderr
    done = shell.send("run_root=" + "a" * 300)
    assert done.returncode == 2 and "File name too long" in done.stderr and done.stderr.count("\n") == 1
    assert "is no program here" in shell.send("launch.python=/nowhere/python").stderr


def test_a_job_of_another_cluster_is_looked_for_there(shell: Shell) -> None:
    """Here, its number may be another job's."""
    done = shell.send("slurm.extra.clusters=c2", "slurm.exclude_failed_h=0")
    assert done.returncode == 0 and "scancel --clusters=c2 101" in done.stdout, done.stderr
    assert "scontrol --clusters=c2 show job 101" in done.stdout
    done = shell.send("slurm.extra.clusters=c2", "--follow")
    assert done.returncode == 2 and "another one (clusters)" in done.stderr and shell.submissions() == 1


def test_merged_configuration_can_be_used_again(shell: Shell) -> None:
    shell.send("optim.lr=0.05", "--time", "12:00:00")
    (first,) = shell.runs()
    assert shell.send("--config", str(first / "config.yaml")).returncode == 0
    (second,) = [path for path in shell.runs() if path != first]
    assert (second / "config.yaml").read_text() == (first / "config.yaml").read_text()


def test_s3_directories_0700_and_files_0600_whatever_the_umask(shell: Shell) -> None:
    previous = os.umask(0)
    try:
        assert shell.send("--", "train.py").returncode == 0
    finally:
        os.umask(previous)
    (run_dir,) = shell.runs()
    for path in (run_dir, *run_dir.rglob("*")):
        wanted = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path
    assert "umask 0000" in (run_dir / "job.sh").read_text()


def test_dry_run_makes_nothing_and_prints_script_and_configuration(shell: Shell) -> None:
    before = tree(shell.folder.parent)
    done = shell.submit(
        "--dry-run", "--nodes", "2", "--gpus-per-node", "a100:4", "optim.lr=0.05", "--exclude", "n[1-3]"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert tree(shell.folder.parent) == before
    assert done.stdout.startswith("#!/bin/bash\n") and "#SBATCH --gpus-per-node=a100:4\n" in done.stdout
    assert "\nslurm:\n  nodes: 2\n" in done.stdout and "lr: 0.05" in done.stdout
    assert subprocess.run(["bash", "-n"], input=done.stdout, text=True).returncode == 0


def test_dry_run_needs_no_slurm_and_no_other_user(shell: Shell) -> None:
    assert shell.submit("--dry-run", PATH=os.path.dirname(sys.executable)).returncode == 0


def test_dry_run_is_what_is_sent(shell: Shell) -> None:
    words = ("--nodes", "2", "--mem", "64G", "slurm.extra.mail-type=END", "run_dir=here")
    printed = shell.submit("--dry-run", *words).stdout
    assert shell.send(*words).returncode == 0
    assert printed.startswith(shell.kept("script").rstrip())


@pytest.mark.parametrize("words", [["--help"], ["--dry-run"], []])
def test_torch_is_never_imported(shell: Shell, words: list[str]) -> None:
    words = words or AS_ROOT
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "hpc.submit", *words],
        cwd=shell.folder, env=shell.environ, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "argparse" in imported and not {"torch", "numpy"} & imported
    if words == ["--help"]:
        assert not {"omegaconf", "submitit", "yaml", "subprocess"} & imported


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpus-per-node", "0"], "at least one GPU"),
        (["--nodes", "0"], "slurm.nodes"),
        (["--nodes", "-1"], "slurm.nodes"),
        (["--nodes", "2.5"], "whole number"),
        (["--gpus-per-node", "4x"], "slurm.gpus_per_node"),
        (["--nodes"], "--nodes"),
        (["--node", "2"], "did you mean --nodes?"),
        (["slurm.gpus_per_nodes=8"], "slurm.gpus_per_node"),
        (["train.epoch=1"], "train.epochs"),
        (["--time", "12 hours"], "slurm.time"),
        (["--mem", "lots"], "slurm.mem"),
        (["slurm.signal=USR9"], "USR"),
        (["--config", "no.yaml"], "no.yaml"),
        (["jobs.digit"], "jobs.digits"),
        (["jobs.digits", "jobs.gpt"], "one word too many"),
        (["train.py"], "-- train.py"),
        (["jobs.digits", "--", "train.py"], "leave one out"),
        (["--"], "nothing follows --"),
        (["--mem", "1G", "slurm.mem_per_gpu=1G"], "mem"),
        (["--cpus-per-gpu", "2", "--cpus-per-task", "2"], "cpus"),
        (["slurm.extra.gpus-per-task=1"], "gpus-per-task"),
        (["slurm.extra.outpu=x"], "outpu"),
        (["launch.python=no-such-python"], "no-such-python"),
    ],
)
def test_s18_s21_mistakes_end_with_2_and_one_line(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    for name, value in shell.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(shell.folder)
    before = tree(shell.folder)
    assert submit.main([*AS_ROOT, *words]) == 2
    stderr = capsys.readouterr().err
    assert said in stderr and len(stderr.splitlines()) == 1 and stderr.startswith("hpc.submit: error: ")
    assert tree(shell.folder) == before and not shell.calls("sbatch")


def test_missing_sbatch_suggests_a_local_run(shell: Shell) -> None:
    done = shell.send(PATH="/usr/games")
    assert done.returncode == 2 and "sbatch is not on PATH" in done.stderr and "--local" in done.stderr
    assert not shell.runs()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root is refused")
def test_s8_root_needs_a_flag_to_submit_and_none_to_look(shell: Shell) -> None:
    done = shell.submit()
    assert done.returncode == 2 and "--allow-root" in done.stderr and len(done.stderr.splitlines()) == 1
    assert not shell.calls("sbatch") and not shell.runs()
    assert shell.submit("--dry-run").returncode == 0
    assert shell.submit("slurm.allow_root=true").returncode == 0
    (run_dir,) = shell.runs()
    done = shell.submit("--continue", str(run_dir))
    assert done.returncode == 2 and "--allow-root" in done.stderr and shell.submissions() == 1
    assert shell.submit("--allow-root", "--continue", str(run_dir)).returncode == 0
    assert shell.submissions() == 2


# --- what an outer job leaves behind ---------------------------------------------------------------------------------


def test_s06_s07_s09_no_variable_of_an_outer_job_reaches_the_new_one(shell: Shell) -> None:
    outer = {
        **TASKENV, "SLURM_CPU_BIND": "mask_cpu:0x1", "SLURM_MEM_PER_CPU": "1", "SLURM_MEM_PER_NODE": "2",
        "SLURM_ARRAY_JOB_ID": "50", "SLURM_ARRAY_TASK_ID": "3", "SRUN_DEBUG": "3", "PMI_RANK": "0", "RANK": "3",
        "PMIX_NAMESPACE": "x", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "MASTER_ADDR": "gpu1", "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "x", "HPC_RUN_DIR": "/x", "HPC_SECRET": "s3cret", "CUDA_VISIBLE_DEVICES": "3",
        "SLURM_CONF": "/etc/slurm/mine.conf", "WANDB_API_KEY": "kept", "OMP_NUM_THREADS": "4",
    }  # fmt: skip
    assert shell.send(**outer).returncode == 0
    environ = json.loads(shell.kept("environ.json"))
    left = {name for name in environ if name in outer or name.startswith(("SLURM", "SBATCH", "SRUN", "PMI", "HPC_R"))}
    assert left == {"SLURM_CONF", "WANDB_API_KEY", "OMP_NUM_THREADS"}


def test_s11_sbatch_variables_are_ignored_and_named(shell: Shell) -> None:
    noise = {"SBATCH_PARTITION": "x", "SBATCH_TIMELIMIT": "1", "SBATCH_MY_TOKEN": "s3cret", "SBATCH_COMMENT": "a\nb"}
    done = shell.send("--partition", "low", **noise)
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert "SBATCH_PARTITION=x (use --partition)" in line and "SBATCH_TIMELIMIT=1 (use --time)" in line
    assert "s3cret" not in line and "slurm.extra.comment=" in line
    assert not [name for name in json.loads(shell.kept("environ.json")) if name.startswith("SBATCH_")]
    assert "#SBATCH --partition=low\n" in shell.kept("script")


def test_s6_secrets_of_the_environment_are_written_nowhere(shell: Shell) -> None:
    """A run to its end, with a failing rank: test_secrets.py."""
    (shell.folder / ".env").write_text("A_TOKEN=s3cret-file\n")
    done = shell.send("--follow", "jobs.digits", **SECRETS, FAKE_SCONTROL_SHOW_STDOUT="JobState=COMPLETED ExitCode=0:0")
    assert done.returncode == 0
    assert holders(shell.folder) == [str(shell.folder / ".env")]
    told = [shell.log.read_bytes(), done.stdout.encode(), done.stderr.encode(), shell.kept("script").encode()]
    assert not [text for text in told if MARK in text]


# --- paths, names and arguments --------------------------------------------------------------------------------------


def test_s13_x07_blanks_and_other_alphabets(shell: Shell) -> None:
    folder = shell.folder / "añejo-实验 (v2)"
    folder.mkdir()
    (folder / "a b.yaml").write_text("slurm:\n  partition: low\n")
    done = shell.submit(
        *AS_ROOT, "--config", "a b.yaml", "--name", "dédé", cwd=folder, LANG="C", LC_ALL="C",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    (run_dir,) = (folder / "runs").iterdir()
    assert str(run_dir) in done.stdout and "--job-name='dédé'" in (run_dir / "job.sh").read_text(encoding="utf-8")


@pytest.mark.slow
def test_s15_arguments_reach_the_script_unchanged(shell: Shell) -> None:
    arguments = ["lr\\=0.1;x", "$(touch CANARY)", "a  b", "-x", "--", "%j", "line\nbreak", "é", "'", '"', ""]
    done = shell.submit("--local", "--", "train.py", *arguments)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "REPORT" in line]
    assert json.loads(line.partition("REPORT ")[2])[0] == arguments
    assert not list(shell.folder.rglob("CANARY"))


def test_run_directory_of_somebody_who_may_write_is_refused(shell: Shell) -> None:
    (shell.folder / "open").mkdir(mode=0o777)
    (shell.folder / "open").chmod(0o777)
    (shell.folder / "link").symlink_to(shell.folder / "open")
    for name in ("open", "link"):
        done = shell.send(f"run_dir={name}")
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert not shell.submissions() and not list((shell.folder / "open").iterdir())


def test_given_run_directory_stays_when_the_cluster_refuses(shell: Shell) -> None:
    (shell.folder / "mine").mkdir(mode=0o700)
    (shell.folder / "mine" / "notes").write_text("kept")
    shell.says("sbatch", "", stderr="sbatch: error: Batch job submission failed: Invalid qos specification", code=1)
    assert shell.send("run_dir=mine").returncode == 2
    assert (shell.folder / "mine" / "notes").read_text() == "kept"


def test_run_name_cannot_leave_the_runs_folder(shell: Shell) -> None:
    for name in ("../../x", "..", "a/b"):
        assert shell.send(f"name={name}").returncode == 2
    assert shell.send("--name", "x=1;y").returncode == 0
    assert [path.parent for path in shell.runs()] == [shell.folder / "runs"]


# --- code as it was --------------------------------------------------------------------------------------------------


def _own_job(folder: Path, word: str) -> None:
    job = folder / "jobs" / "mine"
    job.mkdir(parents=True, exist_ok=True)
    (job / "__init__.py").write_text("")
    (job / "config.py").write_text("from dataclasses import dataclass\n\n\n@dataclass\nclass Config:\n    a: int = 1\n")
    (job / "job.py").write_text(f"WORD = {word!r}\n")


def test_s23_training_job_runs_the_code_of_its_submission(shell: Shell) -> None:
    _own_job(shell.folder, "before")
    assert shell.send("jobs.mine").returncode == 0
    (run_dir,) = shell.runs()
    _own_job(shell.folder, "after, and longer")
    script = (run_dir / "job.sh").read_text()
    assert f"--workdir '{shell.folder}'" in script
    look = "import jobs.mine.job, os; print(jobs.mine.job.WORD, os.getcwd())"
    probe = script.replace("-u -m hpc.launch", f'-c "{look}"')
    done = subprocess.run(["bash", "-c", probe], cwd="/", env={"HOME": "/"}, capture_output=True, text=True, timeout=30)
    assert done.stdout == f"before {run_dir}/code\n", done.stderr


def test_s23_live_code_on_request(shell: Shell) -> None:
    assert shell.send("launch.code=live").returncode == 0
    (run_dir,) = shell.runs()
    assert "/code" not in (run_dir / "job.sh").read_text()


def test_runs_are_not_copied_into_the_next_run(shell: Shell) -> None:
    _own_job(shell.folder, "x")
    for _ in range(3):
        assert shell.send("jobs.mine").returncode == 0
    for run_dir in shell.runs():
        assert not (run_dir / "code" / "runs").exists() and (run_dir / "code" / "jobs" / "mine" / "job.py").exists()


# --- local runs ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_s10_r17_local_run_inside_an_allocation_is_alone_and_says_so(shell: Shell) -> None:
    done = shell.submit("--local", "--", "train.py", "x", **TASKENV, RANK="3", WORLD_SIZE="8")
    assert done.returncode == 0, done.stderr
    assert "inside job 7" in done.stderr and "ignored" in done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "REPORT" in line]
    arguments, directory, variables = json.loads(line.partition("REPORT ")[2])
    assert arguments == ["x"] and directory == str(shell.folder)
    assert variables["RANK"] == "0" and variables["WORLD_SIZE"] == "1"
    assert not shell.calls("sbatch") and not shell.calls("srun")


@pytest.mark.slow
def test_local_run_passes_the_exit_code_on(shell: Shell) -> None:
    (shell.folder / "bad.py").write_text("raise SystemExit(9)\n")
    assert shell.submit("--local", "--", "bad.py").returncode == 9


# --- following -------------------------------------------------------------------------------------------------------


def _show(state: str, **fields: str) -> str:
    return " ".join([f"JobId=101 JobState={state}", *(f"{name}={value}" for name, value in fields.items())]) + "\n"


@pytest.mark.slow
def test_f16_follow_goes_through_a_requeue_and_ends_with_the_jobs_code(shell: Shell) -> None:
    answers = [
        _show("PENDING", Reason="Resources"), _show("PENDING", Reason="Resources"), _show("RUNNING", NodeList="n1"),
        _show("COMPLETING", Requeue="1"), _show("PENDING", Reason="BeginTime"), _show("RUNNING", NodeList="n2"),
        _show("FAILED", ExitCode="42:0", Requeue="1"),
    ]  # fmt: skip
    for number, text in enumerate(answers, 1):
        (shell.answers / f"scontrol_show.{number}").write_text(text)
    (shell.folder / "here").mkdir(mode=0o700)
    (shell.folder / "here" / "slurm-101.out").write_bytes(b"caf\xc3\xa9 \xff\nlast line without end")
    done = subprocess.run(
        [sys.executable, "-m", "hpc.submit", *AS_ROOT, "--follow", "run_dir=here"],
        cwd=shell.folder, env=shell.environ, capture_output=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 42
    assert done.stdout.endswith(b"caf\xc3\xa9 \xff\nlast line without end")
    told = [line.removeprefix("hpc.submit: ") for line in done.stderr.decode().splitlines()]
    assert told == [
        "job 101 PENDING, waits for: Resources",
        "job 101 RUNNING on n1",
        "job 101 COMPLETING",
        "job 101 PENDING, waits for: BeginTime",
        "job 101 RUNNING on n2",
        "job 101 FAILED",
        "job 101 ended: FAILED, exited 42",
    ]
    assert shell.submissions() == 1 and not shell.calls("sacct")


def test_interrupted_follow_leaves_the_job_alone(shell: Shell) -> None:
    (shell.answers / "scontrol_show").write_text(_show("RUNNING", NodeList="n1"))
    process = subprocess.Popen(
        [sys.executable, "-m", "hpc.submit", *AS_ROOT, "--follow"],
        cwd=shell.folder, env=shell.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored where the tests run in the background
    )  # fmt: skip
    deadline = time.monotonic() + 30
    while not shell.calls("scontrol") and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(2)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "goes on" in stderr and "scancel 101" in stderr and "Traceback" not in stderr
    assert not shell.calls("scancel")


# --- the tree --------------------------------------------------------------------------------------------------------


def test_s2_no_shell_anywhere() -> None:
    words = ["shell=" + "True", "os.sys" + "tem(", "get" + "output(", "getstatus" + "output", "os.po" + "pen("]
    files = [path for folder in ("hpc", "jobs", "sbin") for path in (ROOT / folder).rglob("*") if path.is_file()]
    found = []
    for path in files:
        if "__pycache__" not in path.parts:
            text = path.read_bytes().decode("utf-8", "replace")
            found += [f"{path}: {word}" for word in words if word in text]
    assert files and not found


def test_only_the_submitter_imports_submitit() -> None:
    importers = [
        path.name
        for path in (ROOT / "hpc").rglob("*.py")
        if any(line.startswith(("import submitit", "from submitit")) for line in path.read_text().splitlines())
    ]
    assert importers == ["submitter.py"]


def test_copy_of_the_toolkit_without_git_works_as_well(shell: Shell) -> None:
    toolkit = shell.folder.parent / "tool kit"
    for name in ("hpc", "jobs"):
        shutil.copytree(ROOT / name, toolkit / name, ignore=shutil.ignore_patterns("__pycache__"))
    shell.environ["PYTHONPATH"] = str(toolkit)
    assert shell.send().returncode == 0
    (run_dir,) = shell.runs()
    assert f"export PYTHONPATH='{toolkit}'" in (run_dir / "job.sh").read_text()
