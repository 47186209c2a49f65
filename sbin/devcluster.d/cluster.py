"""A whole dev cluster: brought up, looked at, broken on purpose, repaired and taken away."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import re
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import accounting
import machine
from cluster_site import USERS, DevclusterError, Node, Shape, Site, cgroup_conf, gres_conf, slurm_conf

PROGRAMS = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "srun": "slurm-client",
    "scontrol": "slurm-client",
    "munged": "munge",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "useradd": "passwd",
}
_FOLDERS = {"etc": 0o755, "munge": 0o755, "key": 0o700, "run": 0o755, "log": 0o755, "slurmctld": 0o700, "spool": 0o755}
_EPILOG = Path(__file__).resolve().parent.parent / "epilog.d"
_UNIFIED_CGROUPS = Path("/sys/fs/cgroup/cgroup.controllers")
_WORKING = re.compile(r"(IDLE|MIXED|ALLOCATED|COMPLETING)(\+(COMPLETING|CLOUD|DYNAMIC_NORM|RESERVED|PLANNED))*")

# Runs inside the node's network namespace with UTS and mount namespaces of its own. The mounts are a copy of the
# host's, cgroup mounts included, but for shared memory, which no two machines have in common, and name look-ups: a DNS
# server that cannot be reached costs 10 s each time.
_BECOME_NODE = (
    'hostname "$1" && mount -t tmpfs -o mode=1777 tmpfs /dev/shm && '
    'mount --bind "$2/nsswitch.conf" /etc/nsswitch.conf && '
    '{ ! [ -e /etc/resolv.conf ] || mount --bind "$2/resolv.conf" /etc/resolv.conf; } && shift 2 && exec "$@"'
)


@contextlib.contextmanager
def alone(site: Site) -> Iterator[None]:
    """One command at a time changes a cluster; the others wait. A killed command holds nothing."""
    with open(f"/run/{site.cluster_name}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another devcluster command is at work: waiting for it", file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def up(site: Site, shape: Shape) -> None:
    """Whatever is missing or broken is made; what runs is left alone. Ends when every node takes jobs."""
    machine.require_programs(PROGRAMS)
    host = socket.gethostname().split(".")[0]
    for user in USERS:
        machine.ensure_user(user)
    _write_state(site, shape, host)
    machine.ensure_bridge(site)
    machine.write_hosts(site, site.nodes(shape))
    machine.ensure_devices(site, shape.gpus_per_node)
    _ensure_munged(site)
    if shape.accounting:
        accounting.ensure(site, host)
    _ensure_slurmctld(site)
    for node in site.nodes(shape):
        _ensure_node(node)
    _wait_for_nodes(site, site.nodes(shape))


def _write_state(site: Site, shape: Shape, login_host: str) -> None:
    site.state.mkdir(parents=True, exist_ok=True)
    site.state.chmod(0o755)
    for name, mode in _FOLDERS.items():
        (site.state / name).mkdir(exist_ok=True)
        (site.state / name).chmod(mode)
    etc = site.slurm_conf.parent
    _write_if_new(site.state / "cluster.json", shape.to_json())
    _write_if_new(etc / "nsswitch.conf", "passwd: files\ngroup: files\nshadow: files\nhosts: files\nnetworks: files\n")
    _write_if_new(etc / "resolv.conf", "# none: the nodes look names up in /etc/hosts alone\n")
    _write_if_new(etc / "gres.conf", gres_conf(site, shape))
    _write_if_new(etc / "cgroup.conf", cgroup_conf(_UNIFIED_CGROUPS.exists()))
    _write_if_new(site.slurm_conf, slurm_conf(site, shape, login_host))
    if shape.epilog:
        _copy_epilog(etc / "epilog.d")
    key = site.state / "key" / "munge.key"
    if not key.exists() or key.stat().st_size != 1024:
        key.unlink(missing_ok=True)
        with open(os.open(key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(os.urandom(1024))


def _copy_epilog(folder: Path) -> None:
    """sbin/epilog.d as an administrator installs it: root's, and nobody else may write to it."""
    folder.mkdir(mode=0o755, exist_ok=True)
    for source in sorted(_EPILOG.iterdir()):
        _write_if_new(folder / source.name, source.read_text())
        (folder / source.name).chmod(0o755)


