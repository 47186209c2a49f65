"""What a person sees while a run trains: one moving line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import sys
import time
from typing import Any, TextIO

from hpc.errors import printable_lines

REDRAW_S = 0.2
SOONEST_LINE_S = 1.0
LATEST_LINE_S = 60.0


class Progress:
    """Plain lines, for a log. The gap between two grows with the run, from a second to a minute."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = sys.stdout if stream is None else stream
        self.total = 0
        self._began = self._printed = time.monotonic()
        self._first_step = 0

    def line(self, text: str) -> None:
        """Print a line of its own."""
        print(printable_lines(text), file=self.stream, flush=True)

    def begin(self, step: int, total: int) -> None:
        """The loop starts at `step` and will end at `total`."""
        self.total, self._first_step = total, step
        self._began = self._printed = time.monotonic()

    def step(self, step: int) -> None:
        """A step is done; called at every one, so it has to be cheap."""

    def figures(self, step: int, epoch: int, loss: float, samples_per_s: float) -> None:
        """The figures of a logged step."""
        now = time.monotonic()
        gap = min(LATEST_LINE_S, max(SOONEST_LINE_S, 0.02 * (now - self._began)))
        if now - self._printed < gap and step != self.total and step != self._first_step + 1:
            return
        self._printed = now
        self.line(
            f"step {step}/{self.total}, epoch {epoch + 1}, loss {loss:.4f}, "
            f"{samples_per_s:.0f} samples/s, {duration(self._seconds_left(step))} left"
        )

    def close(self) -> None:
        """Nothing more will be drawn. May be called twice."""

    def _seconds_left(self, step: int) -> float:
        done = step - self._first_step
        return (time.monotonic() - self._began) / done * (self.total - step) if done > 0 else math.nan


class Bar(Progress):
    """A single line that is drawn again in place; other lines appear above it. Drawn by the loop, without a thread."""

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__(stream)
        self._bar: Any = None
        self._task: Any = None
        self._drawn = 0.0
        self._text = ""

    def line(self, text: str) -> None:
        if self._bar is None:
            super().line(text)
        else:
            self._bar.console.print(printable_lines(text), markup=False, highlight=False, soft_wrap=True)

    def begin(self, step: int, total: int) -> None:
        super().begin(step, total)
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress

        self.close()
        self._bar = RichProgress(
            BarColumn(bar_width=20),
            TextColumn("step {task.completed:.0f}/{task.total:.0f}{task.fields[text]}"),
            console=Console(file=self.stream, force_terminal=True),
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bar.add_task("", total=total, completed=step, text="")
        self._bar.start()

    def step(self, step: int) -> None:
        now = time.monotonic()
        if self._bar is None or (now - self._drawn < REDRAW_S and step != self.total):
            return
        self._drawn = now
        text = f"{self._text}, {duration(self._seconds_left(step))} left"
        self._bar.update(self._task, completed=step, text=text, refresh=True)

    def figures(self, step: int, epoch: int, loss: float, samples_per_s: float) -> None:
        self._text = f", epoch {epoch + 1}, loss {loss:.4f}, {samples_per_s:.0f} samples/s"

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class Silent(Progress):
    """For every rank but 0: only lines that this rank itself has to say, with its number, on stderr."""

    def __init__(self, rank: int) -> None:
        super().__init__(sys.stderr)
        self.rank = rank

    def line(self, text: str) -> None:
        super().line(f"rank {self.rank}: {text}")

    def figures(self, step: int, epoch: int, loss: float, samples_per_s: float) -> None:
        return


def progress_for(rank: int, on_terminal: bool) -> Progress:
    """What suits this rank and its stdout."""
    if rank > 0:
        return Silent(rank)
    return Bar() if on_terminal else Progress()


def duration(seconds: float) -> str:
    """Seconds as a person reads them: "12.3 s", "4 min 05 s", "3 h 20 min"; "?" when unknown."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def figure(name: str, value: float) -> str:
    """A metric as a person reads it; accuracies in percent."""
    return f"{name} {100 * value:.1f} %" if name.endswith("accuracy") else f"{name} {value:.4g}"
