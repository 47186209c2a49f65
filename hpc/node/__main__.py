"""The door of one Slurm task: `python -m hpc.node [flags] [JOB] [key=value ...] [-- command args ...]`.

Under srun, once per task: maps Slurm's variables to torchrun's and starts this task's workers. With --show it prints
what they would get and starts nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from hpc.node import signals

if __name__ == "__main__":
    signals.listen()  # before all that takes time: a notice counts from here on

from hpc.errors import EnvironmentMismatch, HpcError, UsageError, printable, report
from hpc.node import environment
from hpc.node.environment import TaskEnvironment
from hpc.node.placement import LAYOUTS
from hpc.quantities import signal_name
from hpc.ranks import Rendezvous
from hpc.rundir import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE, SECRET_VARIABLE, WORKDIR_VARIABLE

DOOR = "hpc.node"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (all flags: python -m hpc.node --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Start this task's workers and wait for them, or show their places; returns the door's exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    try:
        asked = _parser().parse_intermixed_args(words[:cut])
        job, overrides = _split(asked.words)
        command = words[cut + 1 :]
        if cut == len(words) - 1:
            raise UsageError("nothing follows --; a script and its arguments were needed")
        if command and (job is not None or overrides):
            raise UsageError(f"both {job or overrides[0]} and a command (after --) are given; leave one out")
        task = environment.read(
            os.environ,
            workers_per_node=asked.workers_per_node,
            layout=asked.layout,
            controlled=RUN_DIR_VARIABLE in os.environ and "SLURM_JOB_ID" in os.environ,
        )
        if asked.show or task.local_task == 0:
            for note in task.notes:
                print(f"{DOOR}: note: {printable(note)}", file=sys.stderr, flush=True)
        if asked.show:
            print(show(task, os.environ))
            return 0
        try:
            from hpc.node import life  # late: --show needs none of it
            from hpc.node.settings import AgentSettings
        except ModuleNotFoundError as error:
            return report(DOOR, error)

        code = os.getcwd()
        if WORKDIR_VARIABLE in os.environ:
            os.chdir(os.environ[WORKDIR_VARIABLE])  # imports still come from where this process was started
        settings = AgentSettings(
            job=job,
            overrides=overrides,
            command=command,
            preload=asked.preload,
            fork=asked.fork,
            rendezvous_timeout_s=asked.rendezvous_timeout,
            grace_s=asked.grace,
            allow_loopback=asked.allow_loopback,
            hang_timeout_s=asked.hang_timeout,
            slow_after_s=asked.slow_after,
            output_beats=asked.output_beats,
            cores_asked=asked.cores_asked,
            warning=signal.Signals[f"SIG{asked.warning}"],
            code=code,
        )
        return life.run(task, settings)
    except HpcError as error:
        return report(DOOR, error)


def show(task: TaskEnvironment, environ: Mapping[str, str]) -> str:
    """KEY=VALUE lines for each worker of this task, an empty line between two workers.

    The port is the first that would be tried; another one is agreed on where it is taken.

    Raises:
        EnvironmentMismatch: HPC_ATTEMPT is no number.
    """
    from hpc.node.rendezvous import candidate_ports

    attempt = environ.get(ATTEMPT_VARIABLE) or str(task.restart_count)
    if not attempt.isdecimal():
        raise EnvironmentMismatch(f"{ATTEMPT_VARIABLE}={attempt!r} is not a number; unset it")
    port = task.preset_port
    if port is None:
        port = candidate_ports(
            task.job_id, task.array_index, int(attempt), environ.get(SECRET_VARIABLE, ""), task.step_id
        )[0]
    rendezvous = Rendezvous(host=task.master_host, port=port)
    blocks = []
    for info in environment.rank_infos(task):
        values = info.to_environ(rendezvous, run_id=task.job_id or "none", attempt=int(attempt))
        if "CUDA_VISIBLE_DEVICES" in environ:
            values["CUDA_VISIBLE_DEVICES"] = environ["CUDA_VISIBLE_DEVICES"]
        blocks.append("\n".join(f"{name}={printable(value)}" for name, value in values.items()))
    return "\n\n".join(blocks)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m hpc.node",
        usage="%(prog)s [flags] [JOB] [key=value ...] [-- command args ...]",
        description="Under srun, once per task: start this task's workers, one per GPU, with torchrun's variables set.",
        allow_abbrev=False,
    )
    parser.add_argument("words", nargs="*", metavar="JOB key=value", help="jobs.NAME (default jobs.digits); settings")
    parser.add_argument("--show", action="store_true", help="print what the workers would get, and start nothing")
    parser.add_argument("--workers-per-node", type=_positive, metavar="N", help="workers, if not one per visible GPU")
    parser.add_argument("--layout", choices=LAYOUTS, help="default: by the tasks that Slurm started on each node")
    parser.add_argument(
        "--rendezvous-timeout", type=_seconds, default=600.0, metavar="S", help="how long ranks wait for each other"
    )
    parser.add_argument("--grace", type=_seconds, default=30.0, metavar="S", help="from a passed-on SIGTERM to SIGKILL")
    parser.add_argument(
        "--hang-timeout", type=_seconds, default=0.0, metavar="S", help="end a worker that makes no step for so long"
    )
    parser.add_argument(
        "--slow-after", type=_seconds, default=60.0, metavar="S", help="name a rank that is slower than others so long"
    )
    parser.add_argument(
        "--output-beats", action="store_true", help="what a worker prints counts as a step for --hang-timeout"
    )
    parser.add_argument(
        "--warning", type=_signal, default="USR2", metavar="SIGNAL", help="the notice that is passed on"
    )
    parser.add_argument(
        "--preload", action="append", default=[], metavar="MODULE", help="import it once, before the workers are forked"
    )
    parser.add_argument(
        "--no-fork", dest="fork", action="store_false", help="a fresh interpreter for each worker instead of a fork"
    )
    parser.add_argument(
        "--allow-loopback", action="store_true", help="several nodes may meet on a loopback address (simulated nodes)"
    )
    parser.add_argument("--cores-asked", type=_positive, metavar="N", help="warn when fewer cores may be used here")
    return parser


def _split(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The job, if one is named, and the key=value texts."""
    overrides = [word for word in words if "=" in word]
    jobs = [word for word in words if "=" not in word]
    if len(jobs) > 1:
        raise UsageError(f"{jobs[1]!r} is one word too many after {jobs[0]!r}; needs one JOB, key=value, or -- command")
    if jobs and ("/" in jobs[0] or jobs[0].endswith((".py", ".sh"))):
        raise UsageError(f"{jobs[0]} looks like a script; put -- before it: -- {jobs[0]}")
    return (jobs[0] if jobs else None), overrides


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 0 < int(text) < 1_000_000:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 1")
    return int(text)


def _signal(text: str) -> str:
    try:
        return signal_name(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not {error}") from None


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return seconds


if __name__ == "__main__":
    agent = os.getpid()
    status = main()
    if os.getpid() != agent:
        raise SystemExit(status)  # a script in a fork, with whatever it wants to do at its end
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the screen has gone, or its disk is full: no failure of the workers
            stream.flush()
    os._exit(status)  # taking an interpreter apart that has torch in it takes seconds
