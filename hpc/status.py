"""The door of a run's record: `python -m hpc.status RUN_DIR`. Prints attempts, causes, exit codes, hosts and steps."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hpc.errors import HpcError, print_any_text, printable, report, unreadable

DOOR = "hpc.status"


def main(argv: Sequence[str] | None = None) -> int:
    """Print what the record of each run directory tells; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {DOOR}",
        description="What happened to a run, attempt by attempt, and what its time was used for.",
    )
    parser.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN_DIR", help="a run directory")
    arguments = parser.parse_args(argv)
    print_any_text()
    from hpc.login import status  # late, so that --help needs nothing

    try:
        for run_dir in arguments.run_dirs:
            for line in status.report_lines(run_dir):
                print(printable(line))
    except HpcError as error:
        return report(DOOR, error)
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        return report(DOOR, unreadable(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