def _write_if_new(path: Path, text: str) -> None:
    if path.exists() and path.read_text() == text:
        return
    beside = path.with_name(path.name + ".new")
    beside.write_text(text)
    beside.chmod(0o644)
    beside.replace(path)


def _is_current(site: Site, daemon: str) -> bool:
    """The daemon runs, and with the configuration that stands there now."""
    pid_file = site.pid_file(daemon)
    if machine.running(pid_file) is None:
        return False
    conf = max(
        (site.slurm_conf.parent / name).stat().st_mtime_ns for name in ("slurm.conf", "gres.conf", "cgroup.conf")
    )
    return pid_file.stat().st_mtime_ns >= conf


def _ensure_munged(site: Site) -> None:
    if machine.running(site.pid_file("munged")) is None:
        files = {
            "key-file": site.state / "key" / "munge.key",
            "socket": site.munge_socket,
            "pid-file": site.state / "run" / "munged.own.pid",
            "seed-file": site.state / "key" / "munge.seed",
            "log-file": site.log_file("munged"),
        }
        site.munge_socket.unlink(missing_ok=True)
        machine.start(site, "munged", ["munged", "--foreground", *(f"--{name}={path}" for name, path in files.items())])
    deadline = time.monotonic() + 10
    while not site.munge_socket.exists():
        if machine.running(site.pid_file("munged")) is None or time.monotonic() > deadline:
            raise DevclusterError(f"munged did not start; see {site.log_file('munged.out')}")
        time.sleep(0.02)


def slurm_environment(site: Site) -> dict[str, str]:
    return {"SLURM_CONF": str(site.slurm_conf)}


def _ensure_slurmctld(site: Site) -> None:
    if not _is_current(site, "slurmctld"):
        machine.stop(site, "slurmctld")
        machine.start(site, "slurmctld", ["slurmctld", "-D", "-f", str(site.slurm_conf)], slurm_environment(site))
    deadline = time.monotonic() + 30
    while True:
        try:
            machine.call(["scontrol", "ping"], environment=slurm_environment(site), timeout=20)
            return
        except DevclusterError as error:
            if machine.running(site.pid_file("slurmctld")) is None or time.monotonic() > deadline:
                raise DevclusterError(f"slurmctld does not answer: {error}; see {site.log_file('slurmctld')}") from None
        time.sleep(0.1)


def _ensure_node(node: Node) -> None:
    """The node is plugged in and its slurmd runs; a node that was killed boots."""
    boots = not machine.members(node)
    machine.ensure_cable(node)
    if _is_current(node.site, node.daemon) and machine.running(node.site.pid_file(node.daemon)) in machine.members(
        node
    ):
        return
    machine.stop(node.site, node.daemon)
    spool = node.site.state / "spool" / node.name
    spool.mkdir(exist_ok=True)
    conf = node.site.slurm_conf
    slurmd = ["slurmd", "-D", "-N", node.name, "-f", str(conf), *(["-b"] if boots else [])]
    namespaces = ["unshare", "--uts", "--mount", "--propagation", "slave"]
    become = ["sh", "-c", _BECOME_NODE, "sh", node.name, str(conf.parent), *slurmd]
    inside = ["nsenter", f"--net={node.namespace_path}", *namespaces, *become]
    machine.start(node.site, node.daemon, inside, slurm_environment(node.site))


def node_states(site: Site) -> dict[str, str]:
    """Node -> state in scontrol's words, such as IDLE or DOWN*+DRAIN."""
    lines = machine.call(["scontrol", "show", "node", "-o"], environment=slurm_environment(site)).splitlines()
    found = (re.match(r"NodeName=(\S+) .*?\bState=(\S+)", line) for line in lines)
    return {match[1]: match[2] for match in found if match}


def is_working(state: str) -> bool:
    return _WORKING.fullmatch(state) is not None


def _wait_for_nodes(site: Site, nodes: list[Node], limit_s: float = 45.0) -> None:
    """Every one of these nodes takes jobs; one that was drained or set down is resumed, which makes Slurm ask it anew."""
    deadline = time.monotonic() + limit_s
    resumed: set[str] = set()
    while True:
        states = node_states(site)
        waiting = [node.name for node in nodes if not is_working(states.get(node.name, "unknown"))]
        if not waiting:
            return
        for name in waiting:
            state = states.get(name, "")
            if ("DRAIN" in state or "DOWN" in state) and name not in resumed:
                resumed.add(name)
                with contextlib.suppress(DevclusterError):  # it came back by itself in the meantime
                    _scontrol(site, "update", f"nodename={name}", "state=resume")
        if time.monotonic() > deadline:
            told = ", ".join(f"{name} is {states.get(name, 'unknown')}" for name in waiting)
            raise DevclusterError(f"{told} after {limit_s:.0f} s; see {site.state}/log/slurmd-{waiting[0]}.log")
        time.sleep(0.2)


