"""What a dev cluster does to this machine: processes, cables, users, /etc/hosts lines and device nodes.

Everything here can be done twice and undone twice. A process is ended only when its identity is certain: by boot,
process id and start time of a record that the process itself wrote before it became the daemon, or by the network
namespace that it lives in; never by its name.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pwd
import select
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from cluster_site import SYSTEM_PATH, DevclusterError, Node, Site

# The process writes its own boot, id and start time, and then becomes the daemon: there is no moment without a record.
_RECORD_AND_BECOME = (
    'read -r boot </proc/sys/kernel/random/boot_id && read -r stat </proc/$$/stat && printf "%s\\n%s\\n" "$boot" "$stat"'
    ' >"$1.new" && mv -- "$1.new" "$1" && shift && exec "$@"'
)
_FAKE_GPU = os.makedev(1, 3)  # what /dev/null is: it opens, so a process that holds it can be found
_HOSTS = Path("/etc/hosts")
SHARED_LOCK = Path("/run/hpcdev.lock")


@contextlib.contextmanager
def to_itself() -> Iterator[None]:
    """What all clusters of the machine share (packages, users, /etc/hosts, /run/netns) is changed by one at a time."""
    with open(SHARED_LOCK, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def call(argv: Sequence[str], *, environment: Mapping[str, str] | None = None, timeout: float = 60.0) -> str:
    """Run a command to its end and hand back its output; its own words stand in the error."""
    env = {"PATH": SYSTEM_PATH, "LC_ALL": "C.UTF-8", **(environment or {})}
    try:
        done = subprocess.run(argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise DevclusterError(f"`{' '.join(argv)}` gave no answer in {timeout:.0f} s; look at the log files") from None
    if done.returncode != 0:
        words = " ".join((done.stderr or done.stdout).split())
        raise DevclusterError(f"`{' '.join(argv)}` exited {done.returncode}: {words}")
    return done.stdout


def require_programs(packages: Mapping[str, str]) -> None:
    """See that each program is there; install the Debian packages of the missing ones.

    packages: program -> the Debian package that has it.
    """
    missing = sorted({package for program, package in packages.items() if not shutil.which(program, path=SYSTEM_PATH)})
    if not missing:
        return
    wanted = " ".join(missing)
    if not shutil.which("apt-get", path=SYSTEM_PATH):
        raise DevclusterError(f"missing: {wanted} (names of Debian packages), and there is no apt-get; install them")
    print(f"installing {wanted}", flush=True)
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing]
    with to_itself():
        try:
            call(install, environment=quiet, timeout=600)
        except DevclusterError:  # the package lists are old or were never fetched
            call(["apt-get", "update", "-qq"], environment=quiet, timeout=300)
            call(install, environment=quiet, timeout=600)


# --- processes -------------------------------------------------------------------------------------------------------


def _start_time(stat_line: str) -> str:
    """Field 22 of /proc/PID/stat, counted behind the name in brackets. Source: proc(5)."""
    return stat_line.rpartition(")")[2].split()[19]


def _recorded(pid_file: Path) -> tuple[int, str] | None:
    """Process id and start time in a record of this boot."""
    try:
        boot, line = pid_file.read_text().splitlines()
    except (FileNotFoundError, ValueError):
        return None
    if boot != Path("/proc/sys/kernel/random/boot_id").read_text().strip():
        return None
    return int(line.split(" ", 1)[0]), _start_time(line)


def running(pid_file: Path) -> int | None:
    """The process id of the daemon that wrote this record, or None when it is gone."""
    record = _recorded(pid_file)
    if record is None:
        return None
    pid, started = record
    try:
        line = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    alive = _start_time(line) == started and line.rpartition(")")[2].split()[0] not in "ZX"
    return pid if alive else None


def start(site: Site, daemon: str, argv: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    """Start a daemon in the foreground of its own session; its record stands before this returns."""
    pid_file = site.pid_file(daemon)
    pid_file.unlink(missing_ok=True)
    env = {"PATH": SYSTEM_PATH, "LC_ALL": "C.UTF-8", "HOME": "/root", **(environment or {})}
    with open(site.log_file(f"{daemon}.out"), "ab") as log:
        child = subprocess.Popen(
            ["sh", "-c", _RECORD_AND_BECOME, "sh", str(pid_file), *argv],
            env=env, cwd="/", stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    deadline = time.monotonic() + 10
    while not pid_file.exists():
        if child.poll() is not None or time.monotonic() > deadline:
            raise DevclusterError(f"{daemon} did not start; see {site.log_file(f'{daemon}.out')}")
        time.sleep(0.01)


def _end(pid: int, still_ours: Callable[[], bool], first: int, patience_s: float) -> None:
    """Send `first`, and KILL after the patience, to one process that `still_ours()` knows for certain."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if not still_ours():  # asked after the handle is held: the id cannot have passed to another process since
            return
        for number, patience in ((first, patience_s), (signal.SIGKILL, 10.0)):
            try:
                signal.pidfd_send_signal(handle, number)
            except ProcessLookupError:
                return
            poll = select.poll()
            poll.register(handle, select.POLLIN)
            if poll.poll(int(patience * 1000)):
                return
    finally:
        os.close(handle)


