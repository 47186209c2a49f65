"""The agent of one start: it starts this task's workers, watches them, ends them together, and reports."""

from __future__ import annotations

import contextlib
import enum
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

from hpc import exitcodes
from hpc.errors import HpcError, NoRoom, printable
from hpc.node import clock, lastword, leftovers, signals, stacks
from hpc.node.assembly import Assembly, Go, OthersEnded
from hpc.node.deadline import Deadline
from hpc.node.environment import TaskEnvironment
from hpc.node.inquest import Inquest
from hpc.node.journal import Journal, number_in
from hpc.node.meeting import Connection
from hpc.node.outcome import Failure, first_failure, outcome_of, write_refusal
from hpc.node.pace import Paces
from hpc.node.preflight import GpuCheck
from hpc.node.pulse import LOOK_S, Watch
from hpc.node.settings import AgentSettings
from hpc.node.signals import ENDS, FORWARDED, WARNINGS, SignalPipe
from hpc.node.sparing import Sparing
from hpc.node.standby import Standby
from hpc.node.starting import Starter, Worker
from hpc.node.streams import WorkerStream
from hpc.node.tidy import Tidy
from hpc.node.warning import Warnings
from hpc.node.worker import Start, adopt_orphans
from hpc.rundir import BEGAN_VARIABLE, RunDirectory

SETTLE_S = 0.5  # after a failure: time for the others to fail by themselves, so that the first cause is known
STOP_GRACE_S = 5.0  # from SIGTERM to SIGKILL when another rank of a script has failed
ORPHAN_GRACE_S = 3.0  # the same when the launcher has gone
LISTEN_S = 0.2  # between two looks whether a script has a handler for the warning by now
REPORT_LIMIT_S = 15.0  # how long agents wait for each other's last reports


class State(enum.Enum):
    RUNNING = "running"
    ENDING = "ending"  # SIGTERM is out, SIGKILL is due
    OVER = "over"  # no worker is left


