"""Runs inside one allocation, in its batch script: starts each contestant in turn, and takes the time to the last rank.

    python contest.py --workers 8 --schedule ours,handwritten,handwritten,ours --out FILE [--count]

Writes one JSON list, a dictionary per run: {"who", "seconds"}, with --count {"who", "opens", "bytes"} instead, and
"error" where a contestant did not bring all ranks through their first step. Times are from just before srun is
executed to the last rank's first finished step; all nodes of the dev cluster have this machine's clock.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

RIVALS = Path(__file__).resolve().parent.parent / "rivals"
PRELOADED = "import gc, os; gc.disable(); import torch.distributed, torch.nn.parallel, torch.utils.data, torch._dynamo; os._exit(0)"
LIMIT_S = 240.0


class Allocation:
    """The job that this batch script runs in."""

    def __init__(self, workers: int, scratch: Path) -> None:
        self.workers, self.scratch = workers, scratch
        self.job_id = os.environ["SLURM_JOB_ID"]
        self.nodes = int(os.environ["SLURM_JOB_NUM_NODES"])
        hosts = subprocess.run(
            ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        self.master = hosts.stdout.split()[0]
        self.port = 20000 + int(self.job_id) % 10000
        self.one_task_per_node = [
            f"--nodes={self.nodes}",
            f"--ntasks={self.nodes}",
            "--ntasks-per-node=1",
            f"--cpus-per-task={workers}",
        ]

    def command(self, who: str, number: int, tracer: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """The contestant's srun line, and its environment. `tracer` goes in front of each task's interpreter."""
        environ = dict(os.environ)
        folder = self.scratch / f"{number}-{who}"
        if who in ("ours", "ours-task-per-gpu"):
            return self._ours("task-per-node" if who == "ours" else "task-per-gpu", folder, tracer)
        environ |= {"MASTER_ADDR": self.master, "MASTER_PORT": str(self.port + number)}
        python = sys.executable
        if who == "handwritten":
            argv = ["srun", "--kill-on-bad-exit=1", *tracer, python, str(RIVALS / "handwritten.py")]
        elif who == "torchrun":
            torchrun = str(Path(python).parent / "torchrun")
            words = [f"--nnodes={self.nodes}", f"--nproc-per-node={self.workers}", "--rdzv-backend=c10d"]
            words += [f"--rdzv-endpoint={self.master}:{self.port + number}", f"--rdzv-id={self.job_id}-{number}"]
            argv = ["srun", *self.one_task_per_node, *tracer, torchrun, *words, str(RIVALS / "first_step.py")]
        elif who == "submitit":
            sys.path.insert(0, str(RIVALS))
            import submitit_step

            for name in ("MASTER_ADDR", "MASTER_PORT"):
                del environ[name]  # submitit chooses them itself
            argv = submitit_step.prepare(folder, self.job_id, python)
            environ |= {"SUBMITIT_EXECUTOR": "slurm", "PYTHONPATH": str(RIVALS), "MASTER_PORT": str(self.port + number)}
        elif who == "srun-alone":
            argv = ["srun", *self.one_task_per_node, "true"]
        elif who == "one-import":
            argv = ["srun", *self.one_task_per_node, python, "-c", PRELOADED]
        else:
            raise SystemExit(f"contest: no contestant {who!r}")
        return argv, environ

    def _ours(self, layout: str, folder: Path, tracer: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """The line and the environment of hpc.launch for `-- first_step.py` in this allocation, by its own code."""
        from hpc import config
        from hpc.allocation import allocation, controller, step
        from hpc.rundir import RunDirectory

        loaded = config.load(
            command=[str(RIVALS / "first_step.py")],
            overrides=[f"launch.layout={layout}", f"launch.workers_per_node={self.workers}"],
            site=False,
        )
        run_dir = RunDirectory.create(folder.parent, folder.name)
        control = controller.Controller(allocation.read(os.environ), loaded, run_dir)
        control.folder.mkdir(mode=0o700)
        agent = step.agent_command(control.step, loaded, control.python)
        environ = step.agent_environ(control.step, loaded, control.told())
        return step.step_command(control.step, [*tracer, *agent]), environ


def run_one(allocation: Allocation, who: str, number: int, count: bool) -> dict[str, object]:
    """One contestant, once."""
    stamps = allocation.scratch / f"{number}-stamps"
    traces = allocation.scratch / f"{number}-traces"
    stamps.mkdir()
    traces.mkdir()
    tracer = ["strace", "-ff", "--seccomp-bpf", "-ttt", "-y", "-s0", "-etrace=open,openat,read,pread64"]
    tracer = [*tracer, "-o", str(traces / "trace")] if count else []
    argv, environ = allocation.command(who, number, tracer)
    environ |= {"BENCH_STAMPS": str(stamps), "OMP_NUM_THREADS": "1"}
    log = allocation.scratch / f"{number}-{who}.log"
    with log.open("wb") as screen:
        begun = time.time()
        child = subprocess.Popen(argv, env=environ, stdin=subprocess.DEVNULL, stdout=screen, stderr=screen)
        try:
            code = child.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            child.terminate()
            code = child.wait()
    ended = time.time()
    if who in ("srun-alone", "one-import"):
        return {"who": who, "seconds": ended - begun} if code == 0 else {"who": who, "error": f"exit code {code}"}
    steps = [path.read_text().split() for path in stamps.iterdir()]
    ranks = allocation.nodes * allocation.workers
    if code != 0 or len(steps) != ranks:
        words = " | ".join(log.read_text(errors="replace").splitlines()[-6:])
        return {"who": who, "error": f"exit code {code}, {len(steps)} of {ranks} ranks made a step: {words}"}
    last = max(float(done) for done, _ in steps)
    if not count:
        return {"who": who, "seconds": last - begun}
    import opens

    shared = [Path(sys.prefix), RIVALS.parent.parent.parent]
    counted = opens.count(sorted(traces.iterdir()), [str(path) for path in shared], last)
    return {"who": who, "opens": counted.opens, "bytes": counted.read_bytes}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--schedule", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", action="store_true")
    asked = parser.parse_args()
    allocation = Allocation(asked.workers, asked.out.parent)
    found = [
        run_one(allocation, who, number, asked.count) for number, who in enumerate(asked.schedule.split(","), start=1)
    ]
    beside = asked.out.with_suffix(".new")
    beside.write_text(json.dumps(found))
    beside.replace(asked.out)


if __name__ == "__main__":
    main()