def stop(site: Site, daemon: str, patience_s: float = 10.0) -> None:
    """End the daemon of this record, kindly and then not; nothing happens when it is gone."""
    pid_file = site.pid_file(daemon)
    pid = running(pid_file)
    if pid is not None:
        _end(pid, lambda: running(pid_file) == pid, signal.SIGTERM, patience_s)
    pid_file.unlink(missing_ok=True)


def members(node: Node) -> list[int]:
    """Every process that lives in the node's network namespace."""
    try:
        space = node.namespace_path.stat()
    except FileNotFoundError:
        return []
    return [pid for pid in _all_pids() if _lives_in(pid, space)]


def _all_pids() -> Iterator[int]:
    return (int(entry) for entry in os.listdir("/proc") if entry.isdigit())


def _lives_in(pid: int, space: os.stat_result) -> bool:
    try:
        own = os.stat(f"/proc/{pid}/ns/net")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False
    return (own.st_dev, own.st_ino) == (space.st_dev, space.st_ino)


def kill_members(node: Node) -> int:
    """KILL every process of the node until there is none; the count of those that were found first."""
    first = members(node)
    found = first
    deadline = time.monotonic() + 15
    while found:
        space = node.namespace_path.stat()
        handles = []
        for pid in found:
            try:
                handle = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            handles.append(handle)
            if _lives_in(pid, space):
                try:
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        for handle in handles:
            os.close(handle)
        if time.monotonic() > deadline:
            raise DevclusterError(
                f"{node.name}: processes {found} outlive KILL; they hang in the kernel, look at dmesg"
            )
        time.sleep(0.02)
        found = members(node)
    return len(first)


# --- cables ----------------------------------------------------------------------------------------------------------


def _links() -> dict[str, list[str]]:
    """Network link of this machine -> its flags."""
    return {link["ifname"]: link["flags"] for link in json.loads(call(["ip", "-json", "link", "show"]) or "[]")}


def ensure_bridge(site: Site) -> None:
    if site.bridge not in _links():
        call(["ip", "link", "add", site.bridge, "type", "bridge"])
    call(["ip", "addr", "replace", f"{site.login_address}/24", "dev", site.bridge])
    call(["ip", "link", "set", site.bridge, "up"])


def remove_bridge(site: Site) -> None:
    if site.bridge in _links():
        call(["ip", "link", "del", site.bridge])


def ensure_cable(node: Node) -> None:
    """The node's namespace exists and its cable is plugged in."""
    if not _is_namespace(node):
        node.namespace_path.unlink(missing_ok=True)  # an empty file: `ip netns add` was killed half-way
        with to_itself():
            call(["ip", "netns", "add", node.namespace])
    inside = ["ip", "-n", node.namespace]
    links = {link["ifname"] for link in json.loads(call([*inside, "-json", "link", "show"]))}
    if node.cable not in _links() or "eth0" not in links:
        remove_cable(node)
        call(["ip", "link", "add", node.cable, "type", "veth", "peer", "name", "eth0", "netns", node.namespace])
    call([*inside, "link", "set", "lo", "up"])
    call([*inside, "addr", "replace", f"{node.address}/24", "dev", "eth0"])
    call([*inside, "link", "set", "eth0", "up"])
    call(["ip", "link", "set", node.cable, "master", node.site.bridge, "up"])


