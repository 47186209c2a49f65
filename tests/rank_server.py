"""Starts real ranks quickly: a process that has imported torch once, and forks a trial's ranks when asked.

As the node agent does it. `Ranks` is the client (the fixture `ranks` of conftest.py); run as a script it is the server.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Trial:
    """How the ranks of one trial ended: exit codes (-9: killed), what each printed, and how long it took."""

    codes: list[int]
    logs: list[str]
    seconds: float

    def check(self) -> Trial:
        assert self.codes == [0] * len(self.codes), self.text()
        return self

    def text(self) -> str:
        return "\n".join(f"--- rank {rank}: {self.codes[rank]}\n{log}" for rank, log in enumerate(self.logs))


class Ranks:
    """Runs `python -m hpc.train ARGUMENTS` on some ranks."""

    def __init__(self) -> None:
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("HPC_", "SLURM_", "TORCHELASTIC_"))}
        self._server = subprocess.Popen(
            [sys.executable, str(Path(__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**clean, "PYTHONPATH": path, "HPC_SITE_CONFIG": "", "OMP_NUM_THREADS": "1"},
        )

    def __call__(
        self,
        folder: Path,
        *arguments: str,
        ranks: int = 1,
        nodes: int = 1,
        env: dict[str, str] | None = None,
        stagger_s: float = 0.0,
        kill_after_s: float | None = None,
        patience_s: float = 10.0,
        notice: str = "",
        notice_file: str = "",
    ) -> Trial:
        """Start the ranks in `folder`; `patience_s` after the first failure the others are killed.

        `notice`: signals ("USR2 TERM") that each rank gets as soon as there is a file `notice_file` in `folder`.
        """
        order: dict[str, Any] = {"folder": str(folder), "arguments": arguments, "ranks": ranks, "nodes": nodes}
        order |= {"env": env or {}, "stagger_s": stagger_s, "kill_after_s": kill_after_s, "patience_s": patience_s}
        order |= {"notice": notice.split(), "notice_file": notice_file}
        assert self._server.stdin is not None and self._server.stdout is not None
        print(json.dumps(order), file=self._server.stdin, flush=True)
        answer = json.loads(self._server.stdout.readline())
        logs = [(folder / f"rank-{rank}.log").read_bytes().decode() for rank in range(ranks)]
        return Trial(answer["codes"], logs, answer["seconds"])

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(30)


def serve() -> None:
    import torch._dynamo  # noqa: F401  (DDP and optimizers import it late)

    import hpc.train.__main__  # noqa: F401

    for line in sys.stdin:
        order = json.loads(line)
        began = time.monotonic()
        codes = run(order)
        print(json.dumps({"codes": codes, "seconds": time.monotonic() - began}), flush=True)


def run(order: dict[str, Any]) -> list[int]:
    """Fork the ranks of one order and wait for all of them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = {}
    for rank in range(order["ranks"]):
        children[start(order, rank, port)] = rank
        time.sleep(order["stagger_s"])
    codes = [0] * order["ranks"]
    deadline = time.monotonic() + 120
    if order["kill_after_s"] is not None:
        deadline = time.monotonic() + order["kill_after_s"]
    notices = [signal.Signals[f"SIG{name}"] for name in order["notice"]]
    while children:
        if notices and (Path(order["folder"]) / order["notice_file"]).exists():
            for child in children:
                os.kill(child, notices[0])
            del notices[0]
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in children:
            code = os.waitstatus_to_exitcode(status)
            codes[children.pop(pid)] = code
            if code != 0:
                deadline = min(deadline, time.monotonic() + order["patience_s"])
        elif time.monotonic() > deadline:
            for child in children:
                os.kill(child, signal.SIGKILL)
            deadline = float("inf")
        else:
            time.sleep(0.005)
    return codes


def start(order: dict[str, Any], rank: int, port: int) -> int:
    """Fork one rank; returns its process id."""
    ranks, nodes = order["ranks"], order["nodes"]
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        os.chdir(order["folder"])
        log = os.open(f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        if ranks > 1:
            local = ranks // nodes
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank % local)}
            os.environ |= {"LOCAL_WORLD_SIZE": str(local), "GROUP_RANK": str(rank // local)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= order["env"]
        from hpc.train.__main__ import main

        code = main(order["arguments"])
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)
    return 0


if __name__ == "__main__":
    serve()
