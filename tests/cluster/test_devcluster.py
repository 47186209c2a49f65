"""sbin/devcluster keeps its promises. These tests break things, so they have a cluster of their own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster_rig import FIRST_USER, SECOND_USER, Rig, give_to, machine, spare_number

ALL_GPUS = ["--nodes=2", "--gpus-per-node=4"]


@pytest.fixture(scope="module")
def own() -> Iterator[Rig]:
    rig = Rig(spare_number())
    rig.devcluster("down")  # what a killed test session left
    rig.devcluster("up", "--nodes", "2", "--gpus-per-node", "4", timeout=600)
    rig.clone = rig.home() / f"devcluster test {os.getpid()}"
    rig.clone.mkdir()
    give_to(rig.clone, FIRST_USER)
    yield rig
    rig.devcluster("down")
    shutil.rmtree(rig.clone)


@pytest.fixture(autouse=True)
def _free_nodes(own: Rig) -> Iterator[None]:
    yield
    if own.site.saved_shape() is not None:
        own.cancel_jobs()


def until(condition: Callable[[], bool], timeout: float = 30.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.2)


def pid_of(rig: Rig, daemon: str) -> int:
    return int(rig.site.pid_file(daemon).read_text().splitlines()[1].split()[0])


def test_up_twice_changes_nothing(own: Rig) -> None:
    node = own.node_names[0]
    job = own.sbatch("--nodelist", node, "--wrap", "sleep 300")
    own.wait_for_state(job, "RUNNING")
    daemons = ["munged", "slurmctld", *(f"slurmd-{name}" for name in own.node_names)]
    before = [pid_of(own, name) for name in daemons]
    own.devcluster("up")
    assert [pid_of(own, name) for name in daemons] == before
    assert own.state(job) == "RUNNING"
    assert own.job(job)["Restarts"] == "0"
    assert Path("/etc/hosts").read_text().count(own.site.node(1).address) == 1


def test_another_shape_needs_down_first(own: Rig) -> None:
    done = own.devcluster("up", "--nodes", "3", check=False)
    assert done.returncode == 1
    assert "--nodes 2 --gpus-per-node 4" in done.stderr and "down" in done.stderr


def test_status_names_nodes_states_and_partitions(own: Rig) -> None:
    done = own.devcluster("status")
    for text in (*own.node_names, "IDLE", "plugged in", "low", "high", str(own.slurm_conf)):
        assert text in done.stdout
    found = own.slurm("sinfo", "-h", "-N", "-p", "low", "-o", "%N %T %G").split("\n")
    assert [line.split("(")[0] for line in found if line] == [f"{name} idle gpu:4" for name in own.node_names]


def test_run_is_an_ordinary_user_with_a_clean_environment(own: Rig, tmp_path: Path) -> None:
    printed = own.devcluster("run", "env", cwd=Path("/usr")).stdout.splitlines()  # the rig's own adds a variable
    environment = dict(line.split("=", 1) for line in printed)
    assert environment["USER"] == FIRST_USER and environment["SLURM_CONF"] == str(own.slurm_conf)
    allowed = {"HOME", "USER", "LOGNAME", "SHELL", "LANG", "PATH", "SLURM_CONF", "TERM", "PWD"}
    assert set(environment) <= allowed
    assert own.run(["pwd"], cwd=Path("/usr")).stdout == "/usr\n"
    tmp_path.chmod(0o700)
    assert own.run(["pwd"], cwd=tmp_path).stdout == f"{own.home()}\n"
    assert own.run(["id", "-un"], user=SECOND_USER).stdout == f"{SECOND_USER}\n"
    assert own.run(["sh", "-c", "exit 7"]).returncode == 7
    assert own.run(["head", "-c1", str(own.site.state / "key" / "munge.key")]).returncode != 0


def test_a_job_sees_two_hosts_and_four_gpus_on_each(own: Rig) -> None:
    """And shared memory of each one's own, which the machine's other processes do not see."""
    script = (
        "srun sh -c 'touch /dev/shm/of.$(hostname); "
        'echo "$(hostname) $(uname -n) $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES $(ls /dev/shm)"\''
    )
    job = own.sbatch(*ALL_GPUS, "--ntasks-per-node=1", "--wrap", script)
    assert own.wait(job, 60) == "COMPLETED"
    wanted = [f"{name} {name} {name} 0,1,2,3 of.{name}" for name in own.node_names]
    assert sorted(own.output(job).splitlines()) == wanted and not list(Path("/dev/shm").glob("of.*"))


def test_names_are_looked_up_in_files_alone(own: Rig) -> None:
    first, second = own.site.node(1), own.site.node(2)
    look = f"getent hosts {second.name} && ! timeout 3 getent hosts no-such-host.example; echo $?"
    done = own.run(["srun", "--nodelist", first.name, "sh", "-c", look])
    assert done.stdout.split() == [second.address, second.name, "0"]


def test_a_job_in_high_preempts_a_job_in_low_which_comes_back(own: Rig) -> None:
    assert own.clone is not None
    marks = own.clone / "marks"
    step = 'trap "echo step told >>marks; exit 1" TERM; sleep 300 & wait'
    script = f"echo attempt ${{SLURM_RESTART_COUNT-first}} >>marks; srun -N2 bash -c '{step}'; sleep 300"
    low = own.sbatch(*ALL_GPUS, "--partition=low", "--wrap", script)
    own.wait_for_state(low, "RUNNING")
    # both nodes' tasks: a shell that gets SIGTERM before it has set its trap says nothing
    until(lambda: sum(process.command.startswith("sleep 300") for process in own.processes_of()) == 2)
    high = own.sbatch(*ALL_GPUS, "--partition=high", "--wrap", "hostname")
    until(lambda: marks.read_text().count("step told") == 2, timeout=15)  # at once, on both nodes
    assert own.state(low) == "RUNNING"  # its grace time runs, the batch shell heard nothing
    assert own.wait(high, 60) == "COMPLETED"
    own.wait_for_state(low, "RUNNING")
    assert own.job(low)["Restarts"] == "1"
    until(lambda: marks.read_text().splitlines()[-1] == "attempt 1")


def test_a_killed_node_is_down_and_its_job_goes_elsewhere(own: Rig) -> None:
    _, lost = own.site.nodes(own.shape)
    job = own.sbatch("--nodelist", lost.name, "--wrap", "setsid sleep 301 & sleep 302")
    own.wait_for_state(job, "RUNNING")
    until(lambda: len([found for found in own.processes_of() if "sleep 30" in found.command]) >= 2)
    victims = [found.pid for found in own.processes() if found.node == lost.name]
    assert len(victims) >= 4  # slurmd, its step daemon, both sleeps
    own.devcluster("kill", lost.name)
    assert not [pid for pid in victims if _is_alive(pid)]
    assert not lost.namespace_path.exists()
    assert {found.node for found in own.processes()} == {own.node_names[0]}  # the other node lives on
    status = own.devcluster("status", check=False)
    assert status.returncode == 1 and f"{lost.name} is dead" in status.stdout
    until(lambda: own.node_state(lost.name).startswith("DOWN"), timeout=40)
    own.wait_for_state(job, "PENDING")
    assert own.job(job)["Restarts"] == "1"
    own.devcluster("heal", lost.name)
    own.wait_for_state(job, "RUNNING")
    assert own.devcluster("status").returncode == 0


def test_a_cut_node_hears_nothing_and_goes_on(own: Rig) -> None:
    node = own.site.node(1)
    job = own.sbatch("--nodelist", node.name, "--wrap", "sleep 300")
    own.wait_for_state(job, "RUNNING")
    until(lambda: any(found.node == node.name for found in own.processes_of()))
    assert _answers(own, 1)
    own.devcluster("cut", node.name)
    own.devcluster("cut", node.name)
    assert not _answers(own, 1)
    assert _answers(own, 2)
    assert any(found.node == node.name for found in own.processes_of())
    status = own.devcluster("status", check=False)
    assert status.returncode == 1 and f"{node.name} is cut" in status.stdout
    own.devcluster("heal", node.name)
    assert _answers(own, 1)
    assert own.state(job) == "RUNNING"
    assert own.job(job)["Restarts"] == "0"
    assert own.devcluster("cut", "nosuch", check=False).returncode == 1


def test_up_repairs_what_a_kill_left_half(own: Rig) -> None:
    first, second = own.site.nodes(own.shape)
    job = own.sbatch("--nodelist", first.name, "--wrap", "sleep 300")
    own.wait_for_state(job, "RUNNING")
    time.sleep(6)  # slurmctld writes its jobs down every 5 s; one that is younger would not survive this
    for daemon in ("slurmctld", "munged", second.daemon):
        os.kill(pid_of(own, daemon), signal.SIGKILL)
    Path(f"{own.site.device_prefix}2").unlink()
    hosts = Path("/etc/hosts")
    with machine.to_itself():
        hosts.write_text("".join(line for line in hosts.open() if second.address not in line))
    subprocess.run(["ip", "-n", second.namespace, "link", "del", "eth0"], check=True)
    assert own.devcluster("status", check=False).returncode == 1
    own.devcluster("up")
    assert own.devcluster("status").returncode == 0
    assert own.state(job) == "RUNNING"
    look = f"getent hosts {second.name}; ls {own.site.device_prefix}?"
    assert len(own.run(["srun", "--nodelist", second.name, "sh", "-c", look], check=True).stdout.splitlines()) == 5


def test_up_may_be_killed_at_any_moment(own: Rig) -> None:
    own.devcluster("down")
    killed = 0
    for after_s in (0.1, 0.2, 0.3, 0.4, 0.5, 0.7):
        try:
            own.devcluster("up", timeout=after_s)
        except AssertionError as error:
            assert "did not end" in str(error)
            killed += 1
    assert killed >= 2
    own.devcluster("up")
    assert own.devcluster("status").returncode == 0
    slurmds = [found for found in own.processes() if found.command.startswith("slurmd ")]
    assert sorted(found.node for found in slurmds) == own.node_names


def test_proctrack_cgroup_and_accounting_are_switches(own: Rig) -> None:
    own.devcluster("down")
    own.devcluster("up", "--proctrack", "cgroup", "--accounting", timeout=300)
    job = own.sbatch("--nodes=2", "--wrap", "srun sh -c 'setsid sleep 303 >/dev/null 2>&1 & sleep 1'")
    assert own.wait(job, 60) == "COMPLETED"
    until(lambda: not own.processes_of(), timeout=15)  # also what had left its session and its parent
    until(lambda: "COMPLETED" in own.slurm("sacct", "-n", "-X", "-j", job, "-o", "state"))
    assert own.slurm("sacct", "-n", "-X", "-j", job, "-o", "user").split() == [FIRST_USER]


def test_down_leaves_nothing_and_may_come_twice(own: Rig) -> None:
    own.devcluster("up")
    own.sbatch("--nodes=2", "--wrap", "setsid sleep 304 & sleep 305")
    until(lambda: len([found for found in own.processes_of() if "sleep 30" in found.command]) >= 2)
    pids = [found.pid for found in own.processes()]
    pids += [pid_of(own, daemon) for daemon in ("munged", "slurmctld")]
    site, nodes = own.site, own.site.nodes(own.shape)
    own.jobs.clear()
    own.devcluster("down")
    assert not [pid for pid in pids if _is_alive(pid)]
    assert not [node for node in nodes if node.namespace_path.exists()]
    assert not list(Path("/dev").glob(f"{Path(site.device_prefix).name}*"))
    assert (
        site.cluster_name not in Path("/etc/hosts").read_text() and nodes[0].name not in Path("/etc/hosts").read_text()
    )
    assert site.bridge not in os.listdir("/sys/class/net")
    mounts = Path("/proc/self/mountinfo").read_text()
    assert nodes[0].namespace not in mounts and str(site.state) not in mounts
    assert not list(Path("/sys/fs/cgroup").glob(f"*/slurm_{site.node_prefix}*"))
    assert sorted(path.name for path in site.state.iterdir() if path.name != "venv") == ["first-job-id", "log"]
    own.devcluster("down")
    done = own.devcluster("status", check=False)
    assert done.returncode == 1 and "no cluster is up" in done.stdout


def _is_alive(pid: int) -> bool:
    """The process is there and is more than an entry that nobody has read the exit code of."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _answers(rig: Rig, index: int) -> bool:
    """The node's slurmd takes a connection from the login node."""
    try:
        socket.create_connection((rig.site.node(index).address, rig.site.slurmd_port), timeout=1.5).close()
    except OSError:
        return False
    return True
