"""Tests on a real Slurm: brought up for the session, and left up only if it was up before."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_rig import FIRST_USER, SYSTEM_PATH, Rig, make_clone, python_for_jobs, usual_number

_HERE = Path(__file__).resolve().parent
_PROGRAMS = ("slurmctld", "slurmd", "srun", "munged", "ip", "nsenter", "unshare")


def _obstacle() -> str | None:
    """Why these tests cannot run here."""
    if os.geteuid() != 0:
        return "needs root: the nodes of the dev cluster are namespaces"
    missing = [name for name in _PROGRAMS if not shutil.which(name, path=SYSTEM_PATH)]
    if missing and not shutil.which("apt-get", path=SYSTEM_PATH):
        return f"needs Debian's Slurm packages: there is no {', '.join(missing)} here, and no apt-get"
    probe = subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], capture_output=True, check=False)
    if probe.returncode != 0:
        return "needs namespaces, which this container does not allow"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if _HERE in item.path.parents]
    obstacle = _obstacle() if ours else None
    for item in ours:
        item.add_marker(pytest.mark.cluster)
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(900))  # the first one may have to install packages
        if obstacle:
            item.add_marker(pytest.mark.skip(reason=obstacle))


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """Two nodes with four GPUs each, and a copy of this checkout in the ordinary user's home."""
    rig = Rig(usual_number())
    was_up = rig.site.saved_shape() is not None
    rig.devcluster("up", "--nodes", "2", "--gpus-per-node", "4", timeout=600)
    rig.python = python_for_jobs(rig)
    rig.clone = make_clone(rig.home(), FIRST_USER)
    failed_before = request.session.testsfailed
    yield rig
    if request.session.testsfailed == failed_before:
        shutil.rmtree(rig.clone, ignore_errors=True)
    if not was_up:
        rig.devcluster("down")


@pytest.fixture(autouse=True)
def _cancel_jobs(request: pytest.FixtureRequest) -> Iterator[None]:
    """No job outlives its test, nor what it remembers of nodes."""
    yield
    if "cluster" in request.fixturenames:
        rig = request.getfixturevalue("cluster")
        rig.cancel_jobs()
        shutil.rmtree(rig.state_folder(), ignore_errors=True)
        rig.tests_done += 1
