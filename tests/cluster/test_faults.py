"""The fault matrix on the real Slurm, first part: what happens to the processes of a training run, and notices in every phase."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator

import psutil
import pytest
from cluster_rig import Rig
from fault_rig import EVERY, LARGE, SMALL, TOTAL, Drill, Quiet, kill, new_drill


@pytest.fixture
def run(cluster: Rig, request: pytest.FixtureRequest) -> Drill:
    return new_drill(cluster, request.node.name)


@pytest.fixture
def quiet(cluster: Rig) -> Quiet:
    return Quiet(cluster)


# ---- killed ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["rank 3", "rank 0", "agent"])
def test_kill_9_starts_again_inside_the_allocation(run: Drill, quiet: Quiet, who: str) -> None:
    run.submit(*SMALL)
    start = run.reaches(16, saved=14)
    step = [run.process("-m hpc.node", node=node).pid for node in (0, 1)]  # srun, and the agent of the other node
    kill(step[1] if who == "agent" else start.pids[int(who.split()[1])])
    run.until(lambda: len(run.starts()) == 2)
    if who != "agent":  # the step goes on: its agents have only forked anew
        assert [run.process("-m hpc.node", node=node).pid for node in (0, 1)] == step
    run.hurry()
    run.check(quiet(), lost=[EVERY], cause="killed|lost")
    assert run.decisions() == ["again"] and run.rig.job(run.job_id)["Restarts"] == "0"


def test_kill_9_of_the_controller_starts_again_inside_the_allocation(run: Drill, quiet: Quiet) -> None:
    run.submit(*SMALL)
    run.reaches(16, saved=14)
    warden = psutil.Process(run.process("-m hpc.launch").pid)  # the batch script itself
    (controller,) = [process for process in warden.children() if "hpc.launch" in process.cmdline()]
    kill(controller.pid)
    run.until(lambda: run.events("decided"))
    run.hurry()
    run.check(quiet(), lost=[EVERY], cause="the controller was killed by SIGKILL")
    assert run.decisions() == ["again"] and run.rig.job(run.job_id)["Restarts"] == "0"


@pytest.fixture
def kill_wait(cluster: Rig) -> Iterator[None]:
    """KillWait as most clusters have it: on a busy machine the dev cluster's 5 s are few for a save and a decision."""
    before = cluster.slurm_conf.read_text()
    cluster.slurm_conf.write_text(re.sub("KillWait=[0-9]+", "KillWait=30", before))
    cluster.slurm("scontrol", "reconfigure")
    yield
    cluster.slurm_conf.write_text(before)
    cluster.slurm("scontrol", "reconfigure")


@pytest.mark.parametrize("who", ["batch script", "all of the batch step"])
def test_kill_9_of_the_batch_script_goes_back_into_the_queue(
    run: Drill, quiet: Quiet, kill_wait: None, who: str
) -> None:
    run.submit(*SMALL)
    run.reaches(16, saved=14)
    warden = psutil.Process(run.process("-m hpc.launch").pid)
    others = warden.children() if who != "batch script" else []
    for process in (warden, *others):
        kill(process.pid)
    # Slurm says FAILED for a moment, between the end of the step and the requeue
    run.until(lambda: run.rig.job(run.job_id)["Restarts"] == "1", may_end=True)
    run.hurry()
    run.check(quiet(), lost=[EVERY], cause="the death of its batch script")
    assert run.decisions() == ["requeue"] and run.rig.job(run.job_id)["Restarts"] == "1"


def test_a_stopped_worker_is_ended_and_starts_again(run: Drill, quiet: Quiet) -> None:
    run.submit(*SMALL)
    start = run.reaches(16, saved=14)
    os.kill(start.pids[2], signal.SIGSTOP)
    run.until(lambda: run.events("decided"))
    run.hurry()
    run.check(quiet(), lost=[EVERY], cause="rank 2 on .* stopped")
    assert run.decisions() == ["again"] and run.rig.job(run.job_id)["Restarts"] == "0"


def test_kill_9_of_a_loader_worker(run: Drill, quiet: Quiet) -> None:
    run.submit(*SMALL, "train.loader_workers=1")
    start = run.reaches(16, saved=14)
    (child,) = psutil.Process(start.pids[2]).children()
    kill(child.pid)
    run.until(lambda: run.events("decided"))
    run.hurry()
    run.check(quiet(*SMALL, "train.loader_workers=1"), lost=[EVERY], cause="data-loader process")
    assert run.decisions() == ["again"]


@pytest.mark.parametrize(("trouble", "words"), [("raise", "bad batch 17"), ("memory", "memory")])
def test_an_exception_fails_at_once_and_keeps_the_run(run: Drill, quiet: Quiet, trouble: str, words: str) -> None:
    run.submit(*SMALL, f"trouble={trouble}", "trouble_step=16", "trouble_rank=1")
    assert run.ends() == "FAILED", run.report()
    assert run.decisions() == ["fail"] and words in run.text.splitlines()[-1] and "rank 1 on" in run.text
    run.check_gone()
    run.hurry()
    run.submit(*SMALL, f"trouble={trouble}", "trouble_step=16", "trouble_rank=1")
    run.check(quiet(), lost=[EVERY], cause="exited 1")


# ---- notices ---------------------------------------------------------------------------------------------------------


def test_two_notices_are_one(run: Drill, quiet: Quiet) -> None:
    run.submit(*LARGE)
    start = run.reaches(16)
    os.kill(start.pids[6], signal.SIGUSR2)  # one rank alone hears the first
    run.notify("TERM")
    run.until(lambda: run.events("decided"))
    run.hurry()
    run.check(quiet(*LARGE), lost=[0], cause="saved and left")
    assert run.decisions() == ["requeue"] and len(run.events("requeued")) == 1


PHASES = {
    "begin": ("begin_s=4", {}),
    "data": ("data_s=4", {}),
    "evaluate": ("evaluate_s=0.7", {"step": 20}),
    "save": ("save_s=0.4", {}),
}


@pytest.mark.parametrize("phase", PHASES)
def test_a_notice_in_any_phase(run: Drill, quiet: Quiet, phase: str) -> None:
    slowness, facts = PHASES[phase]
    run.submit(*SMALL, slowness)
    run.does(phase, **facts)
    run.notify("USR2")
    run.until(lambda: run.events("decided"))
    run.hurry()
    run.check(quiet(), lost=[0], cause="USR2|signal")
    assert run.decisions() == ["requeue"]


def test_a_notice_in_the_last_step_comes_too_late(run: Drill, quiet: Quiet) -> None:
    run.submit(*SMALL, "step_s=0", "last_s=4")
    run.reaches(TOTAL)
    run.notify("USR2")
    run.check(quiet(), lost=[], cause="")
    assert run.decisions() == [] and run.rig.job(run.job_id)["Restarts"] == "0"
