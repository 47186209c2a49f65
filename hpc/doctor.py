"""The door for questions before a run: `python -m hpc.doctor`. What a cluster is, and what of it or of a script will bite.

python -m hpc.doctor                           on the login node: this cluster, and a site file to start from
python -m hpc.doctor --site-file FILE          the same, and the site file is written
python -m hpc.doctor --allocation              inside an allocation: its nodes, GPUs and network, in a table
python -m hpc.doctor --signals [key=value ...]  a tiny job proves that a notice reaches every rank, and that the job comes back
python -m hpc.doctor --failed-nodes            which nodes failed your runs lately; --forget NODE ... takes them back
python -m hpc.doctor --lint FILE.sbatch ...    the classic mistakes of a batch script that was written by hand

Exit codes: 0 nothing found; 1 something was; 2 the command line; 78 no Slurm can be asked from this machine.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from hpc import exitcodes
from hpc.errors import HpcError, UsageError, printable, report

if TYPE_CHECKING:
    from hpc.login.cluster import Cluster

DOOR = "hpc.doctor"
FINDINGS = 1
"""The exit code when something was found that will bite."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (all flags: python -m {DOOR} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Look, print, and return the exit code: 0 nothing found, 1 findings, 2 a wrong command line, 78 no Slurm to ask."""
    try:
        asked = _parser().parse_args(argv)
        _check_words(asked)
        if asked.lint:
            return _lint(asked.lint)
        if asked.allocation:
            return _allocation(asked)
        if asked.signals:
            return _signals(asked)
        if asked.failed_nodes:
            return _failed_nodes()
        if asked.forget:
            return _forget(asked.forget)
        return _cluster(asked.site_file)
    except (HpcError, ModuleNotFoundError) as error:
        return report(DOOR, error)
    except KeyboardInterrupt:
        print(f"{DOOR}: interrupted", file=sys.stderr, flush=True)
        return exitcodes.INTERRUPTED
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FINDINGS


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog=f"python -m {DOOR}", description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--site-file", type=Path, metavar="FILE", help="write the site file to start from")
    parser.add_argument("words", nargs="*", metavar="key=value", help="settings, as for hpc.submit")
    parser.add_argument("--allocation", action="store_true", help="check the allocation that this stands in")
    parser.add_argument("--signals", action="store_true", help="send a tiny job that proves the notice's path")
    parser.add_argument("--allow-root", action="store_true", help="with --signals: send it although you are root")
    parser.add_argument(
        "--quick", action="store_true", help="with --allocation: nodes and network alone, without torch"
    )
    parser.add_argument(
        "--limit", type=_seconds, metavar="S", help="the most seconds for --allocation (120) or --signals (900)"
    )
    parser.add_argument(
        "--remember", action="store_true", help="with --allocation: later runs leave out nodes that are not fit"
    )
    parser.add_argument("--failed-nodes", action="store_true", help="show the nodes that failed your runs lately")
    parser.add_argument("--forget", nargs="+", metavar="NODE", help="strike these nodes out of that list")
    parser.add_argument("--lint", nargs="+", type=Path, metavar="FILE", help="name the mistakes in batch scripts")
    return parser


def _check_words(asked: argparse.Namespace) -> None:
    for word in asked.words:
        if "=" not in word or not (asked.allocation or asked.signals):
            raise UsageError(f"{word!r} is no flag; settings (key=value) go with --allocation and --signals")


def _cluster(site_file: Path | None) -> int:
    from hpc.login import cluster

    found = cluster.look()
    _print_cluster(found)
    text = cluster.site_file(found)
    if site_file is None:
        print(f"\nA site file to start from (--site-file FILE writes it):\n\n{text}", end="", flush=True)
        return 0
    try:
        with open(site_file, "x", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise UsageError(f"--site-file {printable(str(site_file))}: {error.strerror}; give a new file's name") from None
    print(f"\nwritten: {printable(str(site_file))}", flush=True)
    return 0


def _print_cluster(found: Cluster) -> None:
    from hpc.login import cluster

    for name, value in cluster.facts(found):
        print(f"{name:22}{printable(value)}")
    print()
    for line in table([cluster.PARTITION_COLUMNS, *cluster.partition_rows(found)]):
        print(line)
    bites = cluster.bites(found)
    print(f"\n{'What will bite:' if bites else 'Nothing that bites was found.'}")
    for bite in bites:
        print(f"- {printable(bite.setting)}: {printable(bite.meaning)}")
        print(f"    {printable(bite.advice)}")


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of texts as lines of one table, each column as wide as its widest text."""
    widths = [max(len(printable(row[column])) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(printable(text).ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 1 to 3600")
    return seconds


def _allocation(asked: argparse.Namespace) -> int:
    from hpc.allocation import preflight
    from hpc.config import load

    loaded = load(command=list(preflight.RANKS), overrides=asked.words)
    return preflight.report(
        loaded, limit_s=asked.limit or 120.0, quick=asked.quick, remember=asked.remember, table=table, tell=_tell
    )


def _signals(asked: argparse.Namespace) -> int:
    from hpc.login import noticeproof

    limit_s = asked.limit or 900.0
    proof = noticeproof.prove(asked.words, allow_root=asked.allow_root, limit_s=limit_s, tell=_tell)
    if proof.words:
        rows = [tuple(str(word.get(name)) for name in ("rank", "host", "heard", "steps")) for word in proof.words]
        for line in table([("rank", "host", "heard", "steps"), *rows]):
            print(line)
    found = noticeproof.verdicts(proof)
    for good, text in found:
        print(f"{'proved' if good else 'NOT PROVED'}: {printable(text)}")
    return 0 if all(good for good, _ in found) else FINDINGS


def _tell(line: str) -> None:
    print(printable(line), flush=True)


def _failed_nodes() -> int:
    from hpc import ledger

    found, now = ledger.recent(ledger.LONGEST_H), ledger.clock()
    if not found:
        print("no node failed a run of yours in the last 30 days")
        return 0
    rows = [
        (one.node, one.why, f"{(now - one.time) / 3600:.1f} h ago", one.job_id or "-", one.cluster or "-")
        for one in found
    ]
    for line in table([("node", "why", "when", "job", "cluster"), *rows]):
        print(line)
    return 0


def _forget(nodes: Sequence[str]) -> int:
    from hpc import ledger

    try:
        gone = ledger.forget(nodes)
    except OSError as error:
        raise UsageError(f"{printable(str(ledger.path()))}: {error.strerror or error}") from None
    print(f"forgotten: {', '.join(map(printable, gone))}" if gone else "none of these nodes is in the list")
    return 0


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
