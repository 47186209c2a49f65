"""Ports and masters: what is free, what can be reached, and what is refused before anybody waits."""

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from steps import ROOT, Step, step_environ

from hpc.errors import RendezvousError
from hpc.node import rendezvous

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="a host name and hosts file of its own need root"
)


def test_candidate_ports_differ_by_job_index_step_and_attempt_and_are_not_ephemeral() -> None:
    low, high = rendezvous.ephemeral_range()
    lists = [
        rendezvous.candidate_ports(job, index, attempt, secret, step)
        for job in ("7", "8")
        for index in (None, "0", "1")
        for attempt in (0, 1)
        for secret in ("", "s")
        for step in ("0", "1")
    ]
    firsts = [ports[0] for ports in lists]
    assert len(set(firsts)) == len(firsts)
    for ports in lists:
        assert len(set(ports)) == rendezvous.CANDIDATES
        assert all(1024 < port < 65536 and not low <= port <= high for port in ports)
    assert rendezvous.candidate_ports("7", None, 0) == rendezvous.candidate_ports("7", None, 0)


def test_listen_takes_the_next_port_when_one_is_taken_and_holds_it() -> None:
    ports = rendezvous.candidate_ports("listen", None, os.getpid())
    with rendezvous.listen("127.0.0.1", ports) as first, rendezvous.listen("127.0.0.1", ports) as second:
        taken = [first.getsockname()[1], second.getsockname()[1]]
        assert len(set(taken)) == 2 and set(taken) <= set(ports)
        with pytest.raises(RendezvousError, match="MASTER_PORT"):
            rendezvous.listen("127.0.0.1", [taken[0]])


def test_a_preset_port_inside_the_ephemeral_range_is_taken_as_told() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with rendezvous.listen("127.0.0.1", [port]) as server:
        assert server.getsockname()[1] == port


def test_l06_a_master_that_does_not_resolve_is_told_at_once() -> None:
    begun = time.monotonic()
    with pytest.raises(RendezvousError) as caught:
        rendezvous.master_address("no-such-host-1", nodes=2, rank=1)
    assert time.monotonic() - begun < 30
    for text in ("rank 1", socket.gethostname(), "cannot resolve", "no-such-host-1", "MASTER_ADDR"):
        assert text in str(caught.value)


@pytest.mark.slow
def test_l06_through_the_door(tmp_path: Path) -> None:
    hosts = "no-such-host-[1-2]"
    environ = step_environ(
        1, tasks_per_node=(1, 1), MASTER_ADDR=None, SLURM_STEP_NODELIST=hosts, SLURM_JOB_NODELIST=hosts
    )
    with Step(tmp_path) as step:
        step.agent(environ, "--", "true")
        (ended,) = step.ends(30)
    assert ended.code == 69
    assert "rank 1 on" in ended.stderr and "cannot resolve" in ended.stderr and "MASTER_ADDR" in ended.stderr


def test_l08_a_number_is_used_as_given() -> None:
    assert rendezvous.master_address("127.0.0.2", nodes=1, rank=0) == "127.0.0.2"
    assert rendezvous.resolve("192.0.2.7") == "192.0.2.7"
    assert rendezvous.resolve("2001:db8::1") == "2001:db8::1"


@pytest.mark.parametrize("master", ["127.0.0.1", "127.0.1.1", "localhost", "::1"])
def test_l05_a_loopback_master_of_several_nodes_is_refused(master: str) -> None:
    with pytest.raises(RendezvousError) as caught:
        rendezvous.master_address(master, nodes=2, rank=4)
    for text in ("rank 4", "loopback", "MASTER_ADDR", master):
        assert text in str(caught.value)
    assert rendezvous.master_address("127.0.0.1", nodes=1, rank=0) == "127.0.0.1"
    assert rendezvous.master_address("127.0.0.1", nodes=2, rank=0, allow_loopback=True) == "127.0.0.1"


def own_hosts(tmp_path: Path, name: str, address: str, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run a command on a "node" whose own name resolves to `address`: UTS and mount namespaces of its own."""
    hosts = tmp_path / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n{address} {name}\n")
    switch = tmp_path / "nsswitch.conf"
    switch.write_text("hosts: files\n")
    script = (
        'hostname "$1" && mount --bind "$2" /etc/hosts && mount --bind "$3" /etc/nsswitch.conf && shift 3 && exec "$@"'
    )
    return subprocess.run(
        ["unshare", "--uts", "--mount", "sh", "-c", script, "sh", name, str(hosts), str(switch), *argv],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@needs_root
def test_l05_a_node_whose_own_name_is_127_0_1_1_is_told_before_any_wait(tmp_path: Path) -> None:
    changes = {"SLURM_STEP_NODELIST": "gpu[1-2]", "SLURM_JOB_NODELIST": "gpu[1-2]", "MASTER_ADDR": None}
    environ = step_environ(4, tasks_per_node=(4, 4), **changes)
    argv = [sys.executable, "-m", "hpc.node", "--", "true"]
    begun = time.monotonic()
    done = own_hosts(tmp_path, "gpu1", "127.0.1.1", "env", *(f"{k}={v}" for k, v in environ.items()), *argv)
    assert time.monotonic() - begun < 30
    assert done.returncode == 69
    assert "rank 4 on gpu1" in done.stderr and "127.0.1.1" in done.stderr and "MASTER_ADDR" in done.stderr


@needs_root
@pytest.mark.parametrize("address", ["127.0.1.1", "192.0.2.1"])
def test_l10_gloo_is_kept_off_the_loopback_interface_and_the_variable_is_named(tmp_path: Path, address: str) -> None:
    code = (
        "from hpc.node import rendezvous\n"
        "import sys, psutil\n"
        "mine = next(e.address for n, es in psutil.net_if_addrs().items() if n != 'lo' for e in es if e.family == 2)\n"
        "print(rendezvous.socket_interface(mine, lambda text: print(text, file=sys.stderr)), rendezvous.interface_of(mine))\n"
    )
    done = own_hosts(tmp_path, "gpu2", address, sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    if address.startswith("127."):
        interface = done.stdout.split()[-1]
        assert done.stdout.startswith("{'GLOO_SOCKET_IFNAME': ")
        assert "GLOO_SOCKET_IFNAME" in done.stderr and "127.0.1.1" in done.stderr and interface
    else:
        assert done.stdout.startswith("{} ") and done.stderr == ""
