"""Where sbin/test promises that every test runs, a skipped one fails the session: part of conftest.py."""

from __future__ import annotations

import os

import pytest

MUST_RUN = "HPC_TESTS_MUST_RUN"
"""Set by sbin/test, as root on Debian."""
ALLOWED = (
    "needs a GPU",
    "needs several GPUs",
    "needs the machine's own process numbers",  # not a container's
    "needs a memory cgroup of version 1",  # a kernel that boots with version 2 has none
)
"""What no set-up of ours can bring: a test that says so may be skipped."""
_skipped: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if not hasattr(report, "wasxfail"):
        _note(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _note(report)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if os.environ.get(MUST_RUN) and _skipped and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if os.environ.get(MUST_RUN) and _skipped:
        terminalreporter.section("skipped although every test must run here", red=True)
        for line in _skipped:
            terminalreporter.line(line)


def _note(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not any(words in reason for words in ALLOWED):
            _skipped.append(f"{report.nodeid}: {reason}")
