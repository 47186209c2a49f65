"""The real Slurm of sbin/devcluster, as tests use it: commands as the ordinary user, jobs, and what lives on the nodes."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "sbin" / "devcluster.d"))

import machine  # noqa: E402
from cluster_site import SYSTEM_PATH, USERS, Shape, Site  # noqa: E402

FIRST_USER, SECOND_USER = USERS
FINAL_STATES = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT",
}  # fmt: skip
# `scontrol show job` puts these alone on a line: their values may have blanks and equals signs.
_WHOLE_LINE = ("Command", "WorkDir", "StdErr", "StdIn", "StdOut", "Comment", "AdminComment", "Dependency")


def usual_number() -> int:
    """The cluster of this process: the one that people use, or 1, 2, ... where tests run side by side (pytest -n)."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    return Site.from_environment(os.environ).number if worker is None else 1 + int(worker.removeprefix("gw"))


def spare_number() -> int:
    """The cluster that tests of this process may break: 9, 8, ..."""
    return 9 - int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))


@dataclass(frozen=True)
class Process:
    """One process that lives on a node."""

    node: str
    pid: int
    command: str


@dataclass
class Rig:
    """One cluster. Commands run as the ordinary user on the login node, in `clone` unless told otherwise."""

    number: int = 0
    python: str = ""  # the interpreter of the jobs, which an ordinary user may run
    clone: Path | None = None
    jobs: list[str] = field(default_factory=list)  # cancelled after the test that submitted them
    tests_done: int = 0

    @property
    def site(self) -> Site:
        return Site(self.number)

    @property
    def shape(self) -> Shape:
        shape = self.site.saved_shape()
        assert shape is not None, "the cluster is down"
        return shape

    @property
    def node_names(self) -> list[str]:
        return [node.name for node in self.site.nodes(self.shape)]

    @property
    def slurm_conf(self) -> Path:
        return self.site.slurm_conf

    def home(self, user: str = FIRST_USER) -> Path:
        return Path(pwd.getpwnam(user).pw_dir)

    def state_folder(self, user: str = FIRST_USER) -> Path:
        """Where the toolkit remembers things between runs: a new one for each test, also beside other clusters' tests."""
        return self.home(user) / ".state-of-tests" / f"{self.number}-{os.getpid()}-{self.tests_done}"

    def daemon(self, name: str) -> int:
        """The process id of a daemon: "slurmctld", "slurmd-node1"."""
        pid = machine.running(self.site.pid_file(name))
        assert pid is not None, f"{name} does not run"
        return pid

    # --- commands ----------------------------------------------------------------------------------------------------

    def devcluster(
        self, *words: str, check: bool = True, timeout: float = 150.0, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """sbin/devcluster itself, as root."""
        environment = {**os.environ, "HPC_DEVCLUSTER_NUMBER": str(self.number)}
        if self.python:
            environment["HPC_DEVCLUSTER_VENV"] = str(Path(self.python).parent.parent)
        done = _finish([sys.executable, str(ROOT / "sbin" / "devcluster"), *words], environment, cwd or ROOT, timeout)
        if check and done.returncode != 0:
            raise AssertionError(f"devcluster {' '.join(words)} exited {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    def run(
        self,
        argv: Sequence[str | Path],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 60.0,
        user: str = FIRST_USER,
        check: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """A command as an ordinary user on the login node; env comes on top of a clean environment.

        Raises:
            AssertionError: it took longer than `timeout` seconds, or `check` and its exit code is not 0.
        """
        variables = {"XDG_STATE_HOME": str(self.state_folder(user)), **(env or {})}
        words = ["run", "--user", user, "--", "env", *(f"{name}={text}" for name, text in variables.items())]
        return self.devcluster(
            *words, *map(str, argv), check=check, timeout=timeout, cwd=cwd or self.clone or self.home(user)
        )

    def slurm(self, *argv: str) -> str:
        """A Slurm command as root."""
        environment = {"PATH": SYSTEM_PATH, "SLURM_CONF": str(self.slurm_conf), "LC_ALL": "C.UTF-8"}
        done = _finish(argv, environment, Path("/"), 60.0)
        if done.returncode != 0:
            raise AssertionError(f"{' '.join(argv)} exited {done.returncode}: {done.stderr}")
        return done.stdout

    # --- jobs --------------------------------------------------------------------------------------------------------

    def sbatch(
        self,
        *argv: str | Path,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        user: str = FIRST_USER,
    ) -> str:
        """Submit; the job id. The job is cancelled after the test."""
        done = self.run(["sbatch", "--parsable", *argv], cwd=cwd, env=env, user=user, check=True)
        return self.track(done.stdout.strip().split(";")[0])

    def track(self, job_id: str) -> str:
        """Cancel this job, which the test submitted in its own way, after the test."""
        self.jobs.append(job_id)
        return job_id

    def job(self, job_id: str | int) -> dict[str, str]:
        """`scontrol show job` as a dictionary; of an array, its first record."""
        record: dict[str, str] = {}
        for line in self.slurm("scontrol", "show", "job", str(job_id)).split("\n\n")[0].splitlines():
            line = line.strip()
            key, _, value = line.partition("=")
            if key in _WHOLE_LINE:
                record[key] = value
                continue
            if line.startswith("JobId="):  # the job's name ends this line and may have blanks
                line, _, record["JobName"] = line.partition(" JobName=")
            record.update(pair.split("=", 1) for pair in line.split() if "=" in pair)
        return record

    def state(self, job_id: str | int) -> str:
        return self.job(job_id)["JobState"]

    def wait(self, job_id: str | int, timeout: float = 120.0) -> str:
        """The final state of the job: one that it has, twice in a row, and is not about to leave for a requeue."""
        before = ""
        deadline = time.monotonic() + timeout
        while True:
            state = self.state(job_id)
            if state in FINAL_STATES and state == before:
                return state
            before = state
            if time.monotonic() > deadline:
                raise AssertionError(f"job {job_id} is {state} after {timeout:.0f} s\n{self.report(job_id)}")
            time.sleep(0.5)

    def wait_for_state(self, job_id: str | int, *states: str, timeout: float = 60.0) -> str:
        """Wait until the job is in one of these states."""
        deadline = time.monotonic() + timeout
        while (state := self.state(job_id)) not in states:
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"job {job_id} is {state}, not {states}, after {timeout:.0f} s\n{self.report(job_id)}"
                )
            time.sleep(0.2)
        return state

    def output(self, job_id: str | int) -> str:
        """What the job wrote to its standard output so far."""
        path = Path(re.sub("%[jJA]", str(job_id), self.job(job_id).get("StdOut", "/dev/null")))
        return path.read_text(errors="replace") if path.is_file() else ""

    def report(self, job_id: str | int) -> str:
        """The job and the end of its output, for the message of a failed test."""
        return f"{self.job(job_id)}\n--- output:\n{self.output(job_id)[-4000:]}"

    def cancel_jobs(self) -> None:
        """Cancel what was submitted since the last call, and wait until the nodes are free of it."""
        while self.jobs:
            job_id = self.jobs.pop()
            if re.search(rf"^JobId={re.escape(job_id)}\b", self._all_jobs(), re.MULTILINE):
                self.slurm("scancel", "--quiet", job_id)
                self.wait(job_id, timeout=30)

    def _all_jobs(self) -> str:
        return self.slurm("scontrol", "show", "job", "--all", "-o")

    # --- nodes -------------------------------------------------------------------------------------------------------

    def node_state(self, node: str) -> str:
        found = re.search(r"\bState=(\S+)", self.slurm("scontrol", "show", "node", node))
        assert found
        return found[1]

    def processes_of(self, user: str = FIRST_USER) -> list[Process]:
        """Every process of this user that lives on a node, daemonised ones too."""
        return [process for process in self.processes() if _owner(process.pid) == pwd.getpwnam(user).pw_uid]

    def processes(self) -> list[Process]:
        """Every process that lives on a node."""
        spaces = {_identity(node.namespace_path): node.name for node in self.site.nodes(self.shape)}
        found = []
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            node = spaces.get(_identity(Path(f"/proc/{pid}/ns/net")) or (0, 0))
            if node is not None:
                found.append(Process(node, pid, _command(pid)))
        return found


def _finish(
    argv: Sequence[str], environment: Mapping[str, str], cwd: Path, timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run to the end; after the timeout the whole process group is killed and its words are told."""
    child = subprocess.Popen(
        argv, env=dict(environment), cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, errors="replace", start_new_session=True, restore_signals=False,
    )  # fmt: skip
    try:
        out, err = child.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        out, err = child.communicate()
        raise AssertionError(f"{list(argv)} did not end in {timeout:.0f} s\n{out}{err}") from None
    return subprocess.CompletedProcess(list(argv), child.returncode, out, err)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # process 1 of a container may be closed to root
        return None
    return found.st_dev, found.st_ino


def _owner(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except FileNotFoundError:
        return None


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


# --- what the ordinary user gets -------------------------------------------------------------------------------------


def make_clone(home: Path, owner: str) -> Path:
    """A copy of this checkout, as a clone with the changes of today would be, in a folder whose name is not plain."""
    clone = home / f"klön {os.getpid()}"
    shutil.rmtree(clone, ignore_errors=True)
    for name in _project_files():
        source, target = ROOT / name, clone / name
        if source.is_file() or source.is_symlink():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    give_to(clone, owner)
    return clone


def _project_files() -> list[str]:
    """Tracked files and new ones that git does not ignore; from an unpacked archive, all files."""
    git = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(git, cwd=ROOT, capture_output=True, check=False) if shutil.which("git") else None
    if done is not None and done.returncode == 0:
        return [name for name in os.fsdecode(done.stdout).split("\0") if name]
    left_out = {".git", ".venv", "__pycache__", "build", "runs"}
    files = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
    return [str(path) for path in files if not left_out & set(path.parts)]


def give_to(folder: Path, owner: str) -> None:
    """The folder and everything in it belongs to the user."""
    user = pwd.getpwnam(owner)
    for top, _, files in os.walk(folder):
        for path in (top, *(os.path.join(top, name) for name in files)):
            os.chown(path, user.pw_uid, user.pw_gid, follow_symlinks=False)


def python_for_jobs(rig: Rig) -> str:
    """An interpreter with the project's dependencies that an ordinary user may run."""
    chosen = os.environ.get("HPC_DEVCLUSTER_VENV")
    if chosen:
        return f"{chosen}/bin/python"
    imports = "import torch, submitit, omegaconf, psutil, sklearn"
    done = rig.run([sys.executable, "-c", imports], cwd=Path("/"), timeout=120)
    if done.returncode == 0:
        return sys.executable
    return rig.devcluster("venv", timeout=1800).stdout.strip() + "/bin/python"
