"""The agreed stop: all ranks stop at the same point of their work, though perhaps one alone has heard the notice.

All ranks come to the same sequence of points (before and after each step, between batches of an evaluation). They
agree through the store, in a thread of each rank, so that a point costs no more than taking a lock:

1. A rank that heard a notice proposes to stop. Each rank's thread looks for a proposal a few times per second.
2. Each thread holds its main thread at the next point, whatever it is doing until then, and says which point that is.
3. The stop is the last of these points. Nobody has gone past it, and those before it go on up to it.

No main thread is waited for in 1 and 2, so a rank that waits in a collective for one that is held gets its answer all
the same: the held one is let go as soon as the threads have spoken, at the latest up to the point where all meet.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from hpc.train.limit import TimeLimit
from hpc.train.notice import Notices

if TYPE_CHECKING:
    from torch.distributed import Store

log = logging.getLogger("hpc.train")

LOOK_S = 0.2
ANSWER_S = 0.02
"""Seconds between two looks at the store, for a proposal and for its outcome."""
LOOKS_PER_S = 4000
"""No more than this many in a second from all ranks together: a large world looks less often."""
LINGER_S = 2.0
"""How long the end of the run waits for a look at the store that is under way."""


class Stop:
    """Where this rank and the others agree on the point to stop at. Use as a context manager, around the whole run."""

    def __init__(
        self,
        notices: Notices,
        rank: int = 0,
        size: int = 1,
        store: Store | None = None,
        limit: TimeLimit | None = None,
    ) -> None:
        """`limit`: the time limit, which rank 0 keeps for all."""
        self.reason: str | None = None
        """The notice that the ranks stop for, once they do."""
        self._notices = notices
        self._limit = limit if limit is not None and limit.is_known and rank == 0 else None
        self._rank, self._size = rank, size
        self._store: Store | None = None
        if store is not None and size > 1:
            self._store = store.clone()  # type: ignore[attr-defined]  # a connection that nothing else waits on
        self._passed = 0  # points that the main thread has gone past
        self._held_at: int | None = None  # the point that it may not pass before the stop is known
        self._stop_at: int | None = None
        self._known = threading.Condition()
        self._wake = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Stop:
        if self._store is not None:
            self._notices.on_notice = self._wake.set
            self._thread = threading.Thread(target=self._agree, args=(self._store,), name="agreed stop", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._closed = True
        self._notices.on_notice = None
        self._wake.set()
        if self._thread is not None:
            self._thread.join(LINGER_S)
        self._store = None
        if error is None:
            self._notices.settle()

    def expect_save(self, seconds_needed: Callable[[], float]) -> None:
        """From now on the time limit leaves this much room for a whole save."""
        if self._limit is not None:
            self._limit.save_s = seconds_needed

    def here(self) -> bool:
        """Whether to stop at this point. Every rank asks at the same points, in the same order."""
        if self._limit is not None and self._limit.is_near():
            self._limit = None
            self._notices.time_is_up()
        if self._store is None:
            self.reason = self.reason or self._notices.first
            if self.reason is not None:
                self._notices.settle()
            return self.reason is not None
        with self._known:
            if self._held_at is not None and self._passed >= self._held_at:
                self._known.wait_for(lambda: self._stop_at is not None)
            if self._stop_at is not None and self._passed >= self._stop_at:
                self._notices.settle()
                return True
            self._passed += 1
            return False

    def _agree(self, store: Store) -> None:
        """The thread: wait for a notice here or a proposal of another rank, then settle on a point with all others."""
        try:
            self._await_proposal(store)
            if self._closed:
                return
            reason = store.get("stop/proposed").decode()
            self._notices.learn(reason)
            with self._known:
                self._held_at = self._passed
            store.set(f"stop/held/{self._rank}", str(self._held_at))
            if store.add("stop/answers", 1) == self._size:  # the last one to answer knows all answers
                stop_at = max(int(store.get(f"stop/held/{rank}")) for rank in range(self._size))
                store.set("stop/at", str(stop_at))
            while not self._closed and not store.check(["stop/at"]):
                time.sleep(max(ANSWER_S, self._size / LOOKS_PER_S))
            if self._closed:
                return
            with self._known:
                self.reason, self._stop_at = reason, int(store.get("stop/at"))
                self._known.notify_all()
        except (RuntimeError, ValueError, KeyError) as error:  # the store has gone, or a stranger wrote into it
            log.debug("the ranks cannot agree on a stop: %s", error)

    def _await_proposal(self, store: Store) -> None:
        """Return when a rank has proposed to stop (this one as soon as it hears a notice), or at the end."""
        while not self._closed:
            if self._notices.first is not None:
                store.compare_set("stop/proposed", "", self._notices.first)
            if store.check(["stop/proposed"]):
                return
            self._wake.wait(max(LOOK_S, self._size / LOOKS_PER_S))