def _is_namespace(node: Node) -> bool:
    try:
        return node.namespace_path.stat().st_dev != Path("/run/netns").stat().st_dev
    except FileNotFoundError:
        return False


def remove_cable(node: Node) -> None:
    if node.cable in _links():
        call(["ip", "link", "del", node.cable])


def pull_cable(node: Node) -> None:
    if node.cable in _links():
        call(["ip", "link", "set", node.cable, "down"])


def is_cut(node: Node) -> bool:
    return "UP" not in _links().get(node.cable, [])


def remove_namespace(node: Node) -> None:
    if node.namespace_path.exists():
        call(["ip", "netns", "del", node.namespace])


def close_namespace_folder() -> None:
    """Undo the mount that `ip netns add` made on /run/netns, once no namespace of anybody is left."""
    folder = Path("/run/netns")
    with to_itself():
        if folder.is_dir() and not any(folder.iterdir()):
            for _ in range(_mount_count(folder)):
                call(["umount", str(folder)])
            folder.rmdir()


def _mount_count(folder: Path) -> int:
    """How often something is mounted on the folder; os.path.ismount misses a folder that is bound onto itself."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return sum(line.split()[4] == str(folder) for line in lines)


# --- users, names, devices -------------------------------------------------------------------------------------------


def ensure_user(name: str) -> pwd.struct_passwd:
    with to_itself():
        try:
            pwd.getpwnam(name)
        except KeyError:
            call(["useradd", "--create-home", "--shell", "/bin/bash", name])
    user = pwd.getpwnam(name)
    home = Path(user.pw_dir)
    if stat.S_IMODE(home.stat().st_mode) & 0o055 != 0o055:
        home.chmod(0o755)  # the other user looks in from outside in tests
    return user


def write_hosts(site: Site, nodes: Sequence[Node]) -> None:
    """Exactly these nodes stand between our markers in /etc/hosts; with none, the markers go too."""
    with to_itself():
        _write_hosts(site, nodes)


def _write_hosts(site: Site, nodes: Sequence[Node]) -> None:
    begin, end = f"# begin {site.cluster_name} (sbin/devcluster)", f"# end {site.cluster_name}"
    old = _HOSTS.read_text()
    kept: list[str] = []
    ours = False
    for line in old.splitlines():
        if line == begin:
            ours = True
        if not ours:
            kept.append(line)
        if line == end:
            ours = False
    if nodes:
        kept += [begin, *(f"{node.address} {node.name}" for node in nodes), end]
    new = "\n".join(kept) + "\n"
    if new == old:
        return
    beside = _HOSTS.with_name(f".hosts.{site.cluster_name}")
    beside.write_text(new)
    shutil.copystat(_HOSTS, beside)
    try:
        beside.replace(_HOSTS)
    except OSError:  # in a container /etc/hosts is a mount, which cannot be replaced
        _HOSTS.write_text(new)
        beside.unlink()


def devices(site: Site) -> list[Path]:
    """The fake GPUs of this cluster that exist."""
    prefix = Path(site.device_prefix)
    found = [path for path in prefix.parent.glob(f"{prefix.name}*") if path.name[len(prefix.name) :].isdigit()]
    return [path for path in found if path.is_char_device() and path.stat().st_rdev == _FAKE_GPU]


def ensure_devices(site: Site, count: int) -> None:
    for index in range(count):
        path = Path(f"{site.device_prefix}{index}")
        if not path.exists():
            os.mknod(path, stat.S_IFCHR | 0o666, _FAKE_GPU)
        path.chmod(0o666)


def remove_devices(site: Site) -> None:
    for path in devices(site):
        path.unlink()
