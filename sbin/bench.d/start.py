"""From the command to the first step: launching, submitting, reading host lists, meeting; against what people use now."""

from __future__ import annotations

import json
import re
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import launches
import stub_slurm
from frame import RIVALS, ROOT, Bench, Measurement, NotMeasured, Row, alternating, compared, times

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


# --- from srun to the first step -------------------------------------------------------------------------------------

FIRST_STEP = "srun to the first DDP step, 1 x 8 ranks"
FIRST_STEP_2 = "srun to the first DDP step, 2 x 4 ranks"
TASK_PER_GPU = "the same, task-per-GPU layout"
TASK_PER_GPU_2 = "the same, task-per-GPU layout, 2 x 4"
RIVAL_NAMES = {"handwritten": "hand-written srun", "torchrun": "srun torchrun", "submitit": "submitit"}


def first_step(bench: Bench, nodes: int, workers: int, goal: float) -> Iterator[Row]:
    what, per_gpu = (FIRST_STEP, TASK_PER_GPU) if nodes == 1 else (FIRST_STEP_2, TASK_PER_GPU_2)
    names = ["ours", "handwritten", "ours-task-per-gpu", "torchrun", "submitit", "one-import", "srun-alone"]
    if bench.only.lower() in per_gpu.lower() and bench.only.lower() not in what.lower():
        names = ["handwritten", "ours-task-per-gpu"]
    elif bench.quick and nodes > 1:
        names.remove("ours-task-per-gpu")
    warm_up = 0 if bench.quick else 1
    schedule = [*names * warm_up, *alternating(names, bench.turns or (1 if bench.quick else 7))]
    found = launches.contest(bench, nodes, workers, schedule)
    seconds = {name: launches.values(found, name, "seconds", warm_up) for name in names}
    if "ours" in seconds:
        floor = statistics.median(seconds["one-import"])
        reason = (
            f"an empty srun takes {statistics.median(seconds['srun-alone']):.2f} s, and one task per node that only imports what "
            f"DDP needs {floor:.2f} s on one core; the rivals' imports use all cores of the node"
        )
        for rival, name in RIVAL_NAMES.items():
            yield compared(what, name, seconds["ours"], seconds[rival], goal, reason)
    if "ours-task-per-gpu" not in seconds:
        return
    ours, theirs = seconds["ours-task-per-gpu"], seconds["handwritten"]
    spread = f"ours {min(ours):.1f}-{max(ours):.1f} s, hand-written {min(theirs):.1f}-{max(theirs):.1f} s in {len(ours)} turns"
    yield compared(per_gpu, "hand-written srun", ours, theirs, 1.05, spread)


OPENED = "files opened on the shared path until the first step, 8 ranks"
READ = "bytes read on the shared path until the first step, 8 ranks"


def shared_path(bench: Bench) -> Iterator[Row]:
    found = launches.contest(bench, 1, 8, ["ours", "handwritten"], count=True)
    for what, key in ((OPENED, "opens"), (READ, "bytes")):
        ours, theirs = (launches.values(found, who, key)[0] for who in ("ours", "handwritten"))
        reason = f"{ours:,.0f} against {theirs:,.0f}; one rank of eight alone is {theirs / 8:,.0f}"
        yield Row(what=what, against="hand-written srun, counted", ratio=ours / theirs, goal=0.15, reason=reason)


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
    yield Row(
        what=NO_TORCH,
        against="--help and --dry-run, counted",
        ratio=count,
        goal=0,
        reason="python -X importtime shows who",
    )


def _importtime(argv: list[str], environ: dict[str, str], folder: Path) -> str:
    words = [argv[0], "-X", "importtime", *argv[1:]]
    done = subprocess.run(words, env=environ, cwd=folder, capture_output=True, text=True, check=False)
    return done.stderr


def _slowest_imports(argv: list[str], environ: dict[str, str], folder: Path) -> str:
    lines = re.findall(r"import time: +(\d+) \| +(\d+) \|( +)(\S+)", _importtime(argv, environ, folder))
    slowest = sorted(((int(total), name) for _, total, _, name in lines), reverse=True)[:4]
    return "the slowest imports: " + ", ".join(f"{name} {total / 1000:.0f} ms" for total, name in slowest)


# --- submitting ------------------------------------------------------------------------------------------------------

SUBMIT = "submitting, sbatch's own time taken off"


