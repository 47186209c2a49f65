"""The script writer: another process's text is this one's, and none is left, however the block ends."""

from __future__ import annotations

import os
import signal

import pytest

from hpc.login import submitter
from hpc.login.script import Script, ScriptWriter

SCRIPT = Script(
    run_dir="/runs/größe 1",
    directives=(("job-name", "größe %d 'a' \\"), ("requeue", None), ("nodes", "2"), ("mail-type", "END")),
    setup=["umask 0022", "cd -- '/work dir' || exit"],
    argv=("/usr/bin/python3", "-m", "hpc.launch", "--run-dir", "/runs/größe 1"),
)


def _no_child_is_left() -> bool:
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return True
    return False


def _descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("ahead", [True, False])
def test_the_same_text_in_either_process(ahead: bool) -> None:
    before = _descriptors()
    with ScriptWriter(ahead=ahead) as writer:
        text = writer.render(SCRIPT)
    assert text == submitter.render(SCRIPT)
    assert "größe %d" in text and text.rstrip().endswith("'/runs/größe 1'")
    assert _no_child_is_left() and _descriptors() == before


def test_nothing_asked_leaves_no_process() -> None:
    before = _descriptors()
    with pytest.raises(KeyboardInterrupt), ScriptWriter():
        raise KeyboardInterrupt
    assert _no_child_is_left() and _descriptors() == before


def test_a_writer_that_was_killed_is_not_missed() -> None:
    with ScriptWriter() as writer:
        assert writer._pid is not None
        os.kill(writer._pid, signal.SIGKILL)
        os.waitid(os.P_PID, writer._pid, os.WEXITED | os.WNOWAIT)
        assert writer.render(SCRIPT) == submitter.render(SCRIPT)
    assert _no_child_is_left()


def test_a_writer_that_fails_is_not_missed_and_says_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    whole, this = submitter.render, os.getpid()

    def render(script: Script) -> str:
        assert os.getpid() == this, "only in the child"
        return whole(script)

    monkeypatch.setattr(submitter, "render", render)
    with ScriptWriter() as writer:
        assert writer.render(SCRIPT) == whole(SCRIPT)
    assert capfd.readouterr() == ("", "")
