"""What jobs leave on the nodes of a real Slurm, after many kinds of end, and what hpc.clean and the epilog end of it."""

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import leftover_rig
import pytest
from cluster_rig import FIRST_USER, ROOT, SECOND_USER, Rig
from leftover_rig import Leaver

EPILOG = ROOT / "sbin" / "epilog.d" / "leftovers.sh"
ENDS = {end.name: end for end in leftover_rig.ends()}


def test_r1_c02_c05_nothing_is_left_by_a_killed_controller_nor_by_what_ignores_sigterm(cluster: Rig) -> None:
    """Two jobs side by side, so that each sees the other's processes as those of a live job.

    With the controller Slurm kills the agents, too, and what has left their trees goes free (proctrack/linuxproc).
    """
    pair = ("controller killed", "scancel where SIGTERM is ignored")
    with ExitStack() as stack:
        jobs = []
        for name in pair:
            job = Leaver(cluster, ENDS[name].kind)
            stack.callback(job.close)
            job.submit()
            jobs.append(job)
        for job in jobs:
            job.ready()
            before = job.look()
            assert len(before.processes) > 20 and before.shared_memory and len(before.ports) == 4, before
        for job, name in zip(jobs, pair, strict=True):
            left = leftover_rig.outcome(job, ENDS[name])
            assert not left, (name, left, cluster.report(job.job))
            if job is jobs[0]:
                assert len(jobs[1].look().processes) > 20, "the other job is untouched"


# ---- the door --------------------------------------------------------------------------------------------------------


