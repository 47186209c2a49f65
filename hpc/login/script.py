"""The batch script as a value, and the process that writes it out while this one still reads the configuration.

submitit and OmegaConf take the longest to import of all that a submission needs, so each gets a process of its own.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from types import TracebackType


@dataclass(frozen=True, kw_only=True)
class Script:
    """What a batch script is made of. `directives` are long options of sbatch; None is an option without a value."""

    run_dir: str
    directives: Sequence[tuple[str, str | None]]
    setup: Sequence[str]
    """bash, one command per line, between the directives and the command."""
    argv: Sequence[str]


class ScriptWriter:
    """A child process that imports submitit at once and then renders one script; gone at the end of the block.

    With `ahead` false, or where the child fails, this process does it by itself.
    """

    def __init__(self, *, ahead: bool = True) -> None:
        self._pid: int | None = None
        if not ahead:
            return
        asked, answer = os.pipe(), os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(asked[1])
            os.close(answer[0])
            _write_one(asked[0], answer[1])
        os.close(asked[0])
        os.close(answer[1])
        self._asked, self._answer = asked[1], answer[0]

    def __enter__(self) -> ScriptWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def render(self, script: Script) -> str:
        """The whole batch script, as sbatch will read it."""
        if self._pid is not None:
            try:
                with open(os.dup(self._asked), "w", encoding="utf-8", errors="surrogateescape") as asked:
                    json.dump(asdict(script), asked)
                os.close(self._asked)
                self._asked = -1
                with open(os.dup(self._answer), encoding="utf-8", errors="surrogateescape", newline="") as answer:
                    text = answer.read()
            except BrokenPipeError:
                text = ""
            self._end()
            if text:
                return text
        from hpc.login import submitter

        return submitter.render(script)

    def _end(self) -> None:
        if self._pid is None:
            return
        os.kill(self._pid, signal.SIGKILL)  # our own child, not yet waited for: done with its answer, or not needed
        os.waitpid(self._pid, 0)
        self._pid = None
        for descriptor in (self._asked, self._answer):
            if descriptor >= 0:
                os.close(descriptor)


def _write_one(asked: int, answer: int) -> None:
    """The child: never returns, prints nothing, and sends no answer when anything is wrong."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        from hpc.login import submitter

        with open(asked, encoding="utf-8", errors="surrogateescape") as stream:
            text = stream.read()
        if text:
            rendered = submitter.render(Script(**json.loads(text)))
            with open(answer, "w", encoding="utf-8", errors="surrogateescape", newline="") as stream:
                stream.write(rendered)
    finally:
        os._exit(0)
