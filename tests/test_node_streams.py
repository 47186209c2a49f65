"""What workers print: all of it in their logs, whatever becomes of the screen."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from steps import ROOT, step_environ

from hpc.node.streams import WorkerStream, open_log

TEXT = "".join(f"line {number}\n" for number in range(30_000)).encode()


def test_a_screen_on_a_full_disk_or_without_a_reader_harms_nothing(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    for number, screen in enumerate((os.open("/dev/full", os.O_WRONLY), writer)):
        log = open_log(tmp_path, number)
        stream = WorkerStream(log, screen, b"[rank 0] ")
        os.write(stream.writer, TEXT[:60_000])
        assert stream.copy()
        stream.close_writer()
        stream.finish()
        assert log is not None and (tmp_path / f"rank-{number}.log").read_bytes() == TEXT[:60_000]
        log.close()
        os.close(screen)


def test_signals_lose_nothing_of_what_is_shown() -> None:
    """A write that a signal interrupts has written a part."""
    reader, screen = os.pipe()
    stream = WorkerStream(None, screen, b"")
    seen: list[bytes] = []

    def read() -> None:
        while data := os.read(reader, 4000):
            seen.append(data)
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.001)

    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    thread = threading.Thread(target=read)
    try:
        thread.start()
        stream._emit(TEXT)
        os.close(screen)
        thread.join(60)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert b"".join(seen) == TEXT
    stream.close()
    os.close(reader)


@pytest.mark.parametrize("cut", range(4))
def test_a_line_without_end_is_not_cut_through_a_character(tmp_path: Path, cut: int) -> None:
    screen = os.open(tmp_path / "screen", os.O_WRONLY | os.O_CREAT)
    stream = WorkerStream(None, screen, b"[rank 0] ")
    text = (b"x" * cut + "实验é😀".encode() * 2000)[:20_001]
    os.write(stream.writer, text)
    stream.copy()
    stream.close_writer()
    stream.finish()
    os.close(screen)
    shown = (tmp_path / "screen").read_bytes()
    *lines, last = shown.split(b"\n")[:-1]
    assert [line.decode().startswith("[rank 0] ") for line in lines] == [True]  # decodes: nothing was cut
    assert b"".join(line.removeprefix(b"[rank 0] ") for line in (*lines, last)) == text


def test_the_workers_exit_code_counts_though_nothing_can_be_shown(tmp_path: Path) -> None:
    (tmp_path / "attempt-0").mkdir()
    environ = {**step_environ(0, tasks_per_node=(1,)), "HPC_RUN_DIR": str(tmp_path), "HPC_ATTEMPT": "0"}
    command = [sys.executable, "-m", "hpc.node", "--", "sh", "-c", "seq 30000; exit 3"]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, env=environ, cwd=ROOT, stdout=full, stderr=full, timeout=120)
    assert done.returncode == 3
    assert (tmp_path / "attempt-0/rank-0.log").read_text().endswith("\n29999\n30000\n")
