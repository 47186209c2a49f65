"""The fault matrix on the real Slurm, second part: Slurm takes nodes away, loses them, is cancelled, or does not answer."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest
from cluster_rig import FIRST_USER, Rig, give_to
from fault_rig import EVERY, LARGE, SMALL, Drill, Quiet, new_drill


@pytest.fixture
def run(cluster: Rig, request: pytest.FixtureRequest) -> Drill:
    return new_drill(cluster, request.node.name)


@pytest.fixture
def quiet(cluster: Rig) -> Quiet:
    return Quiet(cluster)


# ---- preempted, out of time, cancelled -------------------------------------------------------------------------------


def preempt(run: Drill) -> None:
    """A job in the partition `high` takes both nodes for a moment."""
    run.rig.sbatch("--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap", "sleep 1")


def test_preempted_with_grace(run: Drill, quiet: Quiet) -> None:
    run.submit(*LARGE, "--partition", "low")
    run.reaches(16)
    preempt(run)
    run.until(lambda: run.events("decided"))
    run.hurry()
    run.check(quiet(*LARGE), lost=[0], cause="preemption")
    assert run.decisions() == ["requeue"] and run.rig.job(run.job_id)["Restarts"] == "1"


def test_preempted_twice(run: Drill, quiet: Quiet) -> None:
    run.submit(*SMALL, "--partition", "low")
    for attempt in (1, 2):
        run.reaches(10 + 5 * attempt, starts=attempt)
        preempt(run)
        run.until(lambda attempt=attempt: len(run.events("decided")) == attempt)
    run.hurry()
    run.check(quiet(), lost=[0, 0], cause="preemption")
    assert run.decisions() == ["requeue", "requeue"] and run.rig.job(run.job_id)["Restarts"] == "2"


@pytest.fixture
def no_grace(cluster: Rig) -> Iterator[None]:
    """The partition `low` gives no time before a preemption."""
    before = cluster.slurm("scontrol", "show", "partition", "low").partition(" GraceTime=")[2].split()[0]
    cluster.slurm("scontrol", "update", "PartitionName=low", "GraceTime=0")
    yield
    cluster.slurm("scontrol", "update", "PartitionName=low", f"GraceTime={before}")


def test_preempted_without_grace(run: Drill, quiet: Quiet, no_grace: None) -> None:
    run.submit(*SMALL, "--partition", "low")
    run.reaches(16, saved=14)
    preempt(run)
    run.until(lambda: run.rig.job(run.job_id)["Restarts"] == "1")
    run.hurry()
    run.check(quiet(), lost=[EVERY], cause="requeued|preemption|SIGTERM")


def test_the_time_limit(run: Drill, quiet: Quiet) -> None:
    run.submit(*SMALL, "--time", "1", "slurm.signal_lead_s=10", "launch.grace_s=5", "step_s=2.5")
    run.until(lambda: run.events("decided"))
    run.hurry()
    run.check(quiet(), lost=[0], cause="time limit|TIME|USR2")
    assert run.decisions() == ["requeue"] and run.rig.job(run.job_id)["Restarts"] == "1"


@pytest.mark.parametrize("phase", ["step", "save"])
def test_scancel_stays_cancelled_and_the_run_can_go_on(run: Drill, quiet: Quiet, phase: str) -> None:
    run.submit(*SMALL, f"save_s={0.3 if phase == 'save' else 0}")
    if phase == "step":
        run.reaches(16, saved=14)
    else:
        run.does("save")
    run.rig.slurm("scancel", run.job_id)
    assert run.ends() == "CANCELLED", run.report()
    run.check_gone()
    assert not run.events("requeued") and run.rig.job(run.job_id)["Restarts"] == "0"
    assert run.rig.state(run.job_id) == "CANCELLED"
    run.hurry()
    run.submit(*SMALL)
    run.check(quiet(), lost=[0 if phase == "step" else EVERY], cause="cancel")


# ---- nodes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["kill", "cut"])
def test_a_node_is_lost(run: Drill, quiet: Quiet, how: str) -> None:
    run.submit(*SMALL)
    run.reaches(16, saved=14)
    lost = run.rig.node_names[1]
    try:
        run.rig.devcluster(how, lost)
        run.until(lambda: run.rig.job(run.job_id)["Restarts"] == "1")
        run.hurry()
    finally:
        run.rig.devcluster("heal", lost)
        takes_jobs(run.rig)
    run.check(quiet(), lost=[EVERY], cause=lost)


def takes_jobs(rig: Rig, limit_s: float = 120) -> None:
    """Wait until every node takes a job of the kind that tests send, so that the next test finds a whole cluster."""
    deadline = time.monotonic() + limit_s
    argv = ["srun", "--nodes=2", "--gpus-per-node=4", "true"]
    while (done := rig.run(argv, timeout=limit_s)).returncode != 0:
        assert time.monotonic() < deadline, done.stderr
        time.sleep(0.5)


# ---- Slurm itself ----------------------------------------------------------------------------------------------------


def test_slurmctld_is_restarted_in_the_middle(run: Drill, quiet: Quiet) -> None:
    expected = quiet()
    run.submit(*SMALL)
    start = run.reaches(12)
    pid = run.rig.daemon("slurmctld")
    try:
        os.kill(pid, signal.SIGTERM)
        while os.path.exists(f"/proc/{pid}"):
            time.sleep(0.1)
        before = max(start.steps())
        deadline = time.monotonic() + 60
        while run.starts()[0].last_step() < before + 5:  # training does not notice
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        run.rig.devcluster("up")
    run.hurry()
    run.check(expected, lost=[], cause="")
    assert run.decisions() == [] and run.rig.job(run.job_id)["Restarts"] == "0"
    takes_jobs(run.rig)


SCONTROL = """\
#!/bin/sh
case "$1" in requeue) echo asked >> '{folder}/asked'; {instead} ;; esac
exec /usr/bin/env -i PATH='{path}' SLURM_CONF="$SLURM_CONF" scontrol "$@"
"""


@pytest.fixture
def bent(run: Drill) -> Callable[[str], str]:
    """Bends scontrol requeue, before the run is submitted; returns the set-up line."""

    def bend(instead: str) -> str:
        folder = run.folder / "bin"
        folder.mkdir()
        system = subprocess.check_output(["sh", "-c", "dirname $(command -v scontrol)"], text=True).strip()
        (folder / "scontrol").write_text(
            SCONTROL.format(folder=folder, instead=instead, path=f"{system}:/usr/bin:/bin")
        )
        (folder / "scontrol").chmod(0o755)
        give_to(folder, FIRST_USER)
        return f"slurm.setup=['export PATH=\"{folder}\":$PATH']"

    return bend


def test_a_requeue_that_fails_is_told_with_the_command(run: Drill, quiet: Quiet, bent: Callable[[str], str]) -> None:
    run.submit(*SMALL, bent("echo 'slurm_update error: no' >&2; exit 1"))
    run.reaches(16)
    run.notify("USR2")
    assert run.ends() == "FAILED", run.report()
    assert run.rig.job(run.job_id)["ExitCode"] == "75:0" and f"type: scontrol requeue {run.job_id}" in run.text
    assert (run.folder / "bin" / "asked").read_text().count("asked") == 3
    run.hurry()
    run.rig.run(["scontrol", "requeue", run.job_id], check=True)
    run.until(lambda: len(run.starts()) == 2)
    run.check(quiet(), lost=[0], cause="saved and left")


def test_a_requeue_that_hangs_is_tried_again(run: Drill, quiet: Quiet, bent: Callable[[str], str]) -> None:
    run.submit(*SMALL, bent("[ -e '{0}' ] || {{ touch '{0}'; exec sleep 600; }}".format(run.folder / "hung")))
    run.reaches(16)
    run.notify("USR2")
    run.until(lambda: run.events("requeued"))
    run.hurry()
    run.check(quiet(), lost=[0], cause="saved and left")
    assert "no answer" in run.text


# ---- ports -----------------------------------------------------------------------------------------------------------

STRANGER = """\
import resource, socket, time
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
held = []
for port in range(10000, 32768):
    if port % 3:
        server = socket.socket()
        try:
            server.bind(("0.0.0.0", port))
        except OSError:
            continue
        held.append(server)
print("held", flush=True)
time.sleep(600)
"""


def test_most_ports_are_taken_by_a_stranger(run: Drill, quiet: Quiet) -> None:
    node = run.rig.site.nodes(run.rig.shape)[0]
    argv = ["nsenter", f"--net={node.namespace_path}", "python3", "-c", STRANGER]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as stranger:
        try:
            assert stranger.stdout is not None and stranger.stdout.readline() == "held\n"
            run.submit(*SMALL, "step_s=0")
            run.check(quiet(), lost=[], cause="")
            (start,) = run.starts()
            assert int(start.name.split("-")[1]) % 3 == 0  # a port that was free
        finally:
            stranger.kill()
