"""The README's session on a cluster, run on the real Slurm."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path

from cluster_rig import FIRST_USER, Rig, give_to

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from test_readme import check, sessions


def test_sessions_on_a_cluster(cluster: Rig) -> None:
    folder = cluster.home() / f"readme {time.time_ns()}"
    folder.mkdir()
    give_to(folder, FIRST_USER)
    for command, lines in sessions("cluster"):
        argv = shlex.split(command)
        assert argv[0] == "python"
        env = {"PYTHONPATH": str(cluster.clone), "HPC_SITE_CONFIG": ""}
        done = cluster.run([cluster.python, *argv[1:]], cwd=folder, env=env, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        printed = [line for line in lines if not line.startswith("hpc.submit:")]
        check(printed, done.stdout)
        check([line for line in lines if line.startswith("hpc.submit:")], done.stderr)
