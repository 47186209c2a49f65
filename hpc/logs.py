"""The door of the ranks' logs: `python -m hpc.logs RUN [-f] [--rank N] [--attempt K] [--errors]`.

Exit codes: 0 printed (with -f: the run is over); 2 the command line; 130 Ctrl-C while following.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hpc import exitcodes
from hpc.errors import HpcError, print_any_text, report, unreadable

DOOR = "hpc.logs"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the logs; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {DOOR}",
        description="What the ranks of a run have printed, in the order of time; what several say is shown once.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the run is over, through requeues")
    parser.add_argument("--rank", metavar="N", help="only this rank, or these: 0-3,7")
    parser.add_argument("--attempt", type=int, metavar="K", help="only this attempt")
    parser.add_argument("--errors", action="store_true", help="only what went wrong: verdicts and tracebacks")
    asked = parser.parse_args(argv)
    print_any_text()
    from hpc.login import logs  # late, so that --help needs nothing

    def say(line: str) -> None:
        print(line, flush=asked.follow)

    try:
        run = logs.open_run(asked.run)
        which = logs.Asked(ranks=None if asked.rank is None else logs.parse_ranks(asked.rank), attempt=asked.attempt)
        if asked.errors:
            for line in logs.error_lines(run, which):
                say(line)
        elif asked.follow:
            logs.follow(run, which, say)
        else:
            logs.Logs(run, which, say).show(final=True)
    except HpcError as error:
        return report(DOOR, error)
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        return report(DOOR, unreadable(error))
    except KeyboardInterrupt:
        return exitcodes.INTERRUPTED
    return exitcodes.DONE


if __name__ == "__main__":
    sys.exit(main())
