"""Another user on the same machine: nothing of theirs is touched, and nothing that they hold is believed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from submit_shell import ROOT

from hpc.allocation.standby import Listener

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="other users need root")
ME, OTHER = 54321, 12345


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that every user may look into, with a home for each of the two."""
    with tempfile.TemporaryDirectory(prefix="users-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        for user in (ME, OTHER):
            home = folder / str(user)
            home.mkdir(mode=0o755)
            os.chown(home, user, user)
        yield folder


def environ(place: Path, user: int) -> dict[str, str]:
    kept = {"PATH": os.environ["PATH"], "HOME": str(place / str(user)), "TMPDIR": str(place / str(user))}
    return {**kept, "PYTHONPATH": str(ROOT), "HPC_SITE_CONFIG": "", "PYTHONDONTWRITEBYTECODE": "1"}


def as_user(user: int, place: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """A command as another user, in that user's home; 0 is root.

    Where the interpreter or this tree lies in a folder that others may not enter, the process may read everything all the
    same (capabilities(7), CAP_DAC_READ_SEARCH): what it may write, and who it is, stays that user's.
    """
    words = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
    if user:
        words += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    return subprocess.run(
        [*words, sys.executable, *argv], env=environ(place, user or ME), cwd=place / str(user or ME),
        capture_output=True, text=True, timeout=90,
    )  # fmt: skip


def facts(folder: Path) -> dict[str, tuple[int, ...]]:
    """Everything below a folder: kind and rights, owner, size, and when it was changed in any way."""
    found = {}
    for path in (folder, *folder.rglob("*")):
        status = path.lstat()
        found[str(path)] = (status.st_mode, status.st_uid, status.st_gid, status.st_size, status.st_ctime_ns)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("user", [ME, 0])
def test_s7_a_run_and_its_clearing_up_touch_nothing_of_another_users(place: Path, user: int) -> None:
    """Not even root's does: a run that fails, is started again, and leaves processes for its agent to end."""
    theirs = place / str(OTHER)
    assert as_user(OTHER, place, "-m", "hpc.launch", "--local", "run_dir=run", "--", "true").returncode == 0
    (theirs / "notes").write_text("theirs")
    before = facts(theirs)
    sleeper = subprocess.Popen(["sleep", "300"], user=OTHER, group=OTHER, extra_groups=[], start_new_session=True)
    try:
        words = ["-m", "hpc.launch", "--local", "run_dir=run", "launch.retry_failures=1", "--"]
        words += ["sh", "-c", "setsid sleep 301 & printf x >>ran; exit 3"]
        done = as_user(user, place, *words)
        time.sleep(0.2)
        if user:
            assert done.returncode == 3 and (place / str(ME) / "ran").read_text() == "xx", done.stderr
        else:  # root's run directory would lie in a home that is not root's
            assert done.returncode == 2 and "on the way to it belongs to user id" in done.stderr
            done = as_user(0, place, *words[:3], f"run_root={place}/roots", *words[4:])
            assert done.returncode == 3 and (place / str(ME) / "ran").read_text() == "xx", done.stderr
        assert sleeper.poll() is None
    finally:
        sleeper.kill()
        sleeper.wait()
    assert facts(theirs) == before


@pytest.mark.slow
@pytest.mark.parametrize("user", [ME, 0])
def test_s7_nothing_in_another_users_folder_is_started_continued_or_written_to(place: Path, user: int) -> None:
    theirs = place / str(OTHER)
    run = theirs / "run"
    run.mkdir(mode=0o777)
    run.chmod(0o777)
    (run / "config.yaml").write_text(f"command: [touch, '{place / str(ME)}/CANARY']\n")
    (run / "job.sh").write_text("#!/bin/bash\ntouch CANARY\n")
    (run / "record.jsonl").write_text('{"event": "submitted", "job_id": "7"}\n')
    for path in (run, *run.iterdir()):
        os.chown(path, OTHER, OTHER)
    before = facts(theirs)
    for words in (
        ["hpc.launch", "--local", "--run-dir", str(run)],
        ["hpc.launch", "--local", f"run_dir={run}", "--", "true"],
        ["hpc.launch", "--local", f"run_root={run}", "--", "true"],
        ["hpc.submit", "--local", f"run_root={run}/deeper", "--", "true"],
        ["hpc.submit", "--allow-root", "--continue", str(run)],
    ):
        done = as_user(user, place, "-m", *words)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
        assert f"user id {OTHER}" in done.stderr
    assert facts(theirs) == before and not list(place.rglob("CANARY"))


def test_s7_only_this_user_tells_the_controller_that_agents_stand_by(place: Path) -> None:
    listener = Listener()
    call = f"from hpc.node.standby import Standby; print(Standby({listener.name!r}).report({{'code': 137}}))"
    heard: dict[int, Any] = {}
    for user in (OTHER, 0):
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(as_user, user, place, "-c", call)
            while not asked.done():
                heard[user] = heard.get(user) or listener.hear()
                time.sleep(0.02)
        assert asked.result().stdout == f"{user == 0}\n", asked.result().stderr
    assert heard == {OTHER: None, 0: {"code": 137}}
    listener.close()
