"""The worker's door: `python -m hpc.train [JOB] [key=value ...] [--config FILE]`; one process per rank.

Runs alone, under torchrun, or as the node agent's child. The configuration is HPC_CONFIG when the controller handed
one on; otherwise it is read as `hpc.submit` reads it.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import importlib
import io
import logging
import os
import re
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from hpc.train import notice

if __name__ == "__main__":
    notice.listen()  # before torch is imported, which takes seconds

import torch.distributed

from hpc import exitcodes
from hpc.beats import show_stacks_on_request
from hpc.config import Loaded, load, load_text
from hpc.errors import ConfigError, HpcError, printable_lines, report
from hpc.ranks import from_environ
from hpc.rundir import WORKDIR_VARIABLE, RunDirectory, directory_name, new_run_id, run_name, write_private
from hpc.train.distributed import RankZeroFailed, World, connect
from hpc.train.errorfile import ErrorFile
from hpc.train.job import TrainingJob
from hpc.train.limit import TimeLimit
from hpc.train.loader import end_workers
from hpc.train.loop import Outcome
from hpc.train.progress import Progress, duration, figure, progress_for
from hpc.train.start import train
from hpc.train.stop import Stop

DOOR = "hpc.train"
log = logging.getLogger("hpc.train")


def main(argv: Sequence[str] | None = None) -> int:
    """Train; returns the exit code. Safe to call in a forked child: importing this module starts nothing.

    75 (exitcodes.WANTS_ANOTHER_ATTEMPT) on every rank when a notice stopped the run before its end.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    _become_agent_in_a_bare_task(words)
    if os.environ.get(WORKDIR_VARIABLE):
        os.chdir(os.environ[WORKDIR_VARIABLE])
    notices = notice.listen()
    show_stacks_on_request()
    rank = int(os.environ["RANK"]) if os.environ.get("RANK", "").isdigit() else 0
    errors = ErrorFile(rank)
    progress = progress_for(rank, os.environ.get("HPC_TERMINAL") == "1" or sys.stdout.isatty())
    _log_through(progress)
    try:
        loaded = _configuration(words)
        notices.configure(loaded.config.slurm, loaded.config.launch)
        from_environ()
        job = _load_job(loaded)
        with connect(loaded.config.train, loaded.config.launch.rendezvous_timeout_s) as world:
            try:
                limit = TimeLimit.from_environ(loaded.config.slurm.signal_lead_s)
                with Stop(notices, world.rank, world.size, world.store, limit) as stop:
                    return _run(job, loaded, world, progress, stop)
            except BaseException as error:
                errors.note(error)
                raise
    except RankZeroFailed as error:
        errors.note(error)
        return error.exit_code
    except HpcError as error:
        errors.note(error)
        progress.close()
        return report(DOOR, error)
    except Exception as error:
        errors.note(error)
        progress.close()
        sys.stdout.flush()
        sys.stderr.write(printable_lines(traceback.format_exc()))
        sys.stderr.flush()
        return exitcodes.FAILED
    finally:
        end_workers()


def _become_agent_in_a_bare_task(words: Sequence[str]) -> None:
    """Under a plain srun nobody has told this process its rank: hand over to the agent, which starts it again with one."""
    if os.environ.get("RANK"):
        return
    from hpc.node.environment import is_in_step  # late: only a process without a rank asks

    if is_in_step(os.environ):
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-u", "-m", "hpc.node", "--", "-m", DOOR, *words])


def _configuration(words: Sequence[str]) -> Loaded:
    """The merged configuration: the controller's, or the one that the command line asks for."""
    handed_on = os.environ.get("HPC_CONFIG")
    if handed_on:
        return load_text(handed_on)
    parser = argparse.ArgumentParser(prog=f"python -m {DOOR}", description="Train a job of jobs/ in this process.")
    parser.add_argument(
        "words", nargs="*", metavar="JOB | key=value", help="the training job (jobs.digits), and settings"
    )
    parser.add_argument(
        "--config", action="append", default=[], type=Path, metavar="FILE", help="a YAML file of settings"
    )
    arguments = parser.parse_args(words)
    jobs = [word for word in arguments.words if "=" not in word]
    if len(jobs) > 1:
        raise ConfigError(
            f"{jobs[0]} and {jobs[1]} are both named as the job; one was needed, and settings as key=value"
        )
    overrides = [word for word in arguments.words if "=" in word]
    return load(job=jobs[0] if jobs else None, files=arguments.config, overrides=overrides)


