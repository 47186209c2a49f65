"""The controller after an attempt: restarts inside the allocation, the requeue, and what it says; Slurm is a stand-in."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from steps import ROOT
from test_controller import STUBS, batch_environ

from hpc.allocation import requeue as requeueing
from hpc.allocation.allocation import Allocation, read
from hpc.errors import SlurmCommandError
from hpc.slurm.states import JobState

RUNNING = "JobId=7 JobName=x\n   JobState=RUNNING Reason=None Requeue=1 Restarts=0 BatchFlag=1\n   PreemptTime=None\n"
ONE = {
    "SLURM_NNODES": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_CPUS_PER_NODE": "4", "SLURM_JOB_NODELIST": "n1",
    "SLURM_GPUS_PER_NODE": "1", "SLURM_GPUS_ON_NODE": "1", "FAKE_SLURM_GPUS": "1", "SLURM_NTASKS": "1",
    "SLURM_TASKS_PER_NODE": "1", "FAKE_SCONTROL_SHOW_STDOUT": RUNNING,
}  # fmt: skip


class Controller:
    """One running controller (or batch script) in a folder."""

    def __init__(self, folder: Path, *arguments: str, argv: list[str] | None = None, **changes: str) -> None:
        self.folder = folder
        self.out, self.err = folder / "out.txt", folder / "err.txt"
        with open(self.out, "a") as out, open(self.err, "a") as err:
            self.process = subprocess.Popen(
                [*(argv or [sys.executable, "-m", "hpc.launch"]), *arguments],
                env=batch_environ(folder, **{**ONE, **changes}), cwd=folder, stdout=out, stderr=err,
            )  # fmt: skip

    def ends(self, limit_s: float = 60) -> int:
        """Wait for the end; as Slurm does, SIGTERM follows a requeue that was granted."""
        deadline, told = time.monotonic() + limit_s, False
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.text
            if not told and "is back in the queue" in self.out.read_text():
                told = True
                self.process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
        return self.process.returncode

    @property
    def text(self) -> str:
        return self.out.read_text() + self.err.read_text()

    def record(self) -> list[dict[str, Any]]:
        return [
            json.loads(line) for file in self.folder.rglob("record.jsonl") for line in file.read_text().splitlines()
        ]

    def decisions(self) -> list[str]:
        return [event["decision"] for event in self.record() if event["event"] == "decided"]

    def requeues(self) -> list[list[str]]:
        calls = map(json.loads, (self.folder / "calls.jsonl").read_text().splitlines())
        return [call["argv"] for call in calls if call["program"] == "scontrol" and call["argv"][0] == "requeue"]

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + 40
        while text not in self.text:
            assert time.monotonic() < deadline and self.process.poll() is None, self.text
            time.sleep(0.1)


SAVE = ("--", "sh", "-c", "exit 75")


@pytest.mark.slow
def test_q09_q11_saved_is_requeued_once_with_one_line(tmp_path: Path) -> None:
    job = Controller(tmp_path, *SAVE)
    assert job.ends() == 75
    assert job.requeues() == [["requeue", "7"]]
    lines = [line for line in job.text.splitlines() if line.startswith("hpc.launch")]
    assert len(lines) == 2 and "saved and left; job 7 is back in the queue" in lines[1]
    assert "fail" not in job.text and job.decisions() == ["requeue"]
    assert [event["event"] for event in job.record()] == ["started", "ended", "decided", "verdict", "requeued"]


@pytest.mark.slow
def test_q01_array_elements_come_back_by_their_own_name(tmp_path: Path) -> None:
    job = Controller(
        tmp_path, *SAVE, SLURM_ARRAY_JOB_ID="1234", SLURM_ARRAY_TASK_ID="2", SLURM_JOB_ID="1235"
    )  # fmt: skip
    assert job.ends() == 75 and job.requeues() == [["requeue", "1234_2"]]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_q02_q06_a_notice_to_the_batch_script_alone_reaches_the_program(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "train.py").write_text(
        "import signal, sys, time\n"
        "for n in (signal.SIGTERM, signal.SIGUSR2): signal.signal(n, lambda n, f: sys.exit(75))\n"
        "print('ready', flush=True)\ntime.sleep(60)\n"
    )
    job = Controller(
        tmp_path, "--", "train.py", argv=["/bin/bash", f"{ROOT}/sbin/ddp.sbatch"], HPC_PYTHON=sys.executable
    )  # fmt: skip
    job.wait_for("ready")
    job.process.send_signal(number)
    assert job.ends() == 75
    assert job.requeues() == [["requeue", "7"]]
    assert job.text.count(f"saved and left after {number.name}; job 7 is back in the queue") == 1


@pytest.mark.slow
def test_q08_a_command_that_knows_no_notice_is_requeued_at_the_limit(tmp_path: Path) -> None:
    job = Controller(tmp_path, "--", "sh", "-c", "echo re''ady; exec sleep 60")
    job.wait_for("ready")
    job.process.send_signal(signal.SIGUSR2)  # the warning: nobody in there knows what it means, so it goes on
    time.sleep(1.0)
    assert job.process.poll() is None
    job.process.send_signal(signal.SIGTERM)  # the limit
    assert job.ends() == 75 and len(job.requeues()) == 1
    assert "ended by SIGUSR2 without a save of its own; job 7 is back in the queue" in job.text


@pytest.mark.slow
def test_q08_a_command_that_ignores_the_warning_is_ended_and_requeued_before_the_limit(tmp_path: Path) -> None:
    ends = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 22))
    show = f"{RUNNING}   StartTime=2026-01-01T00:00:00 EndTime={ends} Deadline=N/A\n"
    deaf = "trap '' TERM USR2; echo ends at $HPC_END_TIME, restart $HPC_RESTART; while true; do sleep 1; done"
    job = Controller(tmp_path, "launch.grace_s=1", "--", "sh", "-c", deaf, FAKE_SCONTROL_SHOW_STDOUT=show)
    assert job.ends() == 75, job.text
    assert "s are left of the time limit: SIGTERM to the step" in job.text and len(job.requeues()) == 1
    assert "ended by the time limit without a save of its own; job 7 is back in the queue" in job.text
    told = int(time.mktime(time.strptime(ends, "%Y-%m-%dT%H:%M:%S")))
    assert f"ends at {told}, restart 0" in job.text and time.time() < told


@pytest.mark.slow
def test_r1_what_is_deaf_is_ended_before_slurm_kills_all(tmp_path: Path) -> None:
    """After a scancel there is KillWait, whatever launch.grace_s says: agents and controller are through before."""
    show = RUNNING.replace("JobState=RUNNING", "JobState=CANCELLED") + "KillWait                = 6 sec\n"
    deaf = "trap '' TERM; echo re''ady; while true; do sleep 1; done"
    environ = {"FAKE_SCONTROL_SHOW_STDOUT": show, "SLURMD_NODENAME": "n1"}
    job = Controller(tmp_path, "launch.grace_s=90", "--", "sh", "-c", deaf, **environ)
    job.wait_for("ready")
    agents = [p for p in psutil.Process(job.process.pid).children(recursive=True) if "hpc.node" in p.cmdline()]
    job.process.send_signal(signal.SIGTERM)
    agents[-1].send_signal(signal.SIGTERM)
    assert job.ends(60) == 137, job.text
    assert not job.requeues() and job.record()[-1]["event"] == "verdict"


@pytest.mark.slow
def test_a_job_that_slurm_ends_for_its_time_limit_is_taken_back(tmp_path: Path) -> None:
    show = RUNNING.replace("RUNNING Reason=None", "COMPLETING Reason=TimeLimit")
    job = Controller(tmp_path, *SAVE, FAKE_SCONTROL_SHOW_STDOUT=show)
    assert job.ends() == 75 and job.requeues() == [["requeue", "7"]]
    assert "saved and left after the time limit; job 7 is back in the queue" in job.text
    (fixed := tmp_path / "fixed").mkdir()
    job = Controller(fixed, *SAVE, FAKE_SCONTROL_SHOW_STDOUT=show.replace("Requeue=1", "Requeue=0"))
    assert job.ends() == 75 and "job 7 may not be requeued, go on with: python -m hpc.submit" in job.text


@pytest.mark.slow
def test_a_signal_to_the_step_before_any_rank_is_a_notice(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import pathlib, time\npathlib.Path('importing').touch()\ntime.sleep(300)\n")
    (tmp_path / "train.py").write_text("")
    path = f"{ROOT}:{tmp_path}"
    job = Controller(tmp_path, "launch.preload=[slow]", "--", "train.py", PYTHONPATH=path)
    while not (tmp_path / "importing").exists():
        assert job.process.poll() is None, job.text
        time.sleep(0.05)
    agents = [p for p in psutil.Process(job.process.pid).children(recursive=True) if "hpc.node" in p.cmdline()]
    agents[-1].send_signal(signal.SIGTERM)
    assert job.ends() == 75 and job.decisions() == ["requeue"] and len(job.requeues()) == 1, job.text
    assert "SIGTERM came before any worker was started" in job.text


@pytest.mark.slow
@pytest.mark.parametrize("state", ["CANCELLED", "COMPLETING"])
def test_a_cancelled_job_is_left_alone(tmp_path: Path, state: str) -> None:
    job = Controller(tmp_path, *SAVE, FAKE_SCONTROL_SHOW_STDOUT=RUNNING.replace("RUNNING", state))
    assert job.ends() == 75 and not job.requeues()
    assert job.decisions() == ["fail"] and "asks for no other one" in job.text


@pytest.mark.slow
def test_q15_a_job_that_slurm_has_requeued_or_begun_anew_is_not_touched(tmp_path: Path) -> None:
    for number, show in enumerate((RUNNING.replace("RUNNING", "PENDING"), RUNNING.replace("Restarts=0", "Restarts=1"))):
        (folder := tmp_path / str(number)).mkdir()
        job = Controller(folder, *SAVE, FAKE_SCONTROL_SHOW_STDOUT=show)
        assert job.ends() == 75 and not job.requeues()


@pytest.mark.slow
def test_a_refused_requeue_is_tried_again_then_told(tmp_path: Path) -> None:
    answers = tmp_path / "answers"
    answers.mkdir()
    (answers / "scontrol_requeue.exit").write_text("1")
    (answers / "scontrol_requeue.err").write_text("slurm_requeue error: Socket timed out")
    job = Controller(tmp_path, *SAVE, FAKE_SLURM_ANSWERS=str(answers))
    assert job.ends() == 75 and len(job.requeues()) == 3
    assert job.text.splitlines()[-1].endswith("it could not be requeued, type: scontrol requeue 7")
    (answers / "scontrol_requeue.4.exit").write_text("1")
    (answers / "scontrol_requeue.exit").write_text("0")
    job.out.write_text("")
    assert Controller(tmp_path, *SAVE, FAKE_SLURM_ANSWERS=str(answers)).ends() == 75
    assert len(job.requeues()) == 5 and "trying again in 1 s" in job.text


@pytest.mark.slow
def test_a_requeue_that_hangs_is_tried_again_then_told(tmp_path: Path) -> None:
    job = Controller(tmp_path, *SAVE, FAKE_SCONTROL_REQUEUE_SLEEP="300")
    assert job.ends(100) == 75 and len(job.requeues()) == 3
    assert "scontrol gave no answer within 10 s" in job.text
    assert job.text.splitlines()[-1].endswith("it could not be requeued, type: scontrol requeue 7")


@pytest.mark.slow
def test_a_requeue_whose_answer_was_killed_with_the_job_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm has heard it and ends the batch step, the scontrol in it too: the signal is no reason to wait for a next try."""
    told: list[str] = []

    def heard(job_id: str, *, timeout_s: float) -> None:
        told.append("requeue")
        raise SlurmCommandError(f"scontrol requeue {job_id}: exit code -15")

    def facts(allocation: Allocation) -> requeueing.JobFacts:
        return requeueing.JobFacts(state=JobState.COMPLETING if told else JobState.RUNNING, restarts=0)

    monkeypatch.setattr(requeueing, "TRY_PAUSES_S", (60.0,))
    monkeypatch.setattr(requeueing, "job_facts", facts)
    monkeypatch.setattr(requeueing.commands, "requeue", heard)
    begun = time.monotonic()
    outcome = requeueing.requeue(read(batch_environ(tmp_path, **ONE)), say=told.append, signals=lambda: len(told))
    assert outcome is requeueing.Requeued.QUEUED and time.monotonic() - begun < 30
    assert told == ["requeue", "scontrol requeue 7: exit code -15; trying again in 60 s"]


