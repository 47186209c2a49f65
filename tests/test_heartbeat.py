"""The heartbeat: what a rank writes, what its agent reads, and what it makes of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from steps import ROOT

from hpc import beats
from hpc.node import pulse
from hpc.node.pulse import Pulse, Watch, is_stopped
from hpc.train.heartbeat import Heartbeat


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> tuple[Pulse, Heartbeat]:
    agents = Pulse()
    monkeypatch.setenv(beats.VARIABLE, str(os.dup(agents.descriptor)))
    return agents, Heartbeat.from_environ()


def test_the_agent_reads_what_the_rank_wrote(pair: tuple[Pulse, Heartbeat]) -> None:
    agents, rank = pair
    assert beats.VARIABLE not in os.environ  # what the rank starts has no heartbeat
    beat = agents.beat()
    assert beat is not None and (beat.phase, beat.step, beat.limit_s) == ("start-up", None, None) and beat.age_s < 30
    rank.beat(41)
    rank.beat(42)
    beat = agents.beat()
    assert beat is not None and (beat.phase, beat.step) == ("step", 42) and beat.step_s > 0
    rank.phase("save", 90.0)
    beat = agents.beat()
    assert beat is not None and (beat.phase, beat.step, beat.limit_s) == ("save", 42, 90.0)
    assert Pulse().beat() is None


def test_without_an_agent_it_writes_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("", "nonsense", "99999"):
        monkeypatch.setenv(beats.VARIABLE, text)
        rank = Heartbeat.from_environ()
        rank.beat(1)
        rank.phase("evaluate", None)
        assert Pulse().beat() is None


def test_a_process_started_by_execution_finds_it() -> None:
    agents = Pulse()
    os.set_inheritable(agents.descriptor, True)
    code = "from hpc.train.heartbeat import Heartbeat; Heartbeat.from_environ().beat(7)"
    environ = {"PYTHONPATH": str(ROOT), beats.VARIABLE: str(agents.descriptor)}
    subprocess.run([sys.executable, "-c", code], env=environ, pass_fds=[agents.descriptor], check=True)
    beat = agents.beat()
    assert beat is not None and beat.step == 7


@pytest.mark.parametrize(
    ("phase", "limit_s", "step_s", "silent_s", "is_fault"),
    [
        ("step", None, 0.1, 599.0, False),
        ("step", None, 0.1, 601.0, True),
        ("step", None, 300.0, 1400.0, False),  # slow steps
        ("step", None, 300.0, 1600.0, True),
        ("save", None, 0.1, 3500.0, False),
        ("evaluate", None, 0.1, 3700.0, True),
        ("start-up", None, 0.0, 3500.0, False),
        ("save", 20.0, 0.1, 25.0, True),
    ],
)
def test_silence_is_a_hang_after_the_limit_of_its_phase(
    pair: tuple[Pulse, Heartbeat], phase: str, limit_s: float | None, step_s: float, silent_s: float, is_fault: bool
) -> None:
    agents, rank = pair
    rank.beat(3)
    if phase != "step":
        rank.phase(phase, limit_s)
    rank._numbers[beats.STEP_S] = step_s
    rank._numbers[beats.BEAT] = time.monotonic() - silent_s
    fault = agents.fault(os.getpid(), 1.0, 1e6, 600.0)
    assert (fault is not None) is is_fault
    if fault is not None:
        assert f"phase {phase}, after step 3" in fault
    assert agents.fault(os.getpid(), 1.0, 1e6, 0.0) is None  # switched off
    assert agents.fault(os.getpid(), 1.0, 5.0, 600.0) is None  # the agent itself slept until 5 s ago


def test_a_break_in_the_watch_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(pulse.time, "monotonic", lambda: now[0])
    watch = Watch()
    assert watch.look() == (0.0, 0.0)
    now[0] += 0.3
    assert watch.look() is None
    now[0] += 0.8
    assert watch.look() == (pytest.approx(1.1), pytest.approx(1.1))
    now[0] += 400.0  # the whole job was suspended
    assert watch.look() == (0.0, 0.0)


def test_a_process_is_stopped_or_not() -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        assert not is_stopped(child.pid)
        child.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 20
        while not is_stopped(child.pid):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        agents = Pulse()
        assert [agents.fault(child.pid, 4.0, 1e6, 0.0) is not None for _ in range(3)] == [False, False, True]
        child.send_signal(signal.SIGCONT)
        while is_stopped(child.pid):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert agents.fault(child.pid, 4.0, 1e6, 0.0) is None
    finally:
        child.kill()
        child.wait()
    assert not is_stopped(child.pid)
