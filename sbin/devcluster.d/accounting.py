"""The database behind sacct: a private MariaDB on a socket of its own, and slurmdbd before it."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import machine
from cluster_site import SYSTEM_PATH, DevclusterError, Site, slurmdbd_conf

PROGRAMS = {
    "slurmdbd": "slurmdbd",
    "mariadbd": "mariadb-server-core",
    "mariadb-install-db": "mariadb-server-core",
    "my_print_defaults": "mariadb-client-core",
}
DAEMONS = ("slurmdbd", "mariadbd")  # in the order in which they are stopped


def ensure(site: Site, login_host: str) -> None:
    """MariaDB and slurmdbd run and answer; the cluster is known to them."""
    machine.require_programs(PROGRAMS)
    _ensure_mariadb(site)
    conf = site.slurm_conf.with_name("slurmdbd.conf")
    if not conf.exists() or conf.read_text() != slurmdbd_conf(site, login_host):
        conf.touch(mode=0o600)
        conf.write_text(slurmdbd_conf(site, login_host))
        machine.stop(site, "slurmdbd")
    if machine.running(site.pid_file("slurmdbd")) is None:
        database = {"SLURM_CONF": str(site.slurm_conf), "MYSQL_UNIX_PORT": str(_socket(site))}
        machine.start(site, "slurmdbd", ["slurmdbd", "-D"], database)
    _add_cluster(site)


def _socket(site: Site) -> Path:
    return site.state / "mariadb" / "mariadb.sock"


def _ensure_mariadb(site: Site) -> None:
    folder = site.state / "mariadb"
    data = folder / "data"
    folder.mkdir(mode=0o700, exist_ok=True)
    if not data.exists():
        half = folder / "data.new"  # renamed when it is whole: `up` may be killed in between
        shutil.rmtree(half, ignore_errors=True)
        install = ["mariadb-install-db", "--no-defaults", f"--datadir={half}", "--user=root", "--skip-test-db"]
        machine.call([*install, "--auth-root-authentication-method=socket"], timeout=120)
        half.rename(data)
    if machine.running(site.pid_file("mariadbd")) is None:
        _socket(site).unlink(missing_ok=True)
        options = [
            f"--datadir={data}",
            f"--socket={_socket(site)}",
            f"--pid-file={folder}/own.pid",
            "--skip-networking",
        ]
        machine.start(site, "mariadbd", ["mariadbd", "--no-defaults", "--user=root", *options])
    deadline = time.monotonic() + 30
    while not _socket(site).exists():  # slurmdbd waits 5 s when it comes too early
        if machine.running(site.pid_file("mariadbd")) is None or time.monotonic() > deadline:
            raise DevclusterError(f"MariaDB did not start; see {site.log_file('mariadbd.out')}")
        time.sleep(0.05)


def _add_cluster(site: Site) -> None:
    """Wait until slurmdbd answers, which takes seconds when it makes its tables, and make the cluster known to it."""
    environment = {"PATH": SYSTEM_PATH, "SLURM_CONF": str(site.slurm_conf), "LC_ALL": "C.UTF-8"}
    deadline = time.monotonic() + 60
    while True:
        done = subprocess.run(
            ["sacctmgr", "-i", "add", "cluster", site.cluster_name],
            env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        words = " ".join((done.stdout + done.stderr).split())
        if done.returncode == 0 or "already exists" in words:
            return
        if time.monotonic() > deadline:
            raise DevclusterError(f"slurmdbd does not answer: {words}; see {site.log_file('slurmdbd')}")
        time.sleep(0.5)
