"""From the command to the first step: launching, submitting, reading host lists, meeting; against what people use now."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from frame import RIVALS, ROOT, Bench, Measurement, NotMeasured, Row, compared, times

PARTS = ROOT / "sbin" / "bench.d" / "parts"


def _call(argv: list[str], environ: dict[str, str], cwd: Path = ROOT, limit_s: float = 900.0) -> str:
    """Standard output of a command that has to succeed.

    Raises:
        NotMeasured: it did not; its last line.
    """
    try:
        done = subprocess.run(
            argv, env=environ, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=limit_s, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotMeasured(str(error)) from None
    if done.returncode != 0:
        words = done.stderr.strip().splitlines() or ["no word on its standard error"]
        raise NotMeasured(f"{' '.join(argv)[:120]} exited {done.returncode}: {words[-1]}")
    return done.stdout


# --- the doors of the login node -------------------------------------------------------------------------------------

HELP = "python -m hpc.submit --help"
DRY_RUN = "python -m hpc.submit --dry-run"
NO_TORCH = "modules of torch that hpc.submit imports"


def doors(bench: Bench) -> Iterator[Row]:
    python, environ, folder = bench.python, bench.environ(), bench.scratch()
    torchrun = Path(python).parent / "torchrun"
    launcher = [str(torchrun)] if torchrun.exists() else [python, "-m", "torch.distributed.run"]
    dry_run = [python, "-m", "hpc.submit", "--dry-run", "--nodes", "2", "--gpus-per-node", "4"]
    commands = {
        "help": [python, "-m", "hpc.submit", "--help"],
        "dry-run": dry_run,
        "torchrun --help": [*launcher, "--help"],
        'python -c "import submitit, omegaconf"': [python, "-c", "import submitit, omegaconf"],
    }

    def run(argv: list[str]) -> None:
        _call(argv, environ, folder)

    found = times({name: lambda argv=argv: run(argv) for name, argv in commands.items()}, 3 if bench.quick else 11)
    for ours, what, goal in (("help", HELP, 1 / 12), ("dry-run", DRY_RUN, 1 / 8)):
        for rival, limit in (("torchrun --help", goal), ('python -c "import submitit, omegaconf"', None)):
            yield compared(what, rival, found[ours], found[rival], limit, _slowest_imports(dry_run, environ, folder))
    count = sum(
        len(re.findall(r"\| +torch(?:\.\S+)?$", _importtime(argv, environ, folder), re.MULTILINE))
        for argv in (commands["help"], dry_run)
    )
    yield Row(what=NO_TORCH, against="--help and --dry-run, counted", ratio=count, goal=0, reason="python -X importtime shows who")


def _importtime(argv: list[str], environ: dict[str, str], folder: Path) -> str:
    words = [argv[0], "-X", "importtime", *argv[1:]]
    done = subprocess.run(words, env=environ, cwd=folder, capture_output=True, text=True, check=False)
    return done.stderr


def _slowest_imports(argv: list[str], environ: dict[str, str], folder: Path) -> str:
    lines = re.findall(r"import time: +(\d+) \| +(\d+) \|( +)(\S+)", _importtime(argv, environ, folder))
    slowest = sorted(((int(total), name) for _, total, _, name in lines), reverse=True)[:4]
    return "--dry-run's imports: " + ", ".join(f"{name} {total / 1000:.0f} ms" for total, name in slowest)


# --- host lists ------------------------------------------------------------------------------------------------------

HOST_LIST = "host list of 100,000 nodes"
FUZZED = "host list: fuzzed texts read otherwise"


def host_lists(bench: Bench) -> Iterator[Row]:
    script = str(PARTS / "hostlists.py")
    words = [bench.python, script, "time", "5" if bench.quick else "25"]
    for shape, seconds in json.loads(_call(words, bench.environ())).items():
        yield compared(
            f"{HOST_LIST}, {shape}", "submitit's parser", seconds["ours"], seconds["submitit"], 1.0, "see hpc/slurm/nodelist.py"
        )


def fuzzed_host_lists(bench: Bench) -> Iterator[Row]:
    words = [bench.python, str(PARTS / "hostlists.py"), "fuzz", "500" if bench.quick else "10000"]
    found = json.loads(_call(words, bench.environ()))
    yield Row(
        what=f"{FUZZED}, of {found['texts']}",
        against="scontrol show hostnames",
        ratio=found["different"],
        goal=0,
        reason=f"the first: {found['first']!r}",
    )


# --- rendezvous ------------------------------------------------------------------------------------------------------

RENDEZVOUS = "rendezvous of simulated ranks"
LOOK_UPS = "name look-ups per rank"


class _Served:
    """A store in a process of its own, gone at the end of the block."""

    def __init__(self, bench: Bench, kind: str) -> None:
        self._process = subprocess.Popen(
            [bench.python, str(PARTS / "stores.py"), "serve", kind],
            env=bench.environ(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().split()

    def __enter__(self) -> list[str]:
        if len(self.address) != 2:
            raise NotMeasured("the store did not start")
        return self.address

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


def rendezvous(bench: Bench) -> Iterator[Row]:
    def meet(kind: str, ranks: int) -> float:
        with _Served(bench, kind) as address:
            words = [bench.python, str(PARTS / "stores.py"), "meet", *address, str(ranks), "4"]
            return float(_call(words, bench.environ()))

    for ranks in (1024, 4096):
        contestants = {kind: lambda kind=kind: meet(kind, ranks) for kind in ("ours", "bare")}
        found = times(contestants, 3 if bench.quick else 9, warm_up=False)
        spread = ", ".join(f"{kind} {min(of):.3f}-{max(of):.3f} s" for kind, of in found.items())
        yield compared(f"{RENDEZVOUS}, {ranks:,}", "bare TCPStore", found["ours"], found["bare"], 1.25, f"spread {spread}")


MEASUREMENTS = [
    Measurement([HELP, DRY_RUN, NO_TORCH], doors),
    Measurement([HOST_LIST], host_lists),
    Measurement([FUZZED], fuzzed_host_lists),
    Measurement([RENDEZVOUS], rendezvous),
]
