"""`python -m hpc.launch`: the controller of an allocation. sbin/ddp.sbatch and hpc.submit's scripts are one exec of it.

python -m hpc.launch [JOB] [key=value ...] [-- script arguments]     in a batch script or salloc's shell
python -m hpc.launch --run-dir DIR                                   a run that hpc.submit has prepared
python -m hpc.launch --local ...                                     here, whatever Slurm's variables say
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    from hpc.allocation import warden

    WARD = warden.stand(sys.argv[1:], os.environ)  # before all that takes memory: it stays in the warden, too

import argparse
import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpc.errors import (
    HpcError,
    RunDirectoryError,
    UsageError,
    check_working_directory,
    print_any_text,
    printable,
    report,
)

if TYPE_CHECKING:
    from hpc.allocation.allocation import Allocation
    from hpc.allocation.warden import Ward
    from hpc.config import Loaded
    from hpc.rundir import RunDirectory


def main(argv: Sequence[str] | None = None, ward: Ward | None = None) -> int:
    """Run one attempt of one run; returns the exit code of the first failing rank. `ward`: where a warden watches."""
    arguments = parse(sys.argv[1:] if argv is None else argv)
    print_any_text()
    try:
        if arguments.last_word:
            from hpc.allocation import lastword

            return lastword.speak(arguments.run_dir)
        return launch(arguments, ward)
    except (HpcError, ModuleNotFoundError) as error:
        return report("hpc.launch", error)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m hpc.launch",
        description="Start a training job, or any torchrun-style script, on every GPU of this allocation.",
        usage="%(prog)s [options] [JOB] [key=value ...] [-- script arguments]",
    )
    parser.add_argument("--run-dir", type=Path, help="the run directory that hpc.submit made, with its config.yaml")
    parser.add_argument("--config", type=Path, action="append", default=[], help="a YAML file to merge")
    parser.add_argument("--local", action="store_true", help="run on this machine alone, ignoring Slurm's variables")
    parser.add_argument("--workdir", type=Path, help="change into this directory first")
    parser.add_argument("--last-word", action="store_true", help=argparse.SUPPRESS)  # an agent says so
    parser.add_argument("words", nargs="*", metavar="JOB | key=value")
    words, command = split_command(argv)
    arguments = parser.parse_intermixed_args(words)
    arguments.command = command
    return arguments


def split_command(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """What stands before and after the first "--"."""
    words = list(argv)
    if "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]


def launch(arguments: argparse.Namespace, ward: Ward | None = None) -> int:
    from hpc import config
    from hpc.allocation import allocation as allocations
    from hpc.allocation import history
    from hpc.allocation.controller import Controller
    from hpc.rundir import WORKDIR_VARIABLE, RunDirectory, check_own, directory_name, run_name, write_private

    started_in = None
    check_working_directory()
    if arguments.workdir is not None:
        started_in = os.getcwd()  # the copy of the code: agents import from it, and change over as this does
        try:
            os.chdir(arguments.workdir)
            os.environ[WORKDIR_VARIABLE] = os.getcwd()
        except OSError as error:
            raise UsageError(f"--workdir {arguments.workdir}: {error.strerror}") from None
    if arguments.local:
        ignored = forget_slurm()
        if ignored:
            told = f"hpc.launch: local run: Slurm's variables of job {printable(ignored)} are ignored"
            print(told, file=sys.stderr, flush=True)
    allocation = allocations.here()
    prepared = arguments.run_dir / "config.yaml" if arguments.run_dir is not None else None
    if prepared is not None and prepared.exists() and not (arguments.words or arguments.command or arguments.config):
        RunDirectory.open(prepared.parent, shared=True)  # nothing is believed that another user can have put there
        check_own(prepared)
        loaded = config.load(files=[prepared], site=False)
    else:
        jobs = [word for word in arguments.words if "=" not in word]
        if len(jobs) > 1:
            raise UsageError(f"two jobs named, {jobs[0]} and {jobs[1]}: name one, and settings as key=value")
        loaded = config.load(
            job=jobs[0] if jobs else None,
            command=arguments.command,
            files=arguments.config,
            overrides=[word for word in arguments.words if "=" in word],
        )
    given, local = arguments.run_dir or loaded.config.run_dir, arguments.local
    shared = loaded.config.run_root_shared or (local and prepared is not None)  # hpc.submit --local has looked
    if given is not None:
        run_dir = RunDirectory.make(Path(given), shared=shared, local=local)
        if allocation.array_index is not None:
            run_dir = RunDirectory.create(run_dir.path, "array", allocation.array_index, shared=shared)
    else:
        root, name = Path(loaded.config.run_root), directory_name(run_name(loaded.config))
        run_id = unused_id(root / name, allocation, loaded) if allocation.job_id else None
        run_dir = RunDirectory.create(root, name, run_id, shared=shared, local=local)
    if not run_dir.config_file.exists():
        write_private(run_dir.config_file, loaded.to_yaml())
    if allocation.job_id:
        before = history.attempts_of_earlier_jobs(run_dir.events(), allocation.job_id)
        allocation = dataclasses.replace(allocation, attempt=before + allocation.restarts)
    try:
        run_dir.attempt(allocation.attempt).mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise RunDirectoryError(f"{error.filename}: {error.strerror}; the run directory must be writable") from None
    if started_in is None:
        tell_changed_code(run_dir)
    return Controller(allocation, loaded, run_dir, code=started_in, ward=ward).run()


def unused_id(stem: Path, allocation: Allocation, loaded: Loaded) -> str:
    """The id of this job's run directory, `stem`-<job>; with other settings than those of the run that lies there, the next one.

    Else the second of two trials in one allocation would go on with the first one's checkpoints. A job that was requeued
    finds its own again; where none has its settings (somebody has edited the site's file, say), the first.
    """
    for number in itertools.count(1):
        run_id = allocation.run_id if number == 1 else f"{allocation.run_id}-{number}"
        config_file = Path(f"{stem}-{run_id}") / "config.yaml"
        try:
            same = config_file.read_text(encoding="utf-8") == loaded.to_yaml()
        except FileNotFoundError:
            if allocation.restarts:
                return allocation.run_id
            break
        except (OSError, ValueError):
            break  # what is wrong with it is told where the directory is opened
        if same:
            break
    if number > 1:
        told = f"{stem}-{allocation.run_id} is a run of this job with other settings; this one is {stem}-{run_id}"
        print(f"hpc.launch: {printable(told)}", flush=True)
    return run_id


def tell_changed_code(run_dir: RunDirectory) -> None:
    """For a run that does not use the copy of the code: name what has been edited since the submission."""
    from hpc import snapshot

    manifest = snapshot.read(run_dir.code)
    if manifest is None:
        return
    changed = snapshot.changed(manifest, Path(manifest.root))
    if changed:
        more = f" and {len(changed) - 5} more" if len(changed) > 5 else ""
        names = printable(", ".join(changed[:5]))
        print(
            f"hpc.launch: warning: changed since the submission, and run as they are now: {names}{more}; "
            f"as they were: {printable(str(run_dir.code))}",
            file=sys.stderr,
            flush=True,
        )


def forget_slurm() -> str | None:
    """Take Slurm's and any launcher's variables out of this process's environment; returns the job id that was there."""
    job = os.environ.get("SLURM_JOB_ID")
    for name in list(os.environ):
        if name.startswith(("SLURM_", "SBATCH_", "TORCHELASTIC_")) or name in _LAUNCHERS:
            del os.environ[name]
    return job


_LAUNCHERS = frozenset(
    ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"]
)

if __name__ == "__main__":
    CODE = main(ward=WARD)
    WARD.retire()
    sys.exit(CODE)
