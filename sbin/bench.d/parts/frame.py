"""What every benchmark shares: rows and their table, contestants in alternating order, and the run's resources."""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent.parent
RIVALS = ROOT / "sbin" / "bench.d" / "rivals"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table. `ratio` is ours over theirs, or a count where the goal is a count."""

    what: str
    against: str
    ratio: float
    goal: float | None
    """None: printed for comparison only."""
    ours_s: float | None = None
    theirs_s: float | None = None
    reason: str = ""
    """Where a goal is missed: what was found by measuring."""

    @property
    def met(self) -> bool | None:
        return None if self.goal is None else self.ratio <= self.goal

    def to_json(self) -> dict[str, Any]:
        """The row as in the file: a reason only where there is a goal that was missed."""
        shown = {**asdict(self), "met": self.met}
        if self.met is not False:
            shown["reason"] = ""
        return shown


class NotMeasured(Exception):
    """Why some rows could not be measured, in one line."""


@dataclass(frozen=True)
class Measurement:
    """Some rows that are measured together. `rows` are their texts, for --only and for what needs a machine."""

    rows: Sequence[str]
    run: Callable[[Bench], Iterable[Row]]
    needs_slurm: bool = False


@dataclass
class Bench:
    """One run of a benchmark: its options, the interpreter of the contestants, and a folder that is removed after it."""

    quick: bool = False
    only: str = ""
    turns: int | None = None
    """How often each launch is measured; None: as the benchmark has it."""
    failed: bool = False
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _python: str = ""
    _rig: Any = None
    _no_dns: list[str] | None = None

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def python(self) -> str:
        """An interpreter with the project's dependencies: HPC_PYTHON, .venv's, or the one that runs this.

        Raises:
            NotMeasured: none has torch.
        """
        if not self._python:
            candidates = [os.environ.get("HPC_PYTHON", ""), str(ROOT / ".venv" / "bin" / "python"), sys.executable]
            for python in filter(None, candidates):
                found = shutil.which(python)
                test = [found or "", "-c", "from importlib.util import find_spec as f; f('torch').name"]
                if found and subprocess.run(test, capture_output=True, check=False).returncode == 0:
                    self._python = found
                    self._compile(ROOT)
                    break
            else:
                raise NotMeasured("no Python with torch: run sbin/quickstart once, or name one with HPC_PYTHON")
        return self._python

    def _compile(self, project: Path) -> None:
        """The toolkit's modules as an installation leaves them, with their byte code, like the rivals' packages."""
        words = ["-m", "compileall", "-q", str(project / "hpc"), str(project / "jobs")]
        subprocess.run([self._python, *words], capture_output=True, check=False)  # a tree that is read-only stays so

    def scratch(self) -> Path:
        """A new folder, gone after the run."""
        return Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="hpc-bench-")))

    def environ(self, **more: str) -> dict[str, str]:
        """The environment of a contestant: nothing of an outer job, one thread per process, the project importable."""
        foreign = ("SLURM", "SBATCH", "SRUN", "HPC_", "TORCH", "MASTER_", "PYTHON")
        kept = {name: text for name, text in os.environ.items() if not name.startswith(foreign) or name == "SLURM_CONF"}
        return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HPC_SITE_CONFIG": "", **more}

    def without_dns(self, argv: Sequence[str]) -> list[str]:
        """The command where host names come from /etc/hosts alone: a slow name server would be all that is measured.

        Where this user may not have a mount namespace, the command as it is.
        """
        if self._no_dns is None:
            lines = (
                Path("/etc/nsswitch.conf").read_text(encoding="utf-8").splitlines()
                if Path("/etc/nsswitch.conf").exists()
                else []
            )
            switch = self.scratch() / "nsswitch.conf"
            switch.write_text(
                "\n".join([*(line for line in lines if not line.startswith("hosts:")), "hosts: files", ""])
            )
            unshare = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
            mounted = [*unshare, "sh", "-c", 'mount --bind "$0" /etc/nsswitch.conf && exec "$@"', str(switch)]
            works = (
                shutil.which("unshare")
                and subprocess.run([*mounted, "true"], capture_output=True, check=False).returncode == 0
            )
            self._no_dns = mounted if works else []
        return [*self._no_dns, *argv]

    def rig(self) -> Any:
        """The dev cluster as the tests use it (cluster_rig.Rig); brought up when it is down, and then down again after.

        Raises:
            NotMeasured: this machine cannot have one.
        """
        if self._rig is None:
            if os.geteuid() != 0 or shutil.which("apt-get") is None:
                raise NotMeasured("needs a real Slurm: be root on Debian, sbin/devcluster then makes one")
            sys.path.insert(0, str(ROOT / "tests" / "cluster"))
            import cluster_rig

            rig = cluster_rig.Rig(cluster_rig.usual_number(), clone=Path("/"))
            if rig.site.saved_shape() is None:
                self._stack.callback(rig.devcluster, "down", check=False)
            if rig.devcluster("status", check=False).returncode != 0:
                rig.devcluster("up", *([] if rig.site.saved_shape() else ["--nodes", "3"]), timeout=900)
            os.environ["SLURM_CONF"] = str(rig.slurm_conf)
            rig.python = self.python if self._works_for_user(rig) else cluster_rig.python_for_jobs(rig)
            if rig.run(["test", "-r", str(ROOT / "sbin" / "bench")]).returncode == 0:
                rig.clone = ROOT
            else:
                rig.clone = cluster_rig.make_clone(rig.home(), cluster_rig.FIRST_USER)
                self._compile(rig.clone)
                self._stack.callback(shutil.rmtree, rig.clone, ignore_errors=True)
            self._stack.callback(rig.cancel_jobs)
            self._rig = rig
        return self._rig

    def _works_for_user(self, rig: Any) -> bool:
        test = [self.python, "-c", "import torch, submitit, omegaconf, psutil"]
        return bool(rig.run(test, timeout=120).returncode == 0)

    def at_end(self, act: Callable[[], object]) -> None:
        """Do this when the run of the benchmark is over."""
        self._stack.callback(act)

    def user_folder(self) -> Path:
        """A new folder of the cluster's ordinary user, gone after the run."""
        rig = self.rig()
        folder = Path(tempfile.mkdtemp(prefix="bench-", dir=rig.home()))
        self._stack.callback(shutil.rmtree, folder, ignore_errors=True)
        owner = rig.home().stat()
        os.chown(folder, owner.st_uid, owner.st_gid)
        return folder