def _load_job(loaded: Loaded) -> TrainingJob:
    """The job's `Job`, from its package's module `job`.

    Raises:
        ConfigError: there is no such module, or it has no such class.
    """
    name = f"{loaded.config.job}.job"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"job={loaded.config.job}: there is no module {error.name}; a folder like jobs/digits was needed"
        ) from None
    kind = getattr(module, "Job", None)
    if not (isinstance(kind, type) and issubclass(kind, TrainingJob)):
        raise ConfigError(f"job={loaded.config.job}: {name} has no class Job derived from hpc.train.job.TrainingJob")
    job: TrainingJob = kind(loaded.parameters, loaded.config.train)
    return job


def _run(job: TrainingJob, loaded: Loaded, world: World, progress: Progress, stop: Stop) -> int:
    run = RunDirectory(Path(world.on_rank_zero(lambda: str(_run_directory(loaded).path))))
    if world.is_rank_zero:
        backend = torch.distributed.get_backend() if world.size > 1 else "no process group"
        ranks = "1 rank" if world.size == 1 else f"{world.size} ranks"
        log.info("%s: %s on %s (%s); run %s", loaded.config.job, ranks, world.device.type, backend, _shown(run.path))
    outcome = train(job, loaded.config.train, world, run, progress, stop, loaded.to_yaml())
    if world.is_rank_zero:
        progress.line(_last_line(outcome) if outcome.stopped_at is None else _stop_line(outcome, stop, run))
    return exitcodes.DONE if outcome.stopped_at is None else exitcodes.WANTS_ANOTHER_ATTEMPT


def _run_directory(loaded: Loaded) -> RunDirectory:
    """The run directory of this run, made if it has to be; only rank 0 calls this."""
    given = os.environ.get("HPC_RUN_DIR") or loaded.config.run_dir
    if given:
        looked_at = "HPC_RUN_DIR" in os.environ  # by the controller
        run = RunDirectory.make(Path(given), shared=looked_at or loaded.config.run_root_shared, local=True)
    else:
        elastic = re.sub(r"[^A-Za-z0-9._-]", "_", os.environ.get("TORCHELASTIC_RUN_ID", "none"))
        run_id = new_run_id() if elastic in ("none", "") else elastic
        name = directory_name(run_name(loaded.config))
        run = RunDirectory.create(
            Path(loaded.config.run_root), name, run_id, shared=loaded.config.run_root_shared, local=True
        )
    if not run.config_file.exists():
        write_private(run.config_file, loaded.to_yaml())
    return run


def _last_line(outcome: Outcome) -> str:
    """What was reached: "done: 276 steps, 4.1 s, accuracy 98.6 % on 360 held-out samples; checkpoint runs/..."."""
    steps = "1 step" if outcome.total_steps == 1 else f"{outcome.total_steps} steps"
    text = f"done: {steps}, {duration(outcome.seconds)}" if outcome.steps else f"already finished: {steps}"
    if outcome.metrics:
        figures = ", ".join(figure(name, value) for name, value in outcome.metrics.items())
        text += f", {figures} on {outcome.held_out} held-out samples"
    if outcome.checkpoint:
        text += f"; checkpoint {_shown(outcome.checkpoint)}"
    if outcome.best:
        name, value, path = outcome.best
        text += f"; best {figure(name, value)}: {_shown(path)}"
    return text


def _stop_line(outcome: Outcome, stop: Stop, run: RunDirectory) -> str:
    """Where a notice stopped the run: "stopped at step 41 on notice (SIGTERM): checkpoint runs/..."."""
    kept = f"checkpoint {_shown(outcome.checkpoint)}" if outcome.checkpoint else "no step was made, so no checkpoint"
    text = f"stopped at step {outcome.stopped_at} on notice ({stop.reason}): {kept}"
    if stop.reason == "SIGINT":
        text += f"; the same command with run_dir={_shown(run.path)} goes on from there"
    return text


def _shown(path: Path) -> str:
    """A path as short as it can be given from here."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


class _Lines(logging.Handler):
    """Hands log records to the progress display, so that they do not tear a bar."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self.progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        mark = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        self.progress.line(mark + self.format(record))


def _log_through(progress: Any) -> None:
    log.handlers[:] = [_Lines(progress)]
    log.propagate = False
    log.setLevel(logging.WARNING if os.environ.get("RANK", "0") != "0" else logging.INFO)


def leave(status: int) -> NoReturn:
    """End this process as `sys.exit` does, but for taking the interpreter apart: with torch in it that takes seconds."""
    threading._shutdown()  # type: ignore[attr-defined]  # tells idle threads of executors to end, and waits for all that are no daemons
    atexit._run_exitfuncs()
    left_open = [item for item in gc.get_objects() if issubclass(type(item), io.IOBase)]  # by the job
    for stream in (*left_open, sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    leave(main())
