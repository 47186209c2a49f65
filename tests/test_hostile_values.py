"""Hostile values that come with the environment, in host lists and in what others say; in fields and paths: test_plan.py.

Nothing of them is executed, and nothing of them drives the terminal of who reads our output.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from submit_shell import ROOT, Shell
from submitit.slurm import slurm
from test_plan import PAYLOADS, here, plan, run  # noqa: F401 (here is a fixture)

from hpc import config
from hpc.allocation import allocation as allocations
from hpc.allocation import verdict
from hpc.allocation.step import agent_command, plan_step, step_command
from hpc.allocation.verdict import End
from hpc.errors import HpcError, one_line, printable, printable_lines
from hpc.login.plan import Place
from hpc.login.submitter import render
from hpc.node import environment
from hpc.slurm.nodelist import expand_nodelist

COMMAND = "touch CANARY"
TEXTS = [payload.format(COMMAND) for payload in PAYLOADS]
BATCH = {
    "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS": "2",
    "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_CPUS_PER_NODE": "24(x2)",
}  # fmt: skip
READ = (*BATCH, "SLURM_GPUS_PER_NODE", "SLURM_RESTART_COUNT", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID",
        "SLURM_JOB_END_TIME", "SLURM_CPUS_PER_TASK", "SLURM_STEP_ID", "SLURM_HET_SIZE")  # fmt: skip
OF_A_TASK = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_JOB_ID",
             "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "SLURM_GPUS_ON_NODE")  # fmt: skip
OUTSIDE = ("PYTHONPATH", "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_EXPORT_ENV", "MASTER_ADDR", "HOME", "PS4", "EVIL")


def test_s1_every_variable_of_the_batch_step_is_refused_or_inert() -> None:
    """An argv is never read by a shell; what is not a number is refused before it could be a part of a name in it."""
    loaded = config.load(command=["train.py"], site=False)
    refused = inert = 0
    for name, text in itertools.product(READ, [*TEXTS, "../../x", "1/../x", "²", "٣", "9" * 5000]):
        try:
            allocation = allocations.read({**BATCH, name: text})
        except HpcError as error:
            assert one_line("x", error).isprintable() and len(str(error)) < 400
            refused += 1
            continue
        step = plan_step(allocation, loaded)
        argv = step_command(step, agent_command(step, loaded, "/python"))
        assert not [word for word in argv if not word.isascii() or COMMAND in word]
        assert "/" not in allocation.run_id and allocation.run_id.isalnum()
        inert += 1
    assert refused + inert == len(READ) * (len(TEXTS) + 5) >= 600
    assert refused > 300


def test_s1_every_variable_of_a_task_is_refused_or_inert() -> None:
    told = {
        "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_STEP_NODELIST": "n[1-2]", "MASTER_ADDR": "127.0.0.1",
    }  # fmt: skip
    count = 0
    for name, text in itertools.product(OF_A_TASK, TEXTS):
        count += 1
        try:
            task = environment.read({**told, name: text})
        except HpcError as error:
            assert one_line("x", error).isprintable() and error.exit_code == 78
            continue
        assert task.job_id == "7" and task.task_rank == 0
    assert count >= 300


def test_s1_every_host_list_is_refused_or_a_list_of_names() -> None:
    """A name may be as odd as scontrol lets it be, and is then a name and no more: a word of an argv, escaped when shown."""
    shapes = ("{}", "n1,{}", "n[1-2]{}", "{}[1-2]", "n[{}]", "n[1-{}]", "n[1,{}]")
    refused = names = 0
    for shape, text in itertools.product(shapes, TEXTS):
        written = shape.replace("{}", text)
        try:
            found = expand_nodelist(written)
        except HpcError as error:
            assert one_line("x", error).isprintable() and len(str(error)) < 600
            refused += 1
            continue
        assert all(name and not set(name) & set("\n,\0") for name in found)
        names += 1
    assert refused + names == len(shapes) * len(TEXTS) >= 250 and refused > 100


def test_s1_no_value_of_the_environment_is_run_by_the_batch_script(here: Place) -> None:  # noqa: F811
    script, tried = render(plan(place=here)), 0
    for text in TEXTS:
        if "\0" in text:
            continue  # no environment takes it
        done = run(script, here, **dict.fromkeys(OUTSIDE, os.fsencode(text).decode("utf-8", "surrogateescape")))
        assert done.returncode == 0, (text, done.stderr)
        tried += len(OUTSIDE)
    assert tried >= 300 and not list(here.run_dir.parent.rglob("CANARY*"))


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


def test_s1_s9_no_value_of_the_environment_reaches_a_submission(shell: Shell) -> None:
    texts = [text for text in TEXTS if "\0" not in text and len(text) < 1000]
    hostile = {f"EVIL_{number}": text for number, text in enumerate(texts)}
    hostile |= {f"SBATCH_EVIL_{number}": text for number, text in enumerate(texts)}
    hostile |= {"SBATCH_PARTITION": "\x1b[2J\n$(touch CANARY)", "SBATCH_COMMENT": f"\n{COMMAND}\n", "USER": texts[0]}
    done = shell.send(**hostile)
    assert done.returncode == 0 and len(done.stderr.splitlines()) == 1 and done.stderr.rstrip("\n").isprintable()
    (run_dir,) = shell.runs()
    script = (run_dir / "job.sh").read_text()
    assert "CANARY" not in script and "EVIL" not in script and not list(shell.folder.parent.rglob("CANARY"))


def test_s1_the_canary_sings(tmp_path: Path) -> None:
    """submitit alone writes a comment with a line break as it is, and the next line of the script runs."""
    script = slurm._make_sbatch_string("true", tmp_path, comment=f"x\n{COMMAND}\n#", use_srun=False)
    subprocess.run(["/bin/bash", "-c", script], cwd=tmp_path, check=True, timeout=20)
    assert (tmp_path / "CANARY").exists()


# --- S9: what others say, in our output --------------------------------------------------------------------------------

anything = st.text(st.characters(), max_size=40)
"""With control characters, separators, direction marks and halves of surrogate pairs."""


@given(anything)
def test_s9_an_escaped_text_is_one_printable_line_and_stays_so(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable() and printable(shown) == shown
    assert one_line("hpc.x", ValueError(text)).isprintable()
    assert all(line.isprintable() for line in printable_lines(text).split("\n"))


CONTROLS = [
    chr(code) for code in (*range(32), *range(127, 160), 0x2028, 0x2029, *range(0x202A, 0x202F), 0x2066, 0xFEFF)
]


def test_s9_no_control_character_of_a_node_an_exception_or_a_name_reaches_a_verdict(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for character in CONTROLS:
        text = f"a{character}[2Jb"
        first = {"rank": 1, "host": text, "code": 1, "message": text, "traceback": f"x\n  {text}\n", "log": text}
        first |= {"gpu": text, "stacks": text, "time": 1e300, "step": text}
        alike = [{"ranks": text, "count": 2, "message": text, "same": False}]
        end = End(code=1, started=True, reported=True, first=first, others=2, alike=alike)
        folder = tmp_path / f"a{character if character != chr(0) else ''}"
        verdict.Verdict(end=end, cause="exception", attempt=0, restart=0, folder=folder, comes_next=text).tell()
        verdict.complain(text)
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) >= 4 * len(CONTROLS)
    assert all(line.isprintable() for line in captured.err.split("\n"))


def test_s9_what_sbatch_says_is_one_printable_line(shell: Shell) -> None:
    shell.says("sbatch", "", stderr=f"sbatch: error: {''.join(CONTROLS[1:])} no", code=1)
    done = shell.send("--name", "x")
    assert done.returncode == 2 and done.stderr.rstrip("\n").isprintable()


def test_s9_names_of_files_and_jobs_are_escaped_in_what_the_controller_says(tmp_path: Path) -> None:
    from hpc import snapshot

    work, run_dir = tmp_path / "work", tmp_path / "run"
    work.mkdir()
    run_dir.mkdir(mode=0o700)
    evil = work / "\x1b[2J\nhpc.launch: all is well.py"
    evil.write_text("old")
    snapshot.take(work, run_dir / "code")
    evil.write_text("new")
    (run_dir / "config.yaml").write_text('command: [sh, -c, "exit 3", "\\e[2J\\n\\r"]\n')
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    done = subprocess.run(
        [sys.executable, "-m", "hpc.launch", "--local", "--run-dir", str(run_dir)],
        env={**kept, "PYTHONPATH": str(ROOT), "SLURM_JOB_ID": "7\x1b[2J\n"},
        cwd=work, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 3 and "changed since the submission" in done.stderr
    assert all(line.isprintable() for line in (done.stdout + done.stderr).split("\n"))
    assert "\nhpc.launch: all is well" not in done.stderr