class Left:
    """`sleep` processes of jobs that are over, of live ones, and of another user, on the first node.

    Its /tmp is empty and its own meanwhile, as a test of another cluster on this machine may leave something in the shared
    one; where the project itself lies in /tmp, it must be seen and /tmp stays.
    """

    def __init__(self, rig: Rig) -> None:
        self.rig, self.node = rig, rig.node_names[0]
        slurmd = rig.daemon(f"slurmd-{self.node}")
        self.root = Path(f"/proc/{slurmd}/root")
        """The node's file system, seen from here."""
        self.inside = ["nsenter", f"--target={slurmd}", "--mount"]

    def over(self, seconds: int, user: str = FIRST_USER, first: str = "true") -> int:
        """A daemonised process of a job that has ended; `first`: what its batch script did before."""
        wrapped = f"{first}; (setsid sleep {seconds} >/dev/null 2>&1 &) ; sleep 0.2"
        job = self.rig.sbatch(*self._options(), "--wrap", wrapped, cwd=self.rig.home(user), user=user)
        self.rig.wait(job)
        return self.pid(seconds, user)

    def live(self, command: str, seconds: int, first: str = "true") -> int:
        wrapped = f"{first}; exec bash -c 'exec -a {command} sleep {seconds}'"
        job = self.rig.sbatch(*self._options(), "--wrap", wrapped, cwd=self.rig.home())
        self.rig.wait_for_state(job, "RUNNING")
        return self.pid(seconds)

    def _options(self) -> list[str]:
        return [f"--nodelist={self.node}", "--output=/dev/null", "--no-requeue"]

    def pid(self, seconds: int, user: str = FIRST_USER) -> int:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            for process in self.rig.processes_of(user):
                if re.fullmatch(rf"\S+ {seconds}", process.command):
                    return process.pid
            time.sleep(0.1)
        raise AssertionError(f"no process of {user} sleeps {seconds}")

    def clean(self, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """hpc.clean in a step on the first node."""
        env = {"PYTHONPATH": str(self.rig.clone), **environ}
        inner = ["env", *(f"{name}={text}" for name, text in env.items()), self.rig.python, "-m", "hpc.clean", *words]
        return self.rig.run(["srun", "--quiet", f"--nodelist={self.node}", *inner])


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def left(cluster: Rig) -> Iterator[Left]:
    made = Left(cluster)
    own = Path("/tmp") not in (*ROOT.parents, *Path(cluster.python).parents)
    if own:
        subprocess.run([*made.inside, "mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/tmp"], check=True)
    yield made
    if own:
        subprocess.run([*made.inside, "umount", "--lazy", "/tmp"], check=True)
    for process in (*cluster.processes_of(FIRST_USER), *cluster.processes_of(SECOND_USER)):
        if re.fullmatch(r"\S+ 71[0-9]{2}", process.command):
            os.kill(process.pid, signal.SIGKILL)


def test_r2_the_door_ends_what_is_over_and_nothing_else(cluster: Rig, left: Left) -> None:
    old, other = left.over(7101), left.over(7102, SECOND_USER)
    live, notebook = left.live("sleep", 7103), left.live("jupyter-lab", 7104)
    spared = {"another user's": other, "a live job's": live, "a notebook of a live job": notebook}

    lost = left.clean("--end", "--yes", PATH="/nonexistent")
    assert lost.returncode == 1 and "Slurm cannot be asked" in lost.stdout and lives(old), lost
    listed = left.clean()
    assert listed.returncode == 1 and lives(old), listed
    (line,) = [line for line in listed.stdout.splitlines() if line.endswith("sleep 7101")]
    assert re.search(rf" {old} +\d+s +\d+ +- +leftover: job \d+ is over", line), line
    assert not re.search("710[234]", listed.stdout)
    refused = left.clean("--end")
    assert refused.returncode == 2 and "--yes" in refused.stderr and lives(old)

    allocation = ["salloc", "--quiet", "--nodes=2", "env", f"PYTHONPATH={cluster.clone}", cluster.python]
    ended = cluster.run([*allocation, "-m", "hpc.clean", "--all-nodes", "--end", "--yes"])
    assert ended.returncode == 0 and f"{left.node}: 1 processes ended" in ended.stdout, ended
    assert not lives(old)
    again = left.clean("--end", "--yes")
    assert again.returncode == 0 and f"{left.node}: clean" in again.stdout, again
    assert {kind: lives(pid) for kind, pid in spared.items()} == dict.fromkeys(spared, True)


FILES = "mkdir /tmp/hpc-$(id -u)-$SLURM_CLUSTER_NAME.$SLURM_JOB_ID.0.0-leavings; echo > /dev/shm/torch_${SLURM_TASK_PID}_71_0"
"""What an agent and a rank of a job leave, by their names."""


def test_an_agent_ends_what_jobs_that_are_over_have_left_before_it(cluster: Rig, left: Left) -> None:
    """Processes and files; of a live job on the same node nothing is touched."""
    old, live = left.over(7108, first=FILES), left.live("sleep", 7109, first=FILES)
    environ = {pid: _environ(pid) for pid in (old, live)}
    prefix = f"hpc-{cluster.home().stat().st_uid}-{cluster.site.cluster_name}"
    folders = {pid: left.root / f"tmp/{prefix}.{one['SLURM_JOB_ID']}.0.0-leavings" for pid, one in environ.items()}
    shm = {pid: left.root / f"dev/shm/torch_{one['SLURM_TASK_PID']}_71_0" for pid, one in environ.items()}
    try:
        assert folders[old].exists() and folders[live].exists() and shm[live].exists()
        submit = ["-m", "hpc.submit", "--nodes", "1", "--gpus-per-node", "1", f"slurm.nodelist={left.node}"]
        env = {"PYTHONPATH": str(cluster.clone), "HPC_SITE_CONFIG": ""}
        sent = cluster.run([cluster.python, *submit, "--", "true"], cwd=cluster.home(), env=env, check=True)
        job = cluster.track(re.findall(r"^job (\d+)", sent.stdout, re.MULTILINE)[0])
        assert cluster.wait(job) == "COMPLETED", cluster.report(job)
        text = cluster.output(job)
        assert not lives(old) and not shm[old].exists() and not folders[old].exists(), text
        said = rf"ended a leftover of job {environ[old]['SLURM_JOB_ID']}: pid {old}, \d+ s old, sleep 7108\n"
        assert re.search(said, text) and re.search(r"removed \d+ files of dead processes", text), text
        assert lives(live) and shm[live].exists() and folders[live].exists() and f"pid {live}" not in text, text
    finally:
        for pid in (old, live):
            shm[pid].unlink(missing_ok=True)
            shutil.rmtree(folders[pid], ignore_errors=True)


def _environ(pid: int) -> dict[str, str]:
    return dict(entry.split("=", 1) for entry in Path(f"/proc/{pid}/environ").read_text().split("\0") if entry)


def test_the_epilog_ends_what_the_job_left_and_drains_a_node_whose_memory_stays(cluster: Rig, left: Left) -> None:
    """Run as slurmd runs it; `sbin/devcluster up --epilog` has it in slurm.conf."""
    old, live = left.over(7105), left.live("sleep", 7106)
    smi = cluster.clone / "smi"
    smi.write_text("#!/bin/sh\necho 0, 40960\necho 1, 4\n")
    smi.chmod(0o755)
    environ = {"SLURM_JOB_UID": str(os.stat(cluster.home()).st_uid), "SLURMD_NODENAME": left.node}
    environ |= {"SLURM_CONF": str(cluster.slurm_conf), "SLURM_CLUSTER_NAME": cluster.site.cluster_name}

    def epilog(pid: int, **more: str) -> None:
        env = {**environ, "SLURM_JOB_ID": _environ(pid)["SLURM_JOB_ID"], **more}
        subprocess.run([*left.inside, str(EPILOG)], env=env, check=True, timeout=60)

    epilog(old)
    assert not lives(old) and lives(live)
    try:
        second = left.over(7107)
        epilog(second, SLURM_JOB_GPUS="0,1", HPC_EPILOG_NVIDIA_SMI=str(smi), HPC_EPILOG_GPU_WAIT_S="1")
        state = cluster.slurm("scontrol", "show", "node", left.node)
        assert "DRAIN" in state and re.search(
            r"Reason=epilog of job \d+: memory in use after it, GPU 0: 40960 MiB", state
        )
    finally:
        cluster.slurm("scontrol", "update", f"nodename={left.node}", "state=resume")
