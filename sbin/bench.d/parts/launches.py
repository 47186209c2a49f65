"""Launches on the dev cluster: one batch job in which the contestants of parts/contest.py take turns."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any

from frame import Bench, NotMeasured

JOB_LIMIT_S = 2400.0


def contest(
    bench: Bench, nodes: int, workers: int, schedule: Sequence[str], *, count: bool = False
) -> list[dict[str, Any]]:
    """What each turn of the schedule brought, as parts/contest.py writes it.

    Raises:
        NotMeasured: the job did not end well.
    """
    rig, folder = bench.rig(), bench.user_folder()
    script = str(rig.clone / "sbin" / "bench.d" / "parts" / "contest.py")
    words = [rig.python, script, "--workers", str(workers), "--schedule", ",".join(schedule)]
    words += ["--out", str(folder / "found.json"), *(["--count"] if count else [])]
    options = [f"--nodes={nodes}", f"--ntasks-per-node={workers}", f"--cpus-per-task={8 // workers}", "--exclusive"]
    options += ["--time=45", f"--output={folder}/job.log", "--job-name=bench-start", "--no-requeue"]
    environ = {"PYTHONPATH": str(rig.clone), "PYTHONDONTWRITEBYTECODE": "1", "HPC_SITE_CONFIG": ""}
    job = rig.sbatch(*options, "--wrap", f"exec {shlex.join(words)}", cwd=folder, env=environ)
    _wait(rig, job)
    try:
        return list(json.loads((folder / "found.json").read_text()))
    except (OSError, ValueError):
        log = folder / "job.log"
        last = log.read_text(errors="replace").strip().splitlines()[-1:] if log.exists() else []
        raise NotMeasured(f"job {job} brought no result: {' '.join(last) or rig.state(job)}") from None


def _wait(rig: Any, job: str) -> None:
    rig.wait(job, timeout=JOB_LIMIT_S)
    rig.jobs.remove(job)


def values(found: Sequence[dict[str, Any]], who: str, key: str, warm_up: int = 0) -> list[float]:
    """One contestant's values; its first `warm_up` turns do not count.

    Raises:
        NotMeasured: none of its turns went well; the error of the last.
    """
    turns = [turn for turn in found if turn["who"] == who][warm_up:]
    good = [float(turn[key]) for turn in turns if key in turn]
    if not good:
        raise NotMeasured(f"{who}: {turns[-1]['error'] if turns else 'had no turn'}")
    return good
