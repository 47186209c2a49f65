"""The door for questions before a run: `python -m hpc.doctor`. What a cluster is, and what of it or of a script will bite.

python -m hpc.doctor --lint FILE.sbatch ...    the classic mistakes of a batch script that was written by hand
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from hpc.errors import HpcError, UsageError, printable, report

DOOR = "hpc.doctor"
FINDINGS = 1
"""The exit code when something was found that will bite."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (all flags: python -m {DOOR} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Look, print, and return the exit code: 0 nothing found, 1 findings, 2 a wrong command line."""
    try:
        asked = _parser().parse_args(argv)
        return _lint(asked.lint)
    except HpcError as error:
        return report(DOOR, error)
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FINDINGS


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog=f"python -m {DOOR}", description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--lint", nargs="+", type=Path, metavar="FILE", help="name the mistakes in batch scripts")
    return parser


def _lint(files: Sequence[Path]) -> int:
    from hpc.login import lint  # late, so that --help needs nothing

    found = [(path, finding) for path in files for finding in lint.check_file(path)]
    for path, finding in found:
        print(f"{printable(str(path))}:{finding.line}: {printable(finding.what)}")
        print(f"    {printable(finding.why)}")
        print(f"    write {printable(finding.instead)}")
    print(
        f"{len(files)} file{'s' if len(files) > 1 else ''}: {len(found) or 'no'} finding{'' if len(found) == 1 else 's'}"
    )
    return FINDINGS if found else 0


if __name__ == "__main__":
    sys.exit(main())
