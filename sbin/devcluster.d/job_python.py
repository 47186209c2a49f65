"""The Python that jobs use: a virtual environment that every user may read, from an interpreter that everybody may run.

The Python on root's PATH may stand in a home directory that nobody else can enter; jobs then fail with "Permission
denied". The project itself is not installed here: it is imported from the clone that the user works in.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import machine
from cluster_site import SYSTEM_PATH, DevclusterError, Site

_INTERPRETER = "/usr/bin/python3"
_TORCH = "torch==2.13.0"


def known(site: Site, environment: Mapping[str, str]) -> Path | None:
    """The environment that jobs get, when there is one: HPC_DEVCLUSTER_VENV, or the one that `venv` has made."""
    chosen = environment.get("HPC_DEVCLUSTER_VENV")
    if chosen:
        if not os.access(f"{chosen}/bin/python", os.X_OK):
            raise DevclusterError(f"HPC_DEVCLUSTER_VENV={chosen}: there is no bin/python in it; unset it or make it")
        return Path(chosen)
    made = site.venv
    return made if (made / "complete").exists() else None


def ensure(folder: Path, project: Path) -> None:
    """Make the virtual environment, or leave it alone when it has what pyproject.toml asks for by now."""
    wanted = [_TORCH, *_dependencies(project)]
    digest = hashlib.sha256("\n".join(wanted).encode()).hexdigest()
    mark = folder / "complete"
    if mark.exists() and mark.read_text().strip() == digest:
        return
    machine.require_programs({_INTERPRETER: "python3"})
    os.umask(0o022)
    made = [_INTERPRETER, "-m", "venv", str(folder)]
    try:
        machine.call(made, timeout=120)
    except DevclusterError:  # Debian keeps ensurepip in a package of its own
        print("installing python3-venv", file=sys.stderr, flush=True)
        machine.call(
            ["apt-get", "install", "-y", "-qq", "python3-venv"],
            environment={"DEBIAN_FRONTEND": "noninteractive"},
            timeout=600,
        )
        machine.call(made, timeout=120)
    install = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *wanted]
    proxies_and_indexes = {name: text for name, text in os.environ.items() if "PROXY" in name.upper() or "PIP" in name}
    env = {"PATH": SYSTEM_PATH, "HOME": "/root", "LC_ALL": "C.UTF-8", **proxies_and_indexes}
    if subprocess.run(install, env=env, stdout=sys.stderr, check=False).returncode != 0:
        raise DevclusterError(f"pip could not fill {folder}: its words stand above; run the same command again")
    mark.write_text(digest + "\n")


def _dependencies(project: Path) -> list[str]:
    """What pyproject.toml asks for to run and to test, torch left to the pinned one."""
    try:
        import tomllib
    except ModuleNotFoundError:
        raise DevclusterError(
            f"{sys.executable} is older than 3.11: start with /usr/bin/python3 sbin/devcluster"
        ) from None
    table = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    needed = [*table["dependencies"], *table["optional-dependencies"]["test"]]
    return [line for line in needed if not line.startswith("torch>")]
