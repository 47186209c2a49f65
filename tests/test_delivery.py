"""sbatch's answers, good, bad and lost: each is told, and nothing is ever sent twice."""

from __future__ import annotations

from pathlib import Path

import pytest
from submit_shell import Shell


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