def alternating(names: Sequence[str], rounds: int) -> list[str]:
    """The order of the contestants, A B C C B A: none has always the same neighbour, nor always the warmer machine."""
    return [name for turn in range(rounds) for name in (names if turn % 2 == 0 else list(reversed(names)))]


def times(
    contestants: Mapping[str, Callable[[], float | None]], rounds: int, warm_up: bool = True
) -> dict[str, list[float]]:
    """Seconds of each contestant, alternating, after one turn each that does not count.

    A contestant returns the seconds that count; None stands for the whole call.
    """
    found: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for turn, name in enumerate([*(names if warm_up else []), *alternating(names, rounds)]):
        begun = time.perf_counter()
        seconds = contestants[name]()
        if seconds is None:
            seconds = time.perf_counter() - begun
        if not warm_up or turn >= len(names):
            found[name].append(seconds)
    return found


def compared(
    what: str, against: str, ours: Sequence[float], theirs: Sequence[float], goal: float | None, reason: str = ""
) -> Row:
    """A row of medians; `reason` is shown where the goal is missed."""
    us, them = statistics.median(ours), statistics.median(theirs)
    ratio = us / them if them else float("inf")
    return Row(what=what, against=against, ratio=ratio, goal=goal, ours_s=us, theirs_s=them, reason=reason)


def measure(measurements: Sequence[Measurement], bench: Bench) -> Iterator[list[Row]]:
    """The rows that --only asks for, group by group; one line on the screen for each group that cannot be measured here."""
    for one in measurements:
        print(f"measuring: {'; '.join(one.rows)}", file=sys.stderr, flush=True)
        try:
            if one.needs_slurm:
                bench.rig()
            found = list(one.run(bench))
        except Exception as why:  # an hour's other rows are not to be lost by a fault of one
            bench.failed = True
            if not isinstance(
                why, (NotMeasured, AssertionError)
            ):  # how this benchmark and the dev cluster's rig tell it
                traceback.print_exc()
            words = str(why).strip().splitlines() or [type(why).__name__]
            print(f"not measured: {'; '.join(one.rows)}: {words[0][:300]}", file=sys.stderr, flush=True)
            continue
        yield [row for row in found if bench.only.lower() in row.what.lower()]


def table(rows: Sequence[Row]) -> str:
    """The rows as text; the reason of a missed goal on a line of its own."""
    cells = [("what", "against", "ours", "theirs", "ratio", "goal", "")]
    for row in rows:
        verdict = {None: "", True: "met", False: "MISSED"}[row.met]
        goal = "-" if row.goal is None else f"{row.goal:.3g}"
        cells.append(
            (row.what, row.against, _seconds(row.ours_s), _seconds(row.theirs_s), f"{row.ratio:.3g}", goal, verdict)
        )
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    lines = []
    for number, line in enumerate(cells):
        padded = [
            text.ljust(width) if column < 2 else text.rjust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
        if number and rows[number - 1].met is False:
            lines.append(f"    reason: {rows[number - 1].reason or 'not looked into'}")
    judged = [row for row in rows if row.goal is not None]
    lines.append(f"{sum(row.met is True for row in judged)} of {len(judged)} goals met")
    return "\n".join(lines)


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.3g} s" if seconds >= 0.1 else f"{seconds * 1000:.3g} ms"
