"""The door of clean nodes: `python -m hpc.clean [--end [--yes]] [--job ID] [--all-nodes]`.

Without --end it lists what jobs that are over have left on this node: your processes, and files of dead ones in
/dev/shm and the folders for temporary files. With --end it ends and removes them.

Exit codes: 0 the node is clean; 1 something is there (or still there), or Slurm could not be asked about it;
2 the command line.
"""

from __future__ import annotations

import argparse
import os
import re
import select
import sys
from collections.abc import Sequence
from typing import NoReturn

from hpc import exitcodes
from hpc.errors import HpcError, UsageError, printable, report

DOOR = "hpc.clean"
ALL_NODES_LIMIT_S = 120.0
LOOK_S = 0.5


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (all flags: python -m {DOOR} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """List or end; returns the door's exit code."""
    try:
        asked = _parser().parse_args(argv)
        if os.getuid() == 0 and not asked.as_root:
            raise UsageError("this is root, whose processes are the system's: run it as the user, or give --as-root")
        if asked.yes and not asked.end:
            raise UsageError("--yes answers the question of --end; give both")
        if asked.end and not asked.yes and not sys.stdin.isatty():
            raise UsageError("--end asks before it ends, and there is no terminal to ask at; give --yes as well")
        return _all_nodes(asked) if asked.all_nodes else _this_node(asked)
    except (HpcError, ModuleNotFoundError) as error:
        return report(DOOR, error)
    except (KeyboardInterrupt, EOFError):
        print(f"{DOOR}: nothing was ended", file=sys.stderr)
        return exitcodes.FAILED


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=f"python -m {DOOR}",
        description="What jobs that are over have left on this node: your processes, shared memory, temporary files.",
        epilog="exit code: 0 clean, 1 something is there or still there, 2 the command line",
        allow_abbrev=False,
    )
    parser.add_argument("--end", action="store_true", help="end the processes and remove the files, after a question")
    parser.add_argument("--yes", action="store_true", help="with --end: do not ask")
    parser.add_argument("--job", type=_job, metavar="ID", help="only what this job has left")
    parser.add_argument("--all-nodes", action="store_true", help="on every node of the allocation that this runs in")
    parser.add_argument("--as-root", action="store_true", help="allow it for root, whose own processes then count")
    parser.add_argument("--quiet", action="store_true", help="no word about a clean node")
    parser.add_argument("--over", type=_start, metavar="START", help=argparse.SUPPRESS)  # HPC_MARK
    return parser


def _job(text: str) -> str:
    if not re.fullmatch(r"[0-9]{1,12}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no job id; a number such as 1234 was needed")
    return text


def _start(text: str) -> str:
    if not re.fullmatch(r"[0-9]{1,12}\.[0-9]{1,9}\.[0-9]{1,9}\.[0-9a-f]{1,64}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no start of a job step, such as 1234.0.0.9f3a51c2")
    return text


def _this_node(asked: argparse.Namespace) -> int:
    from hpc.node.sweep import Scope, Sweeper
    from hpc.node.sweep import lines as lines_of

    sweeper = Sweeper(os.environ, Scope(job_id=asked.job or "", over=asked.over or ""))
    view = sweeper.look(ask_gpus=not asked.over)
    for line in lines_of(view) if not (asked.quiet and view.is_clean) else []:
        print(printable(line), flush=True)
    if not asked.end or not (view.leftovers or view.residue):
        return exitcodes.DONE if view.is_clean else exitcodes.FAILED
    if not asked.yes and not _is_yes(f"end {len(view.leftovers)} processes, remove {len(view.residue)} files?"):
        return exitcodes.FAILED
    ended = sweeper.end(view)
    after = sweeper.look(ask_gpus=False)
    gone = {one.path for one in view.residue} - {one.path for one in after.residue}
    print(f"{view.node}: {len(ended)} processes ended, {len(gone)} files removed", flush=True)
    if after.is_clean:
        return exitcodes.DONE
    print(f"{view.node}: still there:")
    for line in lines_of(after):
        print(printable(line), flush=True)
    return exitcodes.FAILED


def _is_yes(question: str) -> bool:
    """Whether y or yes was typed at the terminal; any other answer is told to have ended nothing.

    Raises:
        EOFError, KeyboardInterrupt: no answer.
    """
    print(f"{question} [y/N] ", end="", flush=True)
    while not select.select([sys.stdin], [], [], LOOK_S)[0]:
        pass  # a Ctrl-C just before a read that waits for ever would be heard at the next key only
    answer = sys.stdin.readline()
    if not answer:
        raise EOFError
    if answer.strip().lower() in ("y", "yes"):
        return True
    print(f"{DOOR}: nothing was ended", file=sys.stderr)
    return False


def _all_nodes(asked: argparse.Namespace) -> int:
    from hpc.allocation import allocation as allocations
    from hpc.slurm import commands

    allocation = allocations.read(os.environ)
    if not allocation.job_id:
        raise UsageError("--all-nodes: there is no allocation here; run it inside one (salloc, or a batch script)")
    command = [sys.executable, "-m", DOOR, *(["--job", asked.job] if asked.job else [])]
    command += [flag for flag, on in (("--as-root", asked.as_root), ("--quiet", asked.quiet)) if on]

    def on_all(*more: str) -> int:
        answer = commands.on_every_node(
            allocation.job_id, allocation.nodes, [*command, *more], timeout_s=ALL_NODES_LIMIT_S
        )
        sys.stdout.write(answer.stdout)
        sys.stderr.write(answer.stderr)
        return exitcodes.DONE if answer.returncode == 0 else exitcodes.FAILED

    if asked.end and not asked.yes:
        if on_all() == exitcodes.DONE:
            return exitcodes.DONE
        if not _is_yes("end and remove all that can be?"):
            return exitcodes.FAILED
    return on_all("--end", "--yes") if asked.end else on_all()


if __name__ == "__main__":
    sys.exit(main())
