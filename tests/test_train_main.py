"""The worker's door: run directories, refusals, error files, torchrun, and what it does not import."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from rank_server import ROOT, Ranks

from hpc import config

HEAVY = ("tensorboard", "rich", "sklearn", "pandas", "torch._dynamo", "sympy")


def run_directories(folder: Path) -> list[Path]:
    return sorted((folder / "runs").iterdir())


@pytest.mark.slow
def test_x12_late_ranks_share_one_folder(ranks: Ranks, tmp_path: Path) -> None:
    ranks(tmp_path, "toy", ranks=4, stagger_s=1.1).check()
    (run,) = run_directories(tmp_path)
    assert run.name.startswith("toy-")
    assert {p.name for p in run.iterdir()} == {"checkpoints", "config.yaml", "metrics.jsonl", "tensorboard"}


@pytest.mark.slow
def test_what_a_run_leaves_is_private(ranks: Ranks, tmp_path: Path) -> None:
    ranks(tmp_path, "toy").check()
    (run,) = run_directories(tmp_path)
    for path in [run, *run.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.slow
def test_torchruns_run_id_names_the_folder(ranks: Ranks, tmp_path: Path) -> None:
    for _ in range(2):
        ranks(tmp_path, "toy", "name=mine", env={"TORCHELASTIC_RUN_ID": "night/7"}).check()
    assert [run.name for run in run_directories(tmp_path)] == ["mine-night_7"]
    ranks(tmp_path, "toy", "name=mine", env={"TORCHELASTIC_RUN_ID": "none"}).check()
    assert len(run_directories(tmp_path)) == 2


@pytest.mark.slow
def test_the_controllers_configuration_and_folder_are_taken(ranks: Ranks, tmp_path: Path) -> None:
    ranks(tmp_path, "toy", "samples=24", "train.batch_size=8").check()
    (run,) = run_directories(tmp_path)
    text = (run / "config.yaml").read_text()
    env = {"HPC_CONFIG": text, "HPC_RUN_DIR": str(tmp_path / "given")}
    trial = ranks(tmp_path, env=env).check()
    assert "done: 3 steps" in trial.logs[0] and "checkpoint given/checkpoints/step-3" in trial.logs[0]
    assert config.load_text((tmp_path / "given/config.yaml").read_text()) == config.load_text(text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("toy", "lr=fast"), ("lr",)),
        (("toy", "train.epoch=2"), ("train.epochs",)),
        (("toy", "train.epochs=0"), ("train.epochs=0", "1 or more")),
        (("toy", "train.precision=fp8"), ("bf16",)),
        (("toy", "digits"), ("toy and digits",)),
        (("jobs.nothing",), ("jobs.nothing",)),
    ],
)
def test_refusals_are_one_line_with_exit_code_2(
    ranks: Ranks, tmp_path: Path, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    trial = ranks(tmp_path, *arguments)
    assert trial.codes == [2], trial.text()
    (line,) = trial.logs[0].splitlines()
    assert line.startswith("hpc.train: error: ") and all(word in line for word in words)
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_job_module_without_a_job_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "jobs/empty"
    folder.mkdir(parents=True)
    (folder / "config.py").write_text("from dataclasses import dataclass\n@dataclass\nclass Config:\n    pass\n")
    trial = ranks(tmp_path, "jobs.empty")
    assert trial.codes == [2] and "no module jobs.empty.job" in trial.logs[0]
    (folder / "job.py").write_text("Job = 3\n")
    trial = ranks(tmp_path, "jobs.empty")
    assert trial.codes == [2] and "has no class Job derived from hpc.train.job.TrainingJob" in trial.logs[0]
    (folder / "job.py").write_text("import not_there_either\n")
    trial = ranks(tmp_path, "jobs.empty")
    assert trial.codes == [1]
    assert trial.logs[0].splitlines()[-1] == "ModuleNotFoundError: No module named 'not_there_either'"


@pytest.mark.slow
def test_a_run_directory_that_others_may_write_to_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o700)
    os.chmod(tmp_path / "open", 0o777)
    trial = ranks(tmp_path, "toy", "run_dir=open", ranks=2)
    assert trial.codes == [2, 2]
    assert "can be written by others" in trial.logs[0] and trial.logs[1] == ""


@pytest.mark.slow
def test_the_error_file_has_the_form_that_torchrun_reads(ranks: Ranks, tmp_path: Path) -> None:
    file = tmp_path / "error-0.json"
    env = {"TORCHELASTIC_ERROR_FILE": str(file)}
    ranks(tmp_path, "toy", "trouble=raise", "trouble_step=1", env=env)
    message = json.loads(file.read_text())["message"]
    assert message["message"] == "ValueError: bad batch 17"
    assert "make_trouble" in message["extraInfo"]["py_callstack"]
    assert int(message["extraInfo"]["timestamp"]) > 1_600_000_000 and message["extraInfo"]["rank"] == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert ranks(tmp_path, "toy", "train.epochs=0", env=env).codes == [2]
    message = json.loads(file.read_text())["message"]
    assert message["message"].startswith("ConfigError: train.epochs=0") and "py_callstack" not in message["extraInfo"]
    gone = {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "nowhere/error.json")}
    assert ranks(tmp_path, "toy", "trouble=raise", "trouble_step=1", env=gone).codes == [1]
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.slow
def test_a_terminal_gets_one_moving_line(ranks: Ranks, tmp_path: Path) -> None:
    arguments = ("toy", "train.batch_size=4", "train.epochs=40")
    log = ranks(tmp_path, *arguments, env={"HPC_TERMINAL": "1", "COLUMNS": "120"}).check().logs[0]
    assert "\r" in log and "step 400/400" in log and "samples/s" in log and " left" in log
    assert log.count("\n") < 60 and log.splitlines()[-1].startswith("\x1b[?25hdone: 400 steps, ")
    plain = ranks(tmp_path, *arguments).check().logs[0]
    assert "\r" not in plain and "\x1b" not in plain and "step 1/400, epoch 1, loss " in plain


@pytest.mark.slow
def test_a_worker_that_starts_imports_nothing_it_does_not_need() -> None:
    code = f"import sys, hpc.train.__main__; print([m for m in {HEAVY} if m in sys.modules])"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.slow
def test_leaving_quickly_loses_nothing_that_a_job_has_begun(tmp_path: Path) -> None:
    code = (
        "import atexit, threading, time\n"
        "from hpc.train.__main__ import leave\n"
        "left = open('left.txt', 'w')\nleft.write('last words')\n"
        "atexit.register(lambda: print('at exit'))\n"
        "threading.Thread(target=lambda: (time.sleep(0.5), print('thread'))).start()\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "idle = ThreadPoolExecutor(1)\nidle.submit(abs, 1).result()\n"  # nobody has shut it down
        "print('said', end='')\nleave(41)\n"
    )
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 41 and done.stdout == "saidthread\nat exit\n", done.stderr
    assert (tmp_path / "left.txt").read_text() == "last words"


def torchrun(folder: Path, *arguments: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    return subprocess.run(
        [*command, "-m", "hpc.train", *arguments], cwd=folder, env=env, capture_output=True, text=True
    )


@pytest.mark.slow
def test_runs_under_plain_torchrun(tmp_path: Path) -> None:
    done = torchrun(tmp_path, "toy", "train.batch_size=8")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("done: 5 steps, ")
    assert len(run_directories(tmp_path)) == 1


@pytest.mark.slow
def test_torchrun_shows_the_first_failing_ranks_error(tmp_path: Path) -> None:
    done = torchrun(tmp_path, "toy", "train.batch_size=8", "trouble=raise", "trouble_step=2", "trouble_rank=1")
    assert done.returncode == 1
    cause = done.stderr[done.stderr.index("Root Cause") :]
    assert "ValueError: bad batch 17" in cause and "rank      : 1" in cause
