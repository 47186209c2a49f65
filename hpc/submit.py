"""The door of the login node: `python -m hpc.submit [flags] [JOB] [key=value ...] [-- command args ...]`.

Sends a training job, or any script written for torchrun, to the cluster; --dry-run prints what would be sent, --local
runs it here. Prints the job id, the run directory, and the commands to follow, cancel and look.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from hpc import exitcodes
from hpc.errors import HpcError, UsageError, check_working_directory, print_any_text, printable, report, unreadable

if TYPE_CHECKING:
    from hpc.config import Loaded
    from hpc.login.submission import Sent

DOOR = "hpc.submit"

_FLAGS = (
    ("--nodes", "N", "slurm.nodes", "nodes of the job"),
    ("--gpus-per-node", "[TYPE:]N", "slurm.gpus_per_node", "GPUs of each node: 4, or a100:4"),
    ("--workers-per-node", "N", "launch.workers_per_node", "workers of each node, if not one per GPU"),
    ("--time", "TIME", "slurm.time", "time limit as sbatch takes it: 90 (minutes), 12:00:00, 2-00:00:00"),
    ("--partition", "NAME", "slurm.partition", "partition"),
    ("--account", "NAME", "slurm.account", "account that is charged"),
    ("--qos", "NAME", "slurm.qos", "quality of service"),
    ("--mem", "SIZE", "slurm.mem", "memory of each node: 64G"),
    ("--cpus-per-gpu", "N", "slurm.cpus_per_gpu", "CPU cores of each GPU's worker"),
    ("--cpus-per-task", "N", "slurm.cpus_per_task", "CPU cores of each Slurm task, as sbatch counts them"),
    ("--constraint", "LIST", "slurm.constraint", "features that the nodes must have"),
    ("--exclude", "NODES", "slurm.exclude", "nodes not to use"),
    ("--nodelist", "NODES", "slurm.nodelist", "nodes to use"),
    ("--name", "NAME", "name", "name of the job and of its run directory"),
    ("--layout", "LAYOUT", "launch.layout", "task-per-node or task-per-gpu"),
)
_EXAMPLES = """examples:
  python -m hpc.submit --nodes 2 --gpus-per-node 4                         the built-in job, on the cluster
  python -m hpc.submit --nodes 2 --gpus-per-node 4 jobs.gpt optim.lr=3e-4  a job of jobs/, one value changed
  python -m hpc.submit --nodes 2 --gpus-per-node 4 -- train.py --lr 3e-4   any script written for torchrun
  python -m hpc.submit --local                                             the same run here
  python -m hpc.submit --dry-run ...                                       print script and config, send nothing
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        import difflib  # late, as all that --help does not need

        unknown = message.removeprefix("unrecognized arguments: ").split(" ")[0].partition("=")[0]
        if unknown != message and (close := difflib.get_close_matches(unknown, self._option_string_actions, n=1)):
            message += f"; did you mean {close[0]}?"
        raise UsageError(f"{message} (all flags: python -m hpc.submit --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Submit, print or run; returns the door's exit code (with --follow the job's)."""
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    sent: Sent | None = None
    print_any_text()
    try:
        asked = _parser().parse_intermixed_args(words[:cut])
        check_working_directory()
        job, overrides = _split(asked.words)
        if cut < len(words) - 1 and job is not None:
            raise UsageError(f"both a job ({job}) and a command (after --) are given; leave one out")
        if cut == len(words) - 1:
            raise UsageError("nothing follows --; a script and its arguments were needed")
        if asked.continued is not None:
            return _continue(asked.continued, words, allow_root=asked.allow_root)
        loaded = _load(asked, job, overrides, words[cut + 1 :])
        if loaded.config.command:
            from hpc.command import check  # late: a job needs none of it

            check(loaded.config.command)
        if asked.dry_run:
            return _print_plan(loaded)
        from hpc.login import submission

        if asked.local:
            submission.run_here(loaded)
        if asked.follow and "array" in loaded.config.slurm.extra:
            raise UsageError("--follow follows one job, not the elements of an array; leave it out")
        if asked.follow and "clusters" in loaded.config.slurm.extra:
            raise UsageError("--follow asks this cluster, and the job may go to another one (clusters); leave it out")
        sent = submission.send(loaded)
        _print_sent(sent)
        if not asked.follow:
            return 0
        from hpc.login.follow import follow

        gc.enable()
        return follow(sent.job_id, sent.output, tell=_tell)
    except (HpcError, ModuleNotFoundError) as error:
        return report(DOOR, error)
    except KeyboardInterrupt:
        _tell(f"job {sent.job_id} goes on" if sent is not None else "interrupted before anything was submitted")
        return exitcodes.INTERRUPTED
    except BrokenPipeError:  # the reader of --dry-run has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if sent is None:
            return report(DOOR, unreadable(error))
        _tell(f"job {sent.job_id} was submitted, but this could not be printed: {error.strerror}")
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m hpc.submit",
        usage="%(prog)s [flags] [JOB] [key=value ...] [-- command args ...]",
        description="Send a training job to the cluster, print what would be sent, or run it here.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("words", nargs="*", metavar="JOB key=value", help="jobs.NAME (default jobs.digits); settings")
    for flag, metavar, key, text in _FLAGS:
        names = [flag, "--cpus"] if flag == "--cpus-per-gpu" else [flag]
        parser.add_argument(*names, metavar=metavar, dest=key, help=text)
    parser.add_argument("--config", metavar="FILE", action="append", default=[], help="a YAML file of settings")
    parser.add_argument("--dry-run", action="store_true", help="print the batch script and the config; make nothing")
    parser.add_argument("--local", action="store_true", help="run on this machine, without Slurm")
    parser.add_argument(
        "--continue", dest="continued", metavar="RUN_DIR", help="send a run that has ended once more: it goes on"
    )
    parser.add_argument(
        "--follow", action="store_true", help="print the job's output until it ends; exit with its code"
    )
    parser.add_argument("--allow-root", action="store_true", help="submit although you are root")
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


def _load(asked: argparse.Namespace, job: str | None, overrides: list[str], command: list[str]) -> Loaded:
    from hpc.config import load  # late, so that --help needs no configuration

    files = [Path(name) for name in asked.config]
    return load(job=job, command=command, files=files, overrides=overrides, flags=_given(asked))


def _print_plan(loaded: Loaded) -> int:
    """Print the batch script and, as a here-document that does nothing, the merged configuration: one valid script."""
    from hpc.login import submission, submitter
    from hpc.login.inherited import without_outer_job

    plan = submission.preview(loaded)
    print(submitter.render(plan))
    print("# Not part of the script: the run's merged configuration")
    print(f": <<'config.yaml'\n{plan.config_yaml.rstrip()}\nconfig.yaml", flush=True)
    for note in (*plan.notes, *without_outer_job(os.environ, keep_gpus=False).warnings):
        _tell(f"note: {note}")
    return 0


def _continue(path: str, words: Sequence[str], *, allow_root: bool) -> int:
    words = [word for word in words if word != "--allow-root"]
    if len(words) > (1 if words[0].startswith("--continue=") else 2):
        raise UsageError("--continue RUN_DIR stands alone: the run goes on as it was sent")
    from hpc.login import submission

    sent = submission.send_again(Path(path), allow_root=allow_root)
    if sent.note is not None:
        _tell(f"note: {sent.note}")
    print(f"job {sent.job_id} submitted: {printable(sent.run_dir.name)}")
    print(f"  follow     tail -F {printable(shlex.quote(str(sent.output)))}")
    print(f"  cancel     scancel {sent.job_id}", flush=True)
    return 0


def _print_sent(sent: Sent) -> None:
    for note in sent.notes:
        _tell(f"note: {note}")
    print(f"job {sent.job_id} submitted: {printable(sent.plan.name)}")
    print(f"  directory  {printable(str(sent.plan.run_dir))}")
    print(f"  follow     tail -F {printable(shlex.quote(str(sent.output.parent)))}/{sent.output.name}")
    clusters = dict(sent.plan.directives).get("clusters")
    there = f"--clusters={shlex.quote(clusters)} " if clusters else ""
    print(f"  cancel     scancel {there}{sent.job_id}")
    print(f"  look       scontrol {there}show job {sent.job_id}", flush=True)


def _tell(line: str) -> None:
    print(f"{DOOR}: {printable(line)}", file=sys.stderr, flush=True)


def _given(asked: argparse.Namespace) -> dict[str, object]:
    """The settings given by flags, by dotted name."""
    flags: dict[str, object] = {key: getattr(asked, key) for _, _, key, _ in _FLAGS if getattr(asked, key) is not None}
    if asked.allow_root:
        flags["slurm.allow_root"] = True
    return flags


if __name__ == "__main__":
    gc.disable()  # a process of half a second: collecting, and taking modules apart at the end, are a fifth of it
    status = main()
    if sys.stdout is not None:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
    os._exit(status)