def _scontrol(site: Site, *words: str) -> str:
    return machine.call(["scontrol", *words], environment=slurm_environment(site))


def find_node(site: Site, shape: Shape, name: str) -> Node:
    nodes = {node.name: node for node in site.nodes(shape)}
    if name not in nodes:
        raise DevclusterError(f"no node {name!r}: this cluster has {', '.join(nodes)}")
    return nodes[name]


def cut(node: Node) -> None:
    """Pull the node's cable: its processes go on and hear from nobody."""
    machine.pull_cable(node)


def kill(node: Node) -> int:
    """A power loss: the others hear no goodbye, every process of the node is gone. The count of those."""
    machine.pull_cable(node)
    count = machine.kill_members(node)
    machine.remove_cable(node)
    machine.remove_namespace(node)
    node.site.pid_file(node.daemon).unlink(missing_ok=True)
    return count


def heal(node: Node) -> None:
    """Plug the cable in, switch the power on, and wait until the node takes jobs again."""
    _ensure_node(node)
    _wait_for_nodes(node.site, [node])


def down(site: Site) -> None:
    """No daemon, process, namespace, device node, hosts line, bridge or mount is left. Users, logs and venv stay."""
    shape = site.saved_shape() or Shape()
    _keep_next_job_id(site)
    machine.stop(site, "slurmctld", patience_s=5)
    everything = [site.node(index) for index in range(1, 17)]  # also of a bigger cluster that an older `up` left
    for node in everything:
        machine.kill_members(node)
        machine.remove_cable(node)
        machine.remove_namespace(node)
    for daemon in (*accounting.DAEMONS, "munged"):
        machine.stop(site, daemon)
    machine.close_namespace_folder()
    machine.remove_bridge(site)
    machine.write_hosts(site, [])
    machine.remove_devices(site)
    _remove_cgroups(site, shape)
    for name in ("etc", "munge", "key", "run", "slurmctld", "spool", "mariadb"):
        shutil.rmtree(site.state / name, ignore_errors=True)
    (site.state / "cluster.json").unlink(missing_ok=True)


def _keep_next_job_id(site: Site) -> None:
    """Remember where the job ids go on."""
    if machine.running(site.pid_file("slurmctld")) is None:
        return
    with contextlib.suppress(DevclusterError):
        found = re.search(r"^NEXT_JOB_ID\s*=\s*(\d+)", _scontrol(site, "show", "config"), re.MULTILINE)
        if found:
            (site.state / "first-job-id").write_text(found[1] + "\n")


def _remove_cgroups(site: Site, shape: Shape) -> None:
    """The empty groups that proctrack/cgroup leaves for each node."""
    for node in site.nodes(shape):
        for top in Path("/sys/fs/cgroup").glob(f"*/slurm_{node.name}"):
            for folder, _, _ in os.walk(top, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)


def problems(site: Site, shape: Shape) -> list[str]:
    """What is not as `up` leaves it, one line each."""
    daemons = ["munged", "slurmctld", *(accounting.DAEMONS if shape.accounting else ())]
    found = [f"{name} does not run" for name in daemons if machine.running(site.pid_file(name)) is None]
    for node in site.nodes(shape):
        if not machine.members(node):
            found.append(f"{node.name} is dead")
        elif machine.is_cut(node):
            found.append(f"{node.name} is cut")
        elif machine.running(site.pid_file(node.daemon)) is None:
            found.append(f"{node.name}: slurmd does not run")
    return found


def become(user: str) -> pwd.struct_passwd:
    """This process goes on as that user, with the user's groups, and can never come back."""
    entry = pwd.getpwnam(user)
    os.initgroups(user, entry.pw_gid)
    os.setgid(entry.pw_gid)
    os.setuid(entry.pw_uid)
    os.umask(0o022)
    return entry
