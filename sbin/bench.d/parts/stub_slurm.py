"""Slurm's commands as stubs that take a known time, so that it can be taken off: sbatch answers after 50 ms."""

from __future__ import annotations

from pathlib import Path

_SBATCH = """#!/bin/bash
begun=${EPOCHREALTIME/[.,]/}
/bin/sleep 0.05
case " $* " in
*" --test-only "*) echo 'sbatch: Job 4711 to start at 2030-01-01T00:00:00 using 8 processors on nodes n1' >&2 ;;
*) echo 'Submitted batch job 4711' ;;
esac
echo "$((${EPOCHREALTIME/[.,]/} - begun))" >>"${0%/*}/taken"
"""
_OTHER = """#!/bin/sh
exit 0
"""


def make(folder: Path) -> Path:
    """The folder to put first on PATH."""
    for name in ("sbatch", "srun", "scontrol", "sinfo", "squeue", "sacct", "scancel"):
        path = folder / name
        path.write_text(_SBATCH if name == "sbatch" else _OTHER)
        path.chmod(0o755)
    return folder


def taken(folder: Path) -> float:
    """Seconds that sbatch took since the last call."""
    path = folder / "taken"
    lines = path.read_text().split() if path.exists() else []
    path.unlink(missing_ok=True)
    return sum(map(int, lines)) / 1e6  # bash tells microseconds