def test_a_node_that_was_lost_is_left_out_of_the_next_attempt(tmp_path: Path) -> None:
    two = {"SLURM_NNODES": "2", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_CPUS_PER_NODE": "4(x2)", "SLURM_NTASKS": "2",
           "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "1(x2)"}  # fmt: skip
    answers = tmp_path / "answers"
    answers.mkdir()
    (answers / "sinfo.1").write_text("n1|allocated\nn2|down*\n")
    (answers / "sinfo.2").write_text("n1|allocated|gpu:2(S:0)|x|8|100\nn2|down*|gpu:2|x|8|100\nn3|idle|gpu:2|x|8|100\n")
    show = RUNNING.replace("Requeue=1", "Requeue=1 Partition=low ExcNodeList=(null) ReqNodeList=(null)")
    environ = {**two, "FAKE_SLURM_ANSWERS": str(answers), "FAKE_SCONTROL_SHOW_STDOUT": show}
    script = ("launch.allow_loopback=true", "--", "sh", "-c", "echo re''ady; sleep 60")
    job = Controller(tmp_path, *script, **environ)
    job.wait_for("[rank 1] ready")
    for process in psutil.Process(job.process.pid).children(recursive=True):
        if "hpc.node" in process.cmdline() and process.environ().get("SLURM_NODEID") == "1":
            process.kill()
            break
    assert job.ends() == 75, job.text
    calls = map(json.loads, (tmp_path / "calls.jsonl").read_text().splitlines())
    assert ["update", "JobId=7", "ExcNodeList=n2"] in [call["argv"] for call in calls]
    assert "lost n2; job 7 is back in the queue, without n2" in job.text
    assert [event["exclude"] for event in job.record() if event["event"] == "requeued"] == [["n2"]]
    job.out.write_text("")
    again = Controller(tmp_path, *script[:4], "true", **{**environ, "SLURM_RESTART_COUNT": "1"})
    again.ends()
    assert "attempt 1 runs on n2 again, lost in attempt 0" in again.text


@pytest.mark.slow
def test_x14_a_node_that_is_not_fit_is_left_out_and_remembered_and_attempts_are_limited(tmp_path: Path) -> None:
    host = socket.gethostname()
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0000:07:00.0: Unknown Error'\nexit 15\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    answers = tmp_path / "answers"
    answers.mkdir()
    (answers / "sinfo").write_text(f"{host}|allocated|gpu:1|x|8|100\nn8|idle|gpu:1|x|8|100\nn9|idle|gpu:1|x|8|100\n")
    environ = {"SLURM_JOB_NODELIST": host, "FAKE_SLURM_ANSWERS": str(answers)}
    environ["PATH"] = f"{tmp_path}:{STUBS}:{os.environ['PATH']}"
    for attempt in range(3):  # Slurm gives it the same node again and again
        show = RUNNING.replace("Requeue=1", "Requeue=1 Partition=low ExcNodeList=(null) ReqNodeList=(null)")
        show = show.replace("Restarts=0", f"Restarts={attempt}")
        job = Controller(
            tmp_path, "--", "true", SLURM_RESTART_COUNT=str(attempt), FAKE_SCONTROL_SHOW_STDOUT=show, **environ
        )  # fmt: skip
        assert job.ends() == (75 if attempt < 2 else 69), job.text
        job.out.write_text("")
    assert f"node {host} is unhealthy: nvidia-smi -L ended with 15" in job.text and "made no step" in job.text
    assert job.decisions() == ["requeue", "requeue", "fail"]
    calls = [json.loads(line)["argv"] for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    assert calls.count(["update", "JobId=7", f"ExcNodeList={host}"]) == 2
    lines = (tmp_path / "state" / "hpc" / "failed-nodes.jsonl").read_text().splitlines()
    assert [(one["node"], one["why"], one["job_id"]) for one in map(json.loads, lines)] == [(host, "not fit", "7")] * 3


@pytest.mark.slow
def test_where_the_job_may_not_be_requeued_the_command_is_told(tmp_path: Path) -> None:
    job = Controller(tmp_path, *SAVE, FAKE_SCONTROL_SHOW_STDOUT=RUNNING.replace("Requeue=1", "Requeue=0"))
    assert job.ends() == 75 and not job.requeues()
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert f"python -m hpc.submit --config {run_dir}/config.yaml run_dir={run_dir}" in job.text


@pytest.mark.slow
@pytest.mark.parametrize(("allowed", "goes_on"), [("null", True), ("false", False)])
def test_where_the_site_forbids_a_requeue_a_new_job_goes_on(tmp_path: Path, allowed: str, goes_on: bool) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o700)
    (run_dir / "config.yaml").write_text(f"command: [sh, -c, exit 75]\nlaunch: {{resubmit: {allowed}}}\n")
    (run_dir / "job.sh").write_text("#!/bin/sh\n")
    (run_dir / "record.jsonl").write_text('{"event": "submitted", "job_id": "7"}\n')
    for number in range(2):  # the same attempt again, as by a second controller
        job = Controller(
            tmp_path, "--run-dir", str(run_dir), FAKE_SCONTROL_SHOW_STDOUT=RUNNING.replace("Requeue=1", "Requeue=0")
        )  # fmt: skip
        assert job.ends() == 75 and not job.requeues(), job.text
        calls = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
        sent = [call["argv"] for call in calls if call["program"] == "sbatch"]
        assert sent == ([["--dependency=afterany:7", f"{run_dir}/job-after-0.sh"]] if goes_on else [])
        assert ("job 7 may not be requeued, so it goes on as job 101" in job.text) is goes_on
        assert (f"go on with: python -m hpc.submit --continue {run_dir}" in job.text) is (number > 0 or not goes_on)


@pytest.mark.slow
def test_a_local_run_that_has_saved_says_how_to_go_on(tmp_path: Path) -> None:
    job = Controller(tmp_path, "--local", "--", "sh", "-c", "if [ -e seen ]; then exit 0; fi; touch seen; exit 75")
    assert job.ends() == 75, job.text
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert f"go on with: python -m hpc.launch --local --run-dir {run_dir}" in job.text
    assert Controller(tmp_path, "--local", "--run-dir", str(run_dir)).ends() == 0


KILLED_ONCE = """echo $PPID $HPC_RESTART ${HPC_STANDBY:-none} ${HPC_SECRET:-none} $(cat) >> told
[ -e seen ] || { touch seen; kill -9 $$; }"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "node", "agents"),
    [(["--local"], {}, 1), ([], {"SLURMD_NODENAME": "n1"}, 1), ([], {}, 2)],
    ids=["local", "in a batch step", "in salloc's shell, where no agent can tell the controller that it stands by"],
)
def test_a_killed_worker_is_started_again_by_the_same_agent(
    tmp_path: Path, where: list[str], node: dict[str, str], agents: int
) -> None:
    job = Controller(tmp_path, *where, "--", "sh", "-c", KILLED_ONCE, **node)
    assert job.ends() == 0, job.text
    assert job.decisions() == ["again"] and "killed by SIGKILL, restart 1 of 3, in 2 s" in job.text
    assert not (tmp_path / "calls.jsonl").exists() or not job.requeues()
    assert [event["event"] for event in job.record()] == ["started", "ended", "decided", "verdict", "started", "ended"]
    told = [line.split(maxsplit=1) for line in (tmp_path / "told").read_text().splitlines()]
    assert [words for _, words in told] == ["0 none none", "1 none none"]  # and nothing on standard input
    assert len({agent for agent, _ in told}) == agents
    assert not any(psutil.pid_exists(int(agent)) for agent, _ in told)


@pytest.mark.slow
def test_an_agent_that_dies_while_it_stands_by_is_replaced(tmp_path: Path) -> None:
    job = Controller(tmp_path, "--local", "--", "sh", "-c", KILLED_ONCE)
    job.wait_for("restart 1 of 3, in 2 s")
    os.kill(int((tmp_path / "told").read_text().split()[0]), signal.SIGKILL)
    assert job.ends() == 0 and job.decisions() == ["again"], job.text
    first, second = (line.split() for line in (tmp_path / "told").read_text().splitlines())
    assert first[0] != second[0] and second[1] == "1"


FILL = """[ -e {0}/full ] || dd if=/dev/zero of={0}/full bs=4k 2>/dev/null; echo again >> ran; exit 3"""


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="needs root: a small file system of its own")
def test_a_failure_on_a_full_disk_is_told_as_what_it_is(tmp_path: Path) -> None:
    """Neither the record nor the outcome can be written; it was taken for a lost step, and started again in vain."""
    (small := tmp_path / "small").mkdir()
    mounted = f'mount -t tmpfs -o size=256k,mode=700 none {small} && exec "$@"'
    argv = ["unshare", "--mount", "sh", "-c", mounted, "sh", sys.executable, "-m", "hpc.launch", "--local"]
    argv += [f"run_root={small}/runs", "--", "sh", "-c", FILL.format(small)]
    done = subprocess.run(argv, cwd=tmp_path, env=batch_environ(tmp_path), capture_output=True, text=True, timeout=120)
    assert done.returncode == 3 and "verdict: exited 3" in done.stderr, done.stderr
    assert (tmp_path / "ran").read_text() == "again\n" and "could not be written" in done.stderr


@pytest.mark.slow
def test_a_notice_in_the_pause_before_a_restart_is_heard(tmp_path: Path) -> None:
    job = Controller(tmp_path, "--", "sh", "-c", "echo $PPID > agent; kill -9 $$", SLURMD_NODENAME="n1")
    job.wait_for("restart 1 of 3, in 2 s")
    agent = int((tmp_path / "agent").read_text())
    assert psutil.pid_exists(agent)  # it stands by
    job.process.send_signal(signal.SIGTERM)
    assert job.ends() == 75 and job.decisions() == ["again", "requeue"]
    assert not psutil.pid_exists(agent)


@pytest.mark.slow
def test_q18_an_exception_fails_at_once_and_is_retried_when_asked(tmp_path: Path) -> None:
    job = Controller(tmp_path, "--", "sh", "-c", "exit 3")
    assert job.ends() == 3 and job.decisions() == ["fail"] and not job.requeues()
    (folder := tmp_path / "asked").mkdir()
    job = Controller(folder, "launch.retry_failures=1", "--", "sh", "-c", "exit 3")
    assert job.ends() == 3 and job.decisions() == ["again", "fail"] and not job.requeues()


@pytest.mark.slow
def test_attempts_without_a_step_end_the_run(tmp_path: Path) -> None:
    for attempt in range(3):
        show = RUNNING.replace("Restarts=0", f"Restarts={attempt}")
        job = Controller(tmp_path, *SAVE, SLURM_RESTART_COUNT=str(attempt), FAKE_SCONTROL_SHOW_STDOUT=show)
        job.out.write_text("")
        assert job.ends() == (75 if attempt < 2 else 1)
    assert "3 attempts in a row made no step" in job.text
    assert job.decisions() == ["requeue", "requeue", "fail"]


@pytest.mark.slow
def test_q17_a_later_attempt_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    job = Controller(tmp_path, "jobs.digits", "train.max_steps=1", SLURM_RESTART_COUNT="1")
    assert job.ends(120) == 0, job.text
    folder = next((tmp_path / "runs").iterdir()) / "checkpoints"
    assert f"warning: attempt 1, no checkpoint in {folder}, starting at step 0" in job.text
    Controller(tmp_path, "jobs.digits", "train.max_steps=1", SLURM_RESTART_COUNT="2").ends(120)
    assert job.text.count("no checkpoint in") == 1