def submitting(bench: Bench) -> Iterator[Row]:
    """Whole processes, Python's start included, with a stub of sbatch."""
    stubs, work = stub_slurm.make(bench.scratch()), bench.scratch()
    environ = bench.environ()
    environ["PATH"] = f"{stubs}:{environ['PATH']}"
    shutil.copy(RIVALS / "first_step.py", work / "train.py")
    ours = [bench.python, "-m", "hpc.submit", "--nodes", "2", "--gpus-per-node", "4", "--time", "60"]
    ours += ["--allow-root", "--", "train.py"]
    theirs = [bench.python, str(RIVALS / "submitit_submit.py"), str(work / "submitit")]
    calls: dict[str, float] = {}

    def submit(name: str, argv: list[str]) -> float:
        begun = time.perf_counter()
        _call(argv, environ, work)
        whole = time.perf_counter() - begun
        calls[name] = stub_slurm.taken(stubs)
        return whole - calls[name]

    found = times(
        {"ours": lambda: submit("ours", ours), "submitit": lambda: submit("submitit", theirs)}, 3 if bench.quick else 11
    )
    reason = f"sbatch took {calls['ours']:.2f} s of ours (it also tests the request) and {calls['submitit']:.2f} s of submitit's; {_slowest_imports(ours, environ, work)}"
    yield compared(SUBMIT, "submitit's executor.submit", found["ours"], found["submitit"], 1.2, reason)


# --- host lists ------------------------------------------------------------------------------------------------------

HOST_LIST = "host list of 100,000 nodes"
FUZZED = "host list: fuzzed texts read otherwise"


def host_lists(bench: Bench) -> Iterator[Row]:
    script = str(PARTS / "hostlists.py")
    words = [bench.python, script, "time", "5" if bench.quick else "25"]
    for shape, seconds in json.loads(_call(words, bench.environ())).items():
        yield compared(
            f"{HOST_LIST}, {shape}",
            "submitit's parser",
            seconds["ours"],
            seconds["submitit"],
            1.0,
            "see hpc/slurm/nodelist.py",
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


def meetings(bench: Bench) -> Iterator[Row]:
    for ranks in (1024, 4096):
        words = [bench.python, str(PARTS / "stores.py"), "turns", str(ranks), "3" if bench.quick else "11"]
        found = json.loads(_call(bench.without_dns(words), bench.environ()))
        spread = ", ".join(f"{kind} {min(of):.3f}-{max(of):.3f} s" for kind, of in found.items())
        yield compared(f"{RENDEZVOUS}, {ranks:,}", "bare TCPStore", found["ours"], found["bare"], 1.25, spread)


def look_ups(bench: Bench) -> Iterator[Row]:
    """Counted with one rank and with 33, clients and store: openings of /etc/hosts, and questions to a name server."""
    if shutil.which("strace") is None:
        raise NotMeasured("needs strace: apt-get install strace")
    ranks = 32
    counts = {}
    for count in (1, ranks + 1):
        folder = bench.scratch()
        tracer = ["strace", "-ff", "-o", str(folder / "trace"), "-e", "trace=openat,connect"]
        _call([*tracer, bench.python, str(PARTS / "stores.py"), "alone", str(count)], bench.environ())
        text = "".join(path.read_text(errors="replace") for path in folder.iterdir())
        files = len(re.findall(r'"/etc/(?:hosts|resolv\.conf)"', text))
        counts[count] = files, len(re.findall(r"connect\(.*htons\(53\)", text))
    files, queries = ((after - before) / ranks for before, after in zip(counts[1], counts[ranks + 1], strict=True))
    reason = (
        f"torch's TCPStore asks for the name of each numeric address, for its log: {files:.2f} openings of /etc/hosts "
        f"per rank (client and store) and {queries:.2f} questions to a name server; the client runs in the user's process"
    )
    yield Row(what=LOOK_UPS, against="counted, client and store", ratio=files + queries, goal=0, reason=reason)


MEASUREMENTS = [
    Measurement([FIRST_STEP, TASK_PER_GPU], lambda bench: first_step(bench, 1, 8, 0.2), needs_slurm=True),
    Measurement([FIRST_STEP_2, TASK_PER_GPU_2], lambda bench: first_step(bench, 2, 4, 0.3), needs_slurm=True),
    Measurement([OPENED, READ], shared_path, needs_slurm=True),
    Measurement([HELP, DRY_RUN, NO_TORCH], doors),
    Measurement([SUBMIT], submitting),
    Measurement([HOST_LIST], host_lists),
    Measurement([FUZZED], fuzzed_host_lists),
    Measurement([RENDEZVOUS], meetings),
    Measurement([LOOK_UPS], look_ups),
]