class Agent:
    """One task's workers and its connection to the other agents."""

    def __init__(self, task: TaskEnvironment, settings: AgentSettings, standby: Standby | None = None) -> None:
        self.task, self.settings, self._controller = task, settings, standby
        self.host_name = printable(socket.gethostname())
        self.state = State.RUNNING
        self.workers: list[Worker] = []
        self.failures: list[Failure] = []
        self.run_dir = RunDirectory.from_environ()
        self.assembly = Assembly(
            task,
            timeout_s=settings.rendezvous_timeout_s,
            allow_loopback=settings.allow_loopback,
            note=self.note,
        )
        self.folder = self.run_dir.attempt(self.assembly.attempt) if self.run_dir else None
        self.warnings = tuple({*WARNINGS, settings.warning} - set(ENDS))
        self.tidy = Tidy(task, self.note)
        self.starter = Starter(
            task, settings, self.assembly, self.tidy, folder=self.folder, warnings=self.warnings, note=self.note
        )
        self.go: Go | None = None
        self._signals: SignalPipe | None = None
        self._deadline = Deadline()  # of the next step towards the end
        self._sparing = Sparing()
        self._reports: dict[int, dict[str, Any]] = {}  # rank zero's agent: how each task ended
        self._told_over: dict[str, Any] | None = None
        self._signalled: signal.Signals | None = None
        self.outcome: dict[str, Any] = {}  # rank zero's agent: what outcome.json says, after the end
        self._settled = False
        self._missing = False  # another agent has gone, or was not heard
        self._unheard = Warnings(at_once=self.starter.target.is_training)
        self._no_room: NoRoom | None = None  # for a process of one of the workers
        self._saved = False  # a worker has ended with WANTS_ANOTHER_ATTEMPT
        self.inquest = Inquest(task, self.host_name, self.note)
        self.journal = Journal(self.run_dir, self.assembly.attempt, self.note)
        self.paces = Paces(settings.slow_after_s, self.note, self.journal.append)
        self._watch = Watch()
        self._last_step: int | None = None  # the newest one that any worker's heartbeat has told of
        self._parent = os.getppid()

    def note(self, text: str) -> None:
        """One line for the log of the batch step."""
        with contextlib.suppress(OSError):  # with srun, the screen goes
            print(f"hpc.node: {self.host_name}: {printable(text)}", file=sys.stderr, flush=True)

    # ---- up to the start -------------------------------------------------------------------------------------------

    def assemble(self) -> Start | None:
        """Everything up to running workers. Returns None in the agent, and what to become in a forked worker."""
        startup = signals.listen()
        startup.also(self.settings.warning)
        startup.on_end(self._end_before_workers)
        check = GpuCheck(self.host_name, self.task.visible_gpus)
        self.tidy.begin()
        self.assembly.open()
        cores = self.starter.shares()
        fork = self.starter.preload(len(cores[0]))
        for line in check.verdict():
            self.note(line)
        self.tidy.wait_for_gpus()
        self.go = self.assembly.meet()
        if self.assembly.is_host:
            self._record_start(self.go)
        agreed = self.assembly.start_store()
        self._signals = SignalPipe({*FORWARDED, *self.warnings, signal.SIGCHLD})
        adopt_orphans()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        run_id = self.task.job_id or (self.run_dir.path.name if self.run_dir else "none")
        begun = self.starter.start_all(self.go, cores, agreed, run_id=run_id, fork=fork, pipe=self._signals)
        if isinstance(begun, Start):
            return begun
        self.workers, self._no_room = begun
        for number in dict.fromkeys(startup.warnings):
            self._unheard.send(self.workers, number)
        return None

    def _end_before_workers(self, number: signal.Signals) -> None:
        """In a signal's handler, while nothing runs yet: end at once, and tell the controller what it was."""
        try:
            text = f"{number.name} came before any worker was started"
            os.write(2, f"hpc.node: {self.host_name}: {text}: ending\n".encode())
            if self.assembly.is_host and self.folder is not None:
                code = 128 + number
                first = Failure(rank=-1, host=self.host_name, code=code, time=time.time(), message=text, by_us=True)
                self._write_outcome(code, first)
            lastword.speak(self.task, self._controller, self.settings.code)
        finally:
            os._exit(128 + number)

    def refuse(self, error: HpcError) -> None:
        """Note for the controller why this task cannot start: other tasks are ended for it, and say less."""
        if self.folder is not None and not isinstance(error, OthersEnded):
            write_refusal(self.folder, self.task.task_rank, self.host_name, error)

    def _record_start(self, go: Go) -> None:
        self.paces.places(go.places)
        self.journal.append(
            "started",
            job_id=self.task.job_id,
            began=number_in(BEGAN_VARIABLE),
            layout=self.task.layout,
            world_size=go.infos[0].world_size,
            nodes=[list(place) for place in go.places[:2000]],
        )

    # ---- while they run --------------------------------------------------------------------------------------------

    def watch(self) -> int:
        """Run the loop until every worker of the step has ended; returns the exit code for this task."""
        assert self._signals is not None
        if self.assembly.guest is not None:
            self.inquest.clock.ask(self.assembly.guest)
        if self._no_room is not None:
            self._tell(self.inquest.never(self._no_room))
            if not self.workers:
                self._all_ended()
        while not self._finished():
            with selectors.DefaultSelector() as selector:
                selector.register(self._signals.reader, selectors.EVENT_READ, self._on_signals)
                for worker in self.workers:
                    for stream in worker.streams:
                        selector.register(stream.reader, selectors.EVENT_READ, (worker, stream))
                for sock in self._sockets():
                    events = sock.events if isinstance(sock, Connection) else selectors.EVENT_READ
                    selector.register(sock, events, self._on_message)
                if self._controller is not None and self._controller.is_open:
                    selector.register(self._controller, selectors.EVENT_READ, self._on_word)
                wait = self._deadline.left_s
                if self.state is not State.OVER:
                    wait = LOOK_S if wait is None else min(wait, LOOK_S)
                if self._unheard:
                    wait = LISTEN_S if wait is None else min(wait, LISTEN_S)  # shorter than LOOK_S
                for key, _ in selector.select(wait):
                    if isinstance(key.data, tuple):
                        self._on_output(*key.data)
                    else:
                        key.data(key.fileobj)
            if self._unheard:
                self._unheard.deliver()
            if self.state is State.RUNNING and (times := self._watch.look()) is not None:
                self._look_at_workers(*times)
                self.paces.exchange(self.workers, self.assembly.guest)
            if self._deadline.take():
                self._on_deadline()
        return self._conclude()

    def _sockets(self) -> list[socket.socket | Connection]:
        if self.assembly.host is not None:
            return self.assembly.host.sockets()
        return [self.assembly.guest] if self.assembly.guest is not None else []

    def _on_output(self, worker: Worker, stream: WorkerStream) -> None:
        if self.settings.output_beats:
            worker.pulse.note_output()
        if stream in worker.streams and not stream.copy():
            worker.streams.remove(stream)
            stream.finish()

    def _on_signals(self, _: Any) -> None:
        assert self._signals is not None
        for number in self._signals.read():
            if number == signal.SIGCHLD:
                self._reap()
            elif number in self.warnings and (number != signal.SIGHUP or os.getppid() == self._parent):
                self._unheard.send(self.workers, number)
            elif number == signal.SIGHUP and os.getppid() != self._parent:
                self._end(signal.SIGTERM, ORPHAN_GRACE_S)
            elif number == self._signalled == signal.SIGINT:  # asked twice at the keyboard
                self._end(signal.SIGTERM, 0.0)
            else:
                self._signalled = number
                self._end(number, self.settings.grace_s)

    def _send(self, number: signal.Signals) -> None:
        for worker in self.workers:
            if worker.code is None and not self._sparing.spares(worker):
                os.kill(worker.pid, number)  # our own child, not yet waited for: the number cannot be another's

    def _end_for_good(self) -> None:
        """End what still runs because another rank has failed: it is no notice, and the training core takes it for none."""
        for worker in self.workers:
            if worker.fault is not None and worker.code is None:
                worker.kill()
        if self.starter.target.is_training:
            self._sparing.begin(self.settings.grace_s)
            self._end(signal.SIGKILL, 1.0)
        else:
            self._end(signal.SIGTERM, STOP_GRACE_S)

    def _end(self, number: signal.Signals, grace_s: float) -> None:
        """Ask the workers to end with a signal; SIGKILL follows after the grace time."""
        if self.state is State.OVER:
            return
        self.state = State.ENDING
        for worker in self.workers:
            worker.ended_by_us = worker.ended_by_us or worker.code is None
        self._send(number)
        self._deadline.set(self._sparing.next_look_s(self.workers, grace_s))

    def _on_word(self, controller: Standby) -> None:
        """Slurm ends the job: everything is over before its SIGKILL, which would leave files and what has left the step."""
        left_s = controller.hear()
        if left_s is not None:
            self._deadline.never_after(left_s)
            self._sparing.stop_within(left_s)

    def _on_deadline(self) -> None:
        if self.state is State.RUNNING and self._saved and not self.failures:
            self.note(f"ranks have saved and left, others still run after {self.settings.grace_s:g} s: ending them")
            self._settle()
        elif self.failures and not self._settled:  # the others had time to fail by themselves
            self._settle()
        elif self.state is State.ENDING:
            self._deadline.set(self._sparing.kill_others(self.workers))
        elif self._told_over is None:  # OVER, and the other agents' last word has not come
            self._missing = True
            first = first_failure(self.failures)
            self._told_over = {"code": first.code if first else exitcodes.WANTS_ANOTHER_ATTEMPT}

    def _reap(self) -> None:
        """Take note of every ended child; adopted orphans are only collected."""
        by_pid = {worker.pid: worker for worker in self.workers if worker.code is None}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            worker = by_pid.pop(pid, None)
            if worker is not None:
                worker.code = exitcodes.from_returncode(os.waitstatus_to_exitcode(status))
                self._on_worker_end(worker)
        if self.state is not State.OVER and all(worker.code is not None for worker in self.workers):
            self._all_ended()

    def _on_worker_end(self, worker: Worker) -> None:
        for stream in worker.streams:
            stream.finish()
        worker.streams = []
        if worker.code == exitcodes.DONE:
            return
        if worker.code == exitcodes.WANTS_ANOTHER_ATTEMPT:
            self._wait_for_saving()
            return
        self._tell(self.inquest.ended(worker))

    def _tell(self, failure: Failure) -> None:
        if self.assembly.guest is not None:
            self.assembly.guest.send(failed=failure.to_dict())
        self._add(failure)

    def _look_at_workers(self, since_s: float, watched_s: float) -> None:
        """A worker that is stopped or hangs is ended, and is the cause when the others wait for it in vain.

        Before that the stacks of all ranks are taken, here and on every node.
        """
        faults = []
        for worker in self.workers:
            if worker.code is None and worker.fault is None:
                worker.fault = worker.pulse.fault(worker.pid, since_s, watched_s, self.settings.hang_timeout_s)
                if worker.fault is not None:
                    self.note(f"rank {worker.info.rank} {worker.fault}: ending it")
                    worker.ended_by_us = True
                    faults.append(self.inquest.hung(worker))
        if faults:
            self._ask_for_stacks()
        for failure in faults:
            self._tell(failure)

    def _ask_for_stacks(self) -> None:
        """The stacks of this task's ranks go to rank zero's agent, which asks the others for theirs."""
        found = self.inquest.ask(self.workers)
        if found is None:
            return
        if self.assembly.guest is not None:
            self.assembly.guest.send(stacks=[stack.to_dict() for stack in found])
        elif self.assembly.host is not None:
            self.assembly.host.broadcast(stacks=True)
            self.assembly.host.flush(0.0)

    def _steps_seen(self) -> int | None:
        """The newest step that this task's workers and, on rank zero's agent, all others have told of."""
        steps = [beat.step for worker in self.workers if (beat := worker.pulse.beat()) and beat.step is not None]
        self._last_step = max([*steps, *([self._last_step] if self._last_step is not None else [])], default=None)
        return self._last_step

    def _wait_for_saving(self) -> None:
        """A worker has saved and left: the others do so at the same step, and get the grace time for it."""
        self._saved = True
        if not self._deadline.is_set:
            self._deadline.set(self.settings.grace_s)

    def _add(self, failure: Failure) -> None:
        self.failures.append(failure)
        if not self._settled and self.state is not State.ENDING:
            waiting = any(one.hung for one in self.failures) and not (self.assembly.is_host and self.inquest.complete)
            self._deadline.clear()
            self._deadline.set(stacks.LIMIT_S if waiting else SETTLE_S)

    def _settle(self) -> None:
        """Some time after a first failure: name it, and end what still runs, here and everywhere."""
        self._settled = True
        self.failures = self.inquest.conclude(self.failures)
        first = first_failure(self.failures)
        if self.assembly.host is not None:
            self.assembly.host.broadcast(stop={"code": first.code if first else exitcodes.WANTS_ANOTHER_ATTEMPT})
        self._end_for_good()
        if self.state is State.OVER:
            self._deadline.set(REPORT_LIMIT_S)

    # ---- with the other agents -------------------------------------------------------------------------------------

    def _on_message(self, source: Any) -> None:
        if self.assembly.host is not None:
            if not isinstance(source, Connection):
                self.assembly.host.accept()
                return
            for task, message in self.assembly.host.serve(source):
                self._hear(task, message)
        elif self.assembly.guest is not None:
            messages, gone = self.assembly.guest.receive()
            for message in messages:
                if "stop" in message:
                    self._settled = True
                    self._end_for_good()
                elif "over" in message:
                    self._told_over = message["over"]
                elif "stacks" in message:
                    self._ask_for_stacks()
                elif "clock" in message:
                    self.inquest.clock.hear(message["clock"], self.assembly.guest)
            if gone:
                silent = self.assembly.guest.silent
                self.assembly.guest.close()
                self.assembly.guest = None
                if self._told_over is None:
                    self._lost(0, self.task.master_host, silent=silent)

    def _hear(self, task: int, message: Mapping[str, Any]) -> None:
        """Rank zero's agent: news of another one."""
        if "failed" in message:
            failure = Failure.from_dict(message["failed"])
            if failure.hung:
                self._ask_for_stacks()
            self._add(failure)
        elif "stacks" in message:
            self.inquest.hear(task, message["stacks"])
            self._ask_for_stacks()
            if self.inquest.complete and self.failures and not self._settled:
                self._deadline.set(0.0)
        elif "paces" in message:
            self.paces.hear(message["paces"])
        elif "clock" in message:
            assert self.assembly.host is not None
            if (guest := self.assembly.host.connections.get(task)) is not None:  # else its last words came with its end
                clock.answer(guest, message["clock"])
        elif "ended" in message:
            self._reports[task] = message["ended"]
            step = message["ended"].get("step")
            if isinstance(step, int):
                self._last_step = max(step, self._last_step or 0)
            if message["ended"].get("code") == exitcodes.WANTS_ANOTHER_ATTEMPT:
                self._wait_for_saving()
        elif "gone" in message and task not in self._reports:
            assert self.assembly.host is not None and self.go is not None
            self._reports[task] = {"code": exitcodes.UNAVAILABLE}
            place = self.go.places[task] if task < len(self.go.places) else ("?", -1, 0)
            self._lost(place[1], place[0], silent=bool(message.get("silent")))

    def _lost(self, rank: int, host: str, *, silent: bool) -> None:
        self._missing = True
        self._add(self.inquest.lost(rank, host, silent=silent))

    def _all_ended(self) -> None:
        self.state = State.OVER
        self._deadline.clear()
        spare = [self.assembly.store_pid] if self.assembly.store_pid is not None else []
        leftovers.end_descendants(spare)
        worst = max((worker.code or 0 for worker in self.workers), default=0)
        if self.assembly.guest is not None:
            self.assembly.guest.send(ended={"code": worst, "step": self._steps_seen()})
        self._reports[self.task.task_rank] = {"code": worst}
        if self.failures or self._saved:
            self._deadline.set(REPORT_LIMIT_S if self.failures else max(self.settings.grace_s, REPORT_LIMIT_S))

    def _finished(self) -> bool:
        if self.state is not State.OVER:
            return False
        if self._told_over is not None:
            return True
        if self.assembly.host is not None:
            return len(self._reports) == self.task.tasks
        if self.assembly.guest is not None:
            return not self.failures and all(worker.code == 0 for worker in self.workers)
        return True

    # ---- the end ---------------------------------------------------------------------------------------------------

    def _conclude(self) -> int:
        """Tell the others, write the outcome, leave nothing behind; returns the exit code."""
        first = first_failure(self.failures)
        code = exitcodes.WANTS_ANOTHER_ATTEMPT if self._saved else exitcodes.DONE
        if first is not None and not (first.by_us and self._saved):
            code = first.code
        if self._told_over is not None and self.assembly.host is None:
            code = int(self._told_over.get("code", code))
        if self.assembly.host is not None:
            self.assembly.host.broadcast(over={"code": code, "can_go_on": self.can_go_on})
            self.assembly.host.flush(2.0)
        if self.assembly.is_host:
            self.paces.conclude()
            self._write_outcome(code, first)
        self.inquest.write(self.folder, self.assembly.attempt, self.journal.restart)
        leftovers.end_descendants()
        self.assembly.close()
        self.tidy.end()
        return code

    @property
    def is_complete(self) -> bool:
        """Whether every task's agent is still there and has told how its part of the start ended."""
        return not self._missing

    @property
    def can_go_on(self) -> bool:
        """Not when the step is to end. After an out-of-memory kill Slurm reports it as out of memory whatever comes later."""
        told = self._told_over is None or bool(self._told_over.get("can_go_on", True))
        return told and self.is_complete and self._signalled is None and not any(one.oom for one in self.failures)

    def let_go(self) -> None:
        """After the end: close what the start had open, and leave its signals to whoever listens next."""
        assert self._signals is not None
        self._signals.close()
        for worker in self.workers:
            worker.close()

    def _write_outcome(self, code: int, first: Failure | None) -> None:
        facts = {"started": bool(self.workers), "last_step": self._steps_seen()}
        self.outcome = {**outcome_of(code, first, self.failures), **facts}
        if self.folder is not None:
            self.inquest.write_outcome(self.folder, self.outcome)
        elif first is not None:
            self.note(f"rank {first.rank} on {first.host} failed first: {first.message}; the step ends with {code}")
