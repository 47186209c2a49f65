"""Batch scripts with one mistake each: the finding names the line; without the mistake there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hpc.login import batchscript
from hpc.login.lint import RULES, Script, check

ROOT = Path(__file__).resolve().parent.parent
HEAD = ["#!/bin/bash", "#SBATCH --requeue", "#SBATCH --open-mode=append"]


def script(*lines: str) -> str:
    """A script without mistakes, and these lines behind its third."""
    return "\n".join([*HEAD, *lines, ""])


# what is wrong | the line (of the whole script) | lines from the fourth on | the same without the mistake
MISTAKES = [
    (
        "in the foreground, with a trap for USR1", 6,
        ["#SBATCH --signal=B:USR1@60", "trap 'scontrol requeue $SLURM_JOB_ID' USR1", "srun python train.py"],
        ["#SBATCH --signal=B:USR1@60", "trap 'kill -USR1 $child' USR1", "srun python train.py & child=$!", "wait $child"],
    ),
    (
        "in the foreground", 6,
        ["trap stop SIGTERM 10", "stop() { echo; }", "if true; then python a.py; torchrun \\", "  train.py; fi"],
        ["trap stop EXIT", "stop() { echo; }", "if true; then python a.py; torchrun \\", "  train.py; fi"],
    ),
    (
        "exec srun after a trap", 5, ["trap 'touch stopped' TERM", "exec srun python train.py"], ["exec srun python train.py"],
    ),
    (
        "the background and no wait", 4, ["srun python train.py &"], ["srun python train.py &", "wait"],
    ),
    (
        "with torchrun", 4,
        ["#SBATCH --signal=USR1@120", "srun torchrun --nproc-per-node=2 train.py"],
        ["#SBATCH --signal=TERM@120", "srun torchrun --nproc-per-node=2 train.py"],
    ),
    (
        "with torchrun", 4,
        ["#SBATCH --signal=SIGUSR2@9", "srun bash -c \"", "  python -m torch.distributed.run train.py", "\""],
        ["#SBATCH --signal=SIGUSR2@9", "srun python -m hpc.node -- train.py"],
    ),
    (
        "with a trap for USR1 in the script", 4,
        ["#SBATCH --signal=USR1@60", "trap stop USR1", "srun python train.py & wait; wait"],
        ["#SBATCH --signal=B:USR1@60", "trap stop USR1", "srun python train.py & wait; wait"],
    ),
    (
        "and no trap for USR1", 4, ["#SBATCH --signal=B:USR1@60", "srun python a.py"],
        ["#SBATCH --signal=USR1@60", "srun python a.py"],
    ),
    (
        "is not there", 4, ["#SBATCH -o logs/%x-%j.out", "srun python a.py"], ["#SBATCH -o %x-%j.out", "srun python a.py"],
    ),
    (
        "pattern in the folder", 4, ["#SBATCH --error logs/%j/err", "srun hostname"], ["#SBATCH --error .", "srun hostname"],
    ),
    (
        "1 task and 4 GPUs", 4,
        ["#SBATCH --gpus-per-node=4", "srun python train.py"],
        ["#SBATCH --gpus-per-node=a100:4", "#SBATCH --ntasks-per-node=4", "srun python train.py"],
    ),
    (
        "8 tasks and 4 GPUs", 5,
        ["#SBATCH -N2 --gres=gpu:a100:4", "#SBATCH -n 16", "srun python train.py"],
        ["#SBATCH -N2 --gres=gpu:a100:4", "#SBATCH -n 8", "srun python train.py"],
    ),
    (
        "each of which starts torchrun", 4,
        ["#SBATCH --ntasks-per-node=4", "#SBATCH --gpus-per-node=4", "srun torchrun --nproc_per_node=4 train.py"],
        ["#SBATCH --ntasks-per-node=1", "#SBATCH --gpus-per-node=4", "srun torchrun --nproc_per_node=4 train.py"],
    ),
    (
        "with 4 GPUs on each node", 5,
        ["#SBATCH --gpus-per-node=4", "srun torchrun --nproc-per-node 2 train.py"],
        ["#SBATCH --gpus-per-node=4", "srun torchrun --nproc-per-node 4 train.py"],
    ),
    (
        "torchrun without srun", 5, ["#SBATCH --nodes=2", "torchrun train.py"], ["#SBATCH --nodes=2", "srun torchrun train.py"],
    ),
    (
        "--gpus-per-task=1", 4, ["#SBATCH --gpus-per-task=1", "srun hostname"], ["#SBATCH --gpu-bind=none", "srun hostname"],
    ),
    (
        "a fixed port, 29500", 4,
        ["export MASTER_PORT=29500", "srun hostname"],
        ["export MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))", "srun hostname"],
    ),
    (
        "a fixed port, 29400", 4,
        ["srun torchrun --rdzv_endpoint=$head:29400 train.py"],
        ["srun torchrun --rdzv_endpoint=$head:$port train.py"],
    ),
    (
        "a master on localhost", 5,
        ["#SBATCH --nodes=2", "export MASTER_ADDR=localhost", "srun hostname"],
        ["#SBATCH --nodes=1", "export MASTER_ADDR=localhost", "srun hostname"],
    ),
    (
        "CUDA_VISIBLE_DEVICES set by hand", 4,
        ["srun bash -c 'CUDA_VISIBLE_DEVICES=$SLURM_LOCALID exec python train.py'"],
        ["# CUDA_VISIBLE_DEVICES=0,1", "srun bash -c 'echo $CUDA_VISIBLE_DEVICES; exec python train.py'"],
    ),
    (
        "srun without --cpus-per-task", 5,
        ["#SBATCH --cpus-per-task=8", "srun python train.py"],
        ["#SBATCH --cpus-per-task=8", "srun -c 8 python train.py"],
    ),
    (
        "behind the first command", 5, ["module load cuda", "#SBATCH --time=1:00:00"], ["#SBATCH --time=1:00:00", "module load cuda"],
    ),
    (
        "`# SBATCH` with a blank", 4, ["# SBATCH --time=1:00:00", "hostname"], ["##SBATCH --time=1:00:00", "hostname"],
    ),
    (
        "a variable in --output", 4, ["#SBATCH --output=$HOME/%j.out", "hostname"], ["#SBATCH --output=%j.out", "hostname"],
    ),
    (
        "srun in a pipe", 4, ["srun python train.py 2>&1 | tee log"], ["set -o pipefail", "srun python train.py 2>&1 | tee log"],
    ),
    (
        "by name", 5, ["srun hostname", "srun pkill -9 python"], ["srun hostname", "echo see pkill(1)"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("what", "line", "wrong", "right"), MISTAKES, ids=[f"{row[0]}-{row[1]}" for row in MISTAKES])
def test_a_mistake_is_found_where_it_stands(
    tmp_path: Path, what: str, line: int, wrong: list[str], right: list[str]
) -> None:
    found = check(script(*wrong), tmp_path)
    assert [(finding.line, what in finding.what) for finding in found] == [(line, True)], found
    assert found[0].why and found[0].instead
    assert check(script(*right), tmp_path) == []


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("#!/bin/bash\n#SBATCH --open-mode=append\nsrun hostname\n", "no --requeue"),
        ("#!/bin/bash\n#SBATCH --requeue\nsrun hostname\n", "no --open-mode"),
        ("#!/bin/bash\n#SBATCH --requeue\n#SBATCH --open-mode=truncate\nsrun hostname\n", "--open-mode=truncate"),
        ("#SBATCH --no-requeue\nsrun hostname\n", "names no interpreter"),
        ("#!/bin/bash\n#SBATCH --no-requeue\r\nsrun hostname\n", "DOS line breaks"),
    ],
)
def test_what_is_missing_in_the_head(tmp_path: Path, text: str, what: str) -> None:
    assert [what in finding.what for finding in check(text, tmp_path)] == [True]


def test_every_rule_has_a_mistake_here(tmp_path: Path) -> None:
    texts = [script(*wrong) for _, _, wrong, _ in MISTAKES] + ["srun hostname\n"]
    scripts = [Script(read=batchscript.read(text), directory=tmp_path) for text in texts]
    assert not [rule for rule in RULES if not any(list(rule(one)) for one in scripts)]


def test_the_log_folder_is_looked_for_where_the_job_is_submitted(tmp_path: Path) -> None:
    (tmp_path / "project" / "logs").mkdir(parents=True)
    text = script("#SBATCH --output=logs/%j.out", "hostname")
    assert check(text, tmp_path / "project") == [] and len(check(text, tmp_path)) == 1
    assert check(script("#SBATCH -D project --output=logs/%j.out", "hostname"), tmp_path) == []


def test_quotes_comments_and_here_documents(tmp_path: Path) -> None:
    text = script(
        "cat > train.sh <<'EOF'", "export MASTER_PORT=29500", "CUDA_VISIBLE_DEVICES=0 srun x &", "EOF",
        "echo 'a # b' \"it's\" $# # MASTER_PORT=29500", "echo \"over", "two lines\" it\\'s", "python train.py",
    )  # fmt: skip
    assert check(text, tmp_path) == []
    commands = batchscript.read(text).commands
    assert [command.program for command in commands if command.program != ">"] == ["cat", "echo", "echo", "python"]
    assert batchscript.read("\n'\"open\nsrun $( \\").commands is not None  # what no shell would take ends as well


def test_options_in_every_form() -> None:
    words = ["-N2", "--gpus-per-node", "4", "--requeue", "-t", "1:00", "--signal=B:TERM@9", "python", "-n"]
    found = list(batchscript.options(words))
    assert found == [("nodes", "2"), ("gpus-per-node", "4"), ("requeue", ""), ("time", "1:00"), ("signal", "B:TERM@9")]


def doctor(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HPC_SITE_CONFIG": "", "HOME": str(cwd)}
    argv = [sys.executable, "-m", *words]
    return subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=60)


def test_the_door_and_its_exit_codes(tmp_path: Path) -> None:
    (tmp_path / "bad.sbatch").write_text(script("#SBATCH --time=9", "export MASTER_PORT=29500", "srun hostname"))
    done = doctor("hpc.doctor", "--lint", "bad.sbatch", cwd=tmp_path)
    assert done.returncode == 1 and done.stdout.startswith("bad.sbatch:5: a fixed port, 29500\n"), done.stdout
    for words in (["--lint"], ["--lint", "absent"], ["--lint", sys.executable], ["--lnit", "bad.sbatch"]):
        done = doctor("hpc.doctor", *words, cwd=tmp_path)
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and not done.stdout, done.stderr


def test_our_own_scripts_are_clean(tmp_path: Path) -> None:
    words = [
        "--dry-run",
        "--nodes",
        "2",
        "--gpus-per-node",
        "4",
        "slurm.cpus_per_gpu=2",
        "slurm.setup=[module load cuda]",
    ]
    rendered = doctor("hpc.submit", *words, f"run_dir={tmp_path}", cwd=tmp_path)
    assert "--gpus-per-node=4" in rendered.stdout, rendered.stderr
    (tmp_path / "job.sh").write_text(rendered.stdout)
    done = doctor("hpc.doctor", "--lint", str(ROOT / "sbin" / "ddp.sbatch"), "job.sh", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout == "2 files: no findings\n", done.stdout + done.stderr
