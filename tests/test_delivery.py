"""sbatch's answers, good, bad and lost: each is told, and nothing is ever sent twice."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from submit_shell import AS_ROOT, Shell


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


@pytest.mark.parametrize(
    ("stderr", "said"),
    [
        ("sbatch: error: invalid partition specified: lo\nsbatch: error: Batch job submission failed: Invalid partition name specified", "no such partition"),
        ("sbatch: error: Batch job submission failed: Requested node configuration is not available", "can ever give"),
        ("sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified", "account"),
    ],
)  # fmt: skip
def test_refusal_of_the_cluster_is_told_and_leaves_nothing(shell: Shell, stderr: str, said: str) -> None:
    shell.says("sinfo", "low*|up|1-00:00:00|2|8|16000|gpu:a100:4(S:0)|(null)\nhigh|up|infinite|1|8|16000|(null)|(null)")
    shell.says("sbatch", "", stderr=stderr, code=1)
    done = shell.send("--partition", "lo", "--nodes", "9")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert said in done.stderr and "nothing was submitted" in done.stderr
    assert "low (the default): 2 nodes with gpu:a100:4" in done.stderr or "account" in said
    assert not (shell.folder / "runs").exists()
    assert shell.submissions() <= 1


def test_request_that_the_cluster_would_leave_waiting_for_ever_is_not_sent(shell: Shell) -> None:
    (shell.answers / "sbatch.1.err").write_text("allocation failure: Requested node configuration is not available")
    (shell.answers / "sbatch.1.exit").write_text("1")
    shell.says("sinfo", "")
    done = shell.send("--nodes", "99")
    assert done.returncode == 2 and "can ever give" in done.stderr and shell.submissions() == 0


def test_request_for_nodes_that_are_only_down_today_is_sent(shell: Shell) -> None:
    (shell.answers / "sbatch.1.err").write_text("allocation failure: Requested node configuration is not available")
    (shell.answers / "sbatch.1.exit").write_text("1")
    (shell.answers / "sinfo.1").write_text("node2")
    (shell.answers / "sinfo").write_text("low*|up|1-00:00:00|2|8|16000|gpu:4|(null)")
    assert shell.send("--nodes", "2").returncode == 0
    assert shell.submissions() == 1


def test_time_limit_beyond_the_partitions_is_noted(shell: Shell) -> None:
    shell.says("sinfo", "low*|up|1-00:00:00|2|8|16000|gpu:4|(null)")
    done = shell.send("--time", "30-00:00:00")
    assert done.returncode == 0 and "longer than partition low allows (1-00:00:00)" in done.stderr
    assert "longer" not in shell.send("--time", "24:00:00").stderr


# --- a lost answer ---------------------------------------------------------------------------------------------------

TIMED_OUT = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"


def _lost(shell: Shell) -> None:
    (shell.answers / "sbatch.2.err").write_text(TIMED_OUT)
    (shell.answers / "sbatch.2.exit").write_text("1")


def test_q15_lost_answer_is_looked_up_and_never_sent_again(shell: Shell) -> None:
    _lost(shell)
    run_dir = shell.folder / "here"
    shell.says("squeue", f"88|/else/job.sh\n104|{run_dir}/job.sh")
    done = shell.send("run_dir=here")
    assert done.returncode == 0 and "job 104 submitted" in done.stdout, done.stderr
    assert shell.submissions() == 1


@pytest.mark.slow
def test_q15_lost_answer_and_no_such_job_says_how_to_check(shell: Shell) -> None:
    _lost(shell)
    done = shell.send()
    assert done.returncode == 1 and "lost" in done.stderr and "squeue --me" in done.stderr and "Socket" in done.stderr
    assert shell.submissions() == 1
    (run_dir,) = shell.runs()  # it stays: the job may still come, and needs it
    assert (run_dir / "job.sh").exists()


@pytest.mark.slow
def test_q15_lost_answer_and_a_queue_that_does_not_answer(shell: Shell) -> None:
    _lost(shell)
    shell.says("squeue", "", stderr="slurm_load_jobs error: Unable to contact slurm controller", code=1)
    done = shell.send()
    assert done.returncode == 1 and "cannot be told" in done.stderr and len(done.stderr.splitlines()) == 1
    assert shell.submissions() == 1


@pytest.mark.slow
def test_sbatch_that_does_not_answer_at_all(shell: Shell) -> None:
    done = shell.send("run_dir=here", FAKE_SBATCH_SLEEP="2", HPC_SUBMIT_TIMEOUT_S="50")
    assert done.returncode == 0
    shell.says("squeue", f"104|{shell.folder}/again/job.sh")
    done = shell.send("run_dir=again", FAKE_SBATCH_SLEEP="2", HPC_SUBMIT_TIMEOUT_S="0.5")
    assert done.returncode == 0 and "job 104" in done.stdout


@pytest.mark.slow
def test_q15_a_run_is_sent_again_once_after_each_attempt(shell: Shell) -> None:
    assert shell.send("run_dir=here").returncode == 0
    run_dir = shell.folder / "here"
    script, code = (run_dir / "job.sh").read_bytes(), sorted(path.name for path in run_dir.glob("code*"))
    shell.says("squeue", "RUNNING")
    done = shell.send("--continue", "here")
    assert done.returncode == 2 and "job 101 of this run is RUNNING" in done.stderr
    shell.says("squeue", "COMPLETED")
    with open(run_dir / "record.jsonl", "a") as record:
        record.write('{"event": "ended", "attempt": 0, "job_id": "101"}\n')
    done = shell.send("--continue", "here")
    assert done.returncode == 0 and "job 101 submitted" in done.stdout, done.stderr
    assert shell.calls("sbatch")[-1] == [str(run_dir / "job-after-0.sh")]
    assert (run_dir / "job-after-0.sh").read_bytes() == script
    assert sorted(path.name for path in run_dir.glob("code*")) == code
    done = shell.send("--continue", "here")
    assert done.returncode == 2 and "attempt 0 was continued already" in done.stderr
    with open(run_dir / "record.jsonl", "a") as record:
        record.write('{"event": "ended", "attempt": 1, "job_id": "101"}\n')
    assert shell.submit("--continue", "here", SLURM_JOB_ID="101").returncode == 0  # the run's own job: it still runs
    assert shell.calls("sbatch")[-1] == ["--dependency=afterany:101", str(run_dir / "job-after-1.sh")]
    done = shell.send("--continue", "here", "optim.lr=1")
    assert done.returncode == 2 and "stands alone" in done.stderr
    assert shell.submissions() == 3


def test_what_a_sites_own_sbatch_says_besides_is_not_taken_for_the_answer(shell: Shell) -> None:
    shell.says(
        "sbatch", "-> checking your job 2 nodes ... ok\n\nSubmitted batch job 4711 on cluster c2\nyour job 3 in line"
    )
    done = shell.send()
    assert done.returncode == 0 and done.stdout.startswith("job 4711 submitted"), done.stdout


def test_a_refusal_that_speaks_of_sockets_is_no_lost_answer(shell: Shell) -> None:
    shell.says("sbatch", "", stderr="sbatch: error: Invalid --sockets-per-node specification", code=1)
    done = shell.send("slurm.extra.sockets-per-node=x")
    assert done.returncode == 2 and "nothing was submitted" in done.stderr and not shell.runs(), done.stderr


@pytest.mark.slow
def test_a_refused_submission_leaves_an_earlier_run_directory_as_it_was(shell: Shell) -> None:
    assert shell.send("run_dir=here", "optim.lr=0.05").returncode == 0
    run_dir = shell.folder / "here"
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    shell.says("sbatch", "", stderr="sbatch: error: invalid partition specified: lo", code=1)
    assert shell.send("run_dir=here", "--partition", "lo").returncode == 2
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_q15_no_second_job_while_one_of_the_run_is_there(shell: Shell) -> None:
    assert shell.send("run_dir=here").returncode == 0
    shell.says("squeue", "RUNNING")
    done = shell.send("run_dir=here", "train.epochs=9")
    assert done.returncode == 2 and "job 101 of this run is RUNNING" in done.stderr and shell.submissions() == 1
    assert "epochs: 9" not in (shell.folder / "here" / "config.yaml").read_text()
    shell.says("squeue", "A_STATE_OF_LATER")
    assert shell.send("run_dir=here").returncode == 2 and shell.submissions() == 1
    shell.says("squeue", "FAILED")
    assert shell.send("run_dir=here").returncode == 0 and shell.submissions() == 2


@pytest.mark.slow
def test_q15_ctrl_c_twice_leaves_the_directory_of_a_job_that_may_come(shell: Shell) -> None:
    """The first one while sbatch is silent, the second one while the job is looked for."""
    environ = {**shell.environ, "FAKE_SBATCH_SLEEP": "0", "FAKE_SQUEUE_SLEEP": "30"}
    (shell.answers / "sbatch.2.err").write_text(TIMED_OUT)
    (shell.answers / "sbatch.2.exit").write_text("1")
    words = [sys.executable, "-m", "hpc.submit", *AS_ROOT, "run_dir=here"]
    child = subprocess.Popen(words, cwd=shell.folder, env=environ, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not shell.calls("squeue") and time.monotonic() < deadline:
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    _, stderr = child.communicate(timeout=60)
    assert child.returncode == 1 and "the answer of sbatch was lost" in stderr and "interrupted" in stderr, stderr
    assert (shell.folder / "here" / "job.sh").exists()


@pytest.mark.slow
def test_q15_a_continuation_whose_answer_was_lost_says_how_to_go_on(shell: Shell) -> None:
    assert shell.send("run_dir=here").returncode == 0
    shell.says("squeue", "COMPLETED")
    script = shell.folder / "here" / "job-after-0.sh"
    shell.says("sbatch", "", stderr="sbatch: error: invalid partition specified: lo", code=1)
    assert shell.send("--continue", "here").returncode == 2 and not script.exists()
    shell.says("sbatch", "", stderr=TIMED_OUT, code=1)
    assert shell.send("--continue", "here").returncode == 1 and script.exists()
    done = shell.send("--continue", "here")
    assert done.returncode == 2 and "remove that file" in done.stderr and len(done.stderr.splitlines()) == 1
    script.unlink()
    shell.says("sbatch", "Submitted batch job 102")
    assert shell.send("--continue", "here").returncode == 0
    assert f"see {script}" in shell.send("--continue", "here").stderr
