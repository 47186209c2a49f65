"""The controller: one per allocation. It starts the agents with one srun, waits, decides, and says how it ended."""

from __future__ import annotations

import contextlib
import importlib.metadata
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from types import FrameType
from typing import Any

from hpc import exitcodes
from hpc.allocation import badnodes, preflight
from hpc.allocation.allocation import Allocation
from hpc.allocation.history import lost_hosts, newest_checkpoint, stalled_attempts
from hpc.allocation.journal import Journal
from hpc.allocation.lost import down_nodes, lost_nodes, named
from hpc.allocation.policy import Action, Decision, Ending, Limits, decide, made_steps
from hpc.allocation.requeue import (
    KILLED_WITHIN_S,
    JobFacts,
    Requeued,
    continuation,
    exclude,
    job_facts,
    may_resubmit,
    requeue,
    resubmit,
)
from hpc.allocation.running import RunningStep
from hpc.allocation.starts import Starts
from hpc.allocation.step import agent_environ, plan_step
from hpc.allocation.sweep import LIMIT_S, sweep
from hpc.allocation.verdict import End, Verdict, cause_of, complain, hang_of, next_of, orphaned, read_end
from hpc.allocation.warden import Past, Ward
from hpc.command import target_of
from hpc.config import Loaded
from hpc.errors import SlurmCommandError, printable
from hpc.ledger import Failure
from hpc.rundir import (
    ATTEMPT_VARIABLE,
    BEGAN_VARIABLE,
    END_TIME_VARIABLE,
    RESTART_VARIABLE,
    RUN_DIR_VARIABLE,
    STANDING_VARIABLE,
    RunDirectory,
)
from hpc.slurm import killwait

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
LAST_ACTS_S = 8.0
"""Kept free before the time limit: for the step's end, the decision, and the requeue."""
LONGEST_WAIT_S = 86_400.0  # a day; then the end time is asked for again
_STANDING = "restarts retried forgiven steps_from _start_from _events_before began start_began".split()
"""What a controller has to know that goes on for a killed one."""


class Controller:
    """One attempt of one run: as many starts of the step as the policy grants, then its last decision."""

    def __init__(
        self,
        allocation: Allocation,
        loaded: Loaded,
        run_dir: RunDirectory,
        *,
        code: str | None = None,
        ward: Ward | None = None,
    ) -> None:
        """`code`: the directory that agents import from when it is not the working directory."""
        self.allocation, self.loaded, self.run_dir = allocation, loaded, run_dir
        self.ward = ward or Ward()
        self.journal, self.folder = Journal(run_dir), run_dir.attempt(allocation.attempt)
        self.step = plan_step(allocation, loaded)
        self.python = loaded.config.launch.python or sys.executable
        self.starts = Starts(allocation, loaded, self.step, self.python, code=code, guarded=self.ward.is_guarded)
        self.limits = Limits(
            max_restarts=loaded.config.launch.max_restarts, retry_failures=loaded.config.launch.retry_failures
        )
        self.notices = (signal.SIGTERM, signal.Signals[f"SIG{loaded.config.slurm.signal}"])
        self.end_time = allocation.end_time
        self.is_batch, self._noted_end = True, False
        self.restarts = self.retried = 0
        self.forgiven = 0  # restarts before a step that was kept
        self.steps_from = self._start_from = 0
        self.began = time.monotonic()
        self.start_began = time.time()
        self._running: RunningStep | None = None
        self._outcome: Mapping[str, Any] | None = None  # told by agents that stand by
        self._undelivered: list[int] = []
        self._events_before = 0
        self._heard: signal.Signals | None = None
        self._notice: str | None = None
        self._own_notice: str | None = None  # the training core's: its own clock
        self._keyboard, self._signals = False, 0
        self._lost: tuple[str, ...] = ()  # nodes, after it

    def run(self) -> int:
        """Start the step, wait for it, decide, as often as it takes; returns the exit code of the job."""
        if self.loaded.config.command:
            target_of(self.loaded.config.command)  # refused once, and not once per node
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self.ward.listen({*FORWARDED, *self.notices}, self._forward)
        self._ask_for_end_time()
        self.steps_from, _ = newest_checkpoint(self.run_dir)
        self.say(self.headline())
        self._tell_lost_hosts()
        end = self._inherit()
        while True:
            if end is None:
                self._clear_for_start()
                refused = not self.restart and self._refused_by_preflight()
                end = self._note_end(exitcodes.UNAVAILABLE if refused else self.start_and_wait())
            decision = self._decide(end)
            if decision.action is Action.AGAIN:
                self._verdict.tell()
                complain(f"{decision.reason}, {f'in {decision.pause_s:g} s' if decision.pause_s else 'at once'}")
                if self._pause(decision.pause_s):
                    self.retried += decision.is_retry
                    self.restarts += not decision.is_retry
                    end = None
                    continue
                decision = self._decide(end)  # a signal came meanwhile
            self.starts.dismiss()
            self._sweep()
            return self._act(decision, end)

    def _inherit(self) -> End | None:
        """Go on where a controller that was killed has stopped: with the end of its last start, which is over by now."""
        past = self.ward.past
        if past is None:
            return None
        for number in past.heard:
            self._forward(number, None)
        if past.standing is None:
            return None  # nothing had been started; what was heard is for the first start
        self._undelivered.clear()
        for name in _STANDING:
            setattr(self, name, past.standing[name])
        self.starts.mark = past.standing["mark"]
        return self._note_end(128 + past.number, past)

    def _tell_standing(self) -> None:
        """What the next controller needs, should this one be killed."""
        self.ward.tell({"mark": self.starts.mark, **{name: getattr(self, name) for name in _STANDING}})

    def _sweep(self) -> None:
        """Every node, after the attempt; between two starts the agents of the next one do it."""
        if self.step.local or not self.starts.mark:
            return
        lines = sweep(
            self.allocation,
            self.starts.mark,
            python=self.python,
            environ=agent_environ(self.step, self.loaded, {}),
            without=self._lost,
            limit_s=5.0 if self._notice is not None or self._keyboard else LIMIT_S,
        )
        for line in lines:
            complain(line)

    def _tell_lost_hosts(self) -> None:
        attempt = self.allocation.attempt
        lost = lost_hosts(self.run_dir.events(), attempt)
        if lost and self.allocation.node_list:
            again = named(lost, self.allocation.node_list)
            if again:
                complain(f"warning: attempt {attempt} runs on {', '.join(again)} again, lost in attempt {attempt - 1}")

    def say(self, text: str) -> None:
        print(f"hpc.launch: {printable(text)}", flush=True)

    def headline(self) -> str:
        """Who runs what, where and with which interpreter and torch; torch itself is not imported for it."""
        step, allocation = self.step, self.allocation
        try:
            torch = importlib.metadata.version("torch") if self.python == sys.executable else "of its own"
        except importlib.metadata.PackageNotFoundError:
            torch = "not installed"
        where = f"job {allocation.run_id}, attempt {allocation.attempt}" if allocation.job_id else "local run"
        gpus = f" x {allocation.gpus_per_node} GPUs" if allocation.gpus_per_node else ""
        nodes = f"{step.nodes} node{'s' if step.nodes > 1 else ''}{gpus}"
        what = " ".join(self.loaded.config.command) or self.loaded.config.job
        layout = f", {self.loaded.config.launch.layout}" if not step.local else ""
        return f"{where}: {what} on {nodes}{layout}; {self.python}, torch {torch}; {self.run_dir.path}"

    def told(self) -> dict[str, str]:
        """What the agents of the present start are told by their environment, besides the mark and their secret."""
        told = {
            RUN_DIR_VARIABLE: str(self.run_dir.path),
            ATTEMPT_VARIABLE: str(self.allocation.attempt),
            RESTART_VARIABLE: str(self.restart),
            BEGAN_VARIABLE: f"{self.start_began:.0f}",
            STANDING_VARIABLE: self.ward.standing,
        }
        return told if self.end_time is None else {**told, END_TIME_VARIABLE: f"{self.end_time:.0f}"}

    def start_and_wait(self) -> int:
        """Start the workers and pass signals on until that has ended; returns the exit code as a shell would give it.

        Raises:
            NeverStarted: srun is missing or may not be executed.
        """
        batch_job = self.allocation.run_id if not self.step.local and self.is_batch else None
        running = self.starts.begin(self.restart, self.told(), batch_job=batch_job, on_end=self._note_slurms_end)
        self._running = running
        self._tell_standing()
        for number in self._undelivered:
            running.pass_on(number)  # it came while the child was being made
        self._undelivered.clear()
        try:
            self._wait(running)
            return running.code()
        finally:
            self._running, self._outcome = None, running.outcome
            self.starts.keep(running)

    def _wait(self, running: RunningStep) -> None:
        """Wait for the step. Shortly before the time limit it gets SIGTERM, so that the requeue comes before Slurm's end.

        Not where the time was short from the start: then it would never run.
        """
        needed = self.loaded.config.launch.grace_s + LAST_ACTS_S
        left = self._time_left()
        watched = left is not None and left > needed
        while not running.ends_within(min(left - needed, LONGEST_WAIT_S) if watched and left else LONGEST_WAIT_S):
            if not watched:
                continue
            self._ask_for_end_time()  # somebody may have given the job more time
            left = self._time_left()
            if left is not None and left <= needed:
                watched = False
                self.say(f"{max(0.0, left):.0f} s are left of the time limit: SIGTERM to the step")
                self._notice = self._notice or "the time limit"
                running.pass_on(signal.SIGTERM)

    def _note_slurms_end(self) -> None:
        """SIGTERM has come: when it is Slurm's end of the job, this may be the last chance to note what is known of it.

        After a node's failure Slurm has requeued the job by now, and the node can still be left out of the next attempt.
        """
        if self._noted_end:
            return
        heard = time.monotonic()
        facts = self._facts()
        if facts.state is None or not (facts.state.is_completing or facts.state.is_finished or facts.state.is_pending):
            return
        self._noted_end = True
        if self._running is not None:
            left_s = killwait.for_workers(killwait.ask()) - (time.monotonic() - heard)
            self._running.over_within(max(1.0, left_s))
        requeued = facts.restarts is not None and facts.restarts > self.allocation.restarts
        lost = down_nodes(self.allocation) if requeued and self.allocation.nodes > 1 else ()
        badnodes.write_down(self.allocation, dict.fromkeys(lost, "lost"), say=complain)
        failed = self._failed_before() if requeued else ()
        without = exclude(self.allocation, lost, failed, say=complain)() if lost or failed else ()
        if without:
            self.say(f"Slurm has requeued the job without {', '.join(without)}")
        self.journal.append(
            "ending",
            attempt=self.allocation.attempt,
            restart=self.restart,
            job_id=self.allocation.job_id,
            state=facts.state.value,
            by_slurm="requeued" if requeued else facts.cut_short or "ended",
            lost_nodes=list(lost),
            exclude=list(without),
        )

    def _time_left(self) -> float | None:
        return None if self.end_time is None else self.end_time - time.time()

    def _ask_for_end_time(self) -> None:
        if not self.step.local:
            with contextlib.suppress(SlurmCommandError):
                facts = job_facts(self.allocation)
                self.end_time, self.is_batch = facts.end_time or self.end_time, facts.is_batch

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        self._heard = signal.Signals(number)
        if number in self.notices:
            self._notice = self._notice or self._heard.name
        elif number in (signal.SIGINT, signal.SIGHUP):
            self._keyboard = True
        if self._running is None or not self._running.pass_on(number):
            self._undelivered.append(number)

    # ---- between two starts, and at the end ------------------------------------------------------------------------

    @property
    def restart(self) -> int:
        """Starts of the step in this allocation before the present one."""
        return self.restarts + self.retried

    def _clear_for_start(self) -> None:
        """Take away what an earlier start has left; say so when training begins anew although it is no first attempt."""
        if self.restart:
            self.start_began = time.time()
        for path in (self.folder / "outcome.json", *self.folder.glob("error-*.json")):
            path.unlink(missing_ok=True)
        self._events_before = sum(1 for _ in self.run_dir.events())
        self._start_from, _ = newest_checkpoint(self.run_dir)
        if (self.allocation.attempt or self.restart) and not self.loaded.config.command:
            if newest_checkpoint(self.run_dir)[1] is None:
                start = f"attempt {self.allocation.attempt}" + (f", restart {self.restart}" if self.restart else "")
                complain(f"warning: {start}, no checkpoint in {self.run_dir.checkpoints}, starting at step 0")
        self._tell_standing()

    def _note_end(self, code: int, past: Past | None = None) -> End:
        """Read how the step ended, and write it into the record. `past`: the controller that was killed with it."""
        news = list(islice(self.run_dir.events(), self._events_before, None))
        started = any(event.get("event") == "started" for event in news)
        end = read_end(self.folder, code, started=started, told=self._outcome)
        if any(event.get("event") == "stopping" and event.get("reason") == "TIME" for event in news):
            self._own_notice = "the time limit"
        if past is not None:
            end = orphaned(end, past, noticed=bool(self._notice or self._own_notice))
            if any(event.get("event") == "ended" for event in news):
                return end  # that one has noted it
        first = end.first
        self.journal.append(
            "ended",
            attempt=self.allocation.attempt,
            job_id=self.allocation.job_id,
            restart=self.restart,
            code=end.code,
            started=end.started,
            signal=self._heard.name if self._heard else None,
            first={key: first.get(key) for key in ("rank", "host", "code", "message")} if first else None,
            cause="hang" if first and first.get("hung") else past and past.cause,
            last_step=end.last_step,
            **self._steps(),
        )
        return end

    def _steps(self) -> dict[str, Any]:
        """Where this attempt began and how far its newest checkpoint is; unknown for a command."""
        if self.loaded.config.command:
            return {"steps_from": None, "steps_to": None, "checkpoint": None}
        step, folder = newest_checkpoint(self.run_dir)
        return {"steps_from": self.steps_from, "steps_to": step, "checkpoint": folder.name if folder else None}

    def _decide(self, end: End) -> Decision:
        """Ask Slurm and the record, decide, and write the decision into the record (a good end needs none)."""
        if end.code == exitcodes.DONE:
            return Decision(action=Action.DONE, reason="finished")
        allocation, first, steps = self.allocation, end.first or {}, self._steps()
        progress = (steps["steps_to"] or 0) > self._start_from and not self.loaded.config.command
        if progress:
            self.forgiven = self.restarts
        facts, self._lost = self._facts(), lost_nodes(self.allocation, end)
        ending = Ending(
            code=end.code,
            started=end.started,
            reported=end.reported,
            orphaned=end.orphaned,
            by_us=bool(first.get("by_us")),
            peer_gone=bool(first.get("peer_gone")),
            loader_killed=first.get("loader_killed"),
            hung=hang_of(first),
            notice=self._notice or self._own_notice,
            notice_signals=tuple(int(number) for number in self.notices),
            keyboard=self._keyboard,
            state=facts.state,
            preempted=facts.preempted,
            cut_short=facts.cut_short,
            may_requeue=facts.may_requeue
            or may_resubmit(allocation, self.loaded, self.run_dir, is_batch=facts.is_batch),
            lost_nodes=self._lost,
            local=self.step.local,
            steps_from=steps["steps_from"],
            steps_to=steps["steps_to"],
            seconds=time.monotonic() - self.began,
            stalled=stalled_attempts(self.run_dir.events(), allocation.job_id, allocation.attempt),
            attempt=allocation.attempt,
            progress=progress,
            restarts=self.restarts - self.forgiven,
            retried=self.retried,
            time_left_s=self._time_left(),
        )
        decision = decide(ending, self.limits)
        why = "not fit" if first.get("unfit") else "lost"
        badnodes.write_down(allocation, dict.fromkeys(ending.lost_nodes, why), say=complain)
        self.journal.append(
            "decided",
            attempt=allocation.attempt,
            restart=self.restart,
            job_id=allocation.job_id,
            decision=decision.action.value,
            reason=decision.reason,
            made_steps=made_steps(ending),
            lost_nodes=list(ending.lost_nodes),
            **steps,
        )
        self._verdict = Verdict(
            end=end,
            cause=cause_of(end, ending, requeued=(facts.restarts or 0) > allocation.restarts),
            attempt=allocation.attempt,
            restart=self.restart,
            folder=self.folder,
            comes_next=next_of(decision, self._code(decision, end), local=self.step.local),
            heard=self._heard.name if self._heard else None,
        )
        self.journal.append("verdict", job_id=allocation.job_id, **self._verdict.event())
        return decision

    def _code(self, decision: Decision, end: End) -> int:
        """The exit code of the job when this decision ends it."""
        stalled = end.code == exitcodes.WANTS_ANOTHER_ATTEMPT and decision.stalled
        return exitcodes.FAILED if stalled else end.exit_code

    def _facts(self) -> JobFacts:
        if self.step.local:
            return JobFacts()
        try:
            return job_facts(self.allocation)
        except SlurmCommandError as error:
            complain(f"Slurm cannot be asked for this job's state: {error}")
            return JobFacts()

    def _refused_by_preflight(self) -> bool:
        if self.step.local or self.loaded.config.launch.preflight != "full":
            return False
        return preflight.refuses(self.allocation, self.loaded, self.folder, say=self.say, complain=complain)

    def _failed_before(self) -> Sequence[Failure]:
        return badnodes.known(self.loaded.config.slurm.exclude_failed_h)

    def _pause(self, seconds: float) -> bool:
        """Wait; False as soon as a notice came or somebody stopped it."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._notice is not None or self._keyboard:
                return False
            time.sleep(0.1)
        self._undelivered.clear()
        return self._notice is None and not self._keyboard

    def _act(self, decision: Decision, end: End) -> int:
        """Do what was decided last; returns the exit code of the job."""
        if decision.action is Action.DONE:
            return exitcodes.DONE
        saved = end.code == exitcodes.WANTS_ANOTHER_ATTEMPT
        if decision.action is Action.REQUEUE:
            if not saved:
                self._verdict.tell()
            return self._come_back(decision)
        plain = end.started and not self.restart and not (self._notice or self._keyboard)
        if saved or not plain or end.code == exitcodes.UNAVAILABLE:
            complain(f"attempt {self.allocation.attempt} asks for no other one: {decision.reason}")
        if not saved:
            self._verdict.tell()
        return self._code(decision, end)

    def _come_back(self, decision: Decision) -> int:
        """Back into the queue, or the command with which the user goes on. The last act."""
        again = exitcodes.WANTS_ANOTHER_ATTEMPT
        attempt, run_id = self.allocation.attempt, self.allocation.run_id
        steps = self._steps()
        where = f", checkpoint {steps['checkpoint']}" if steps["checkpoint"] else ""
        headline = f"attempt {attempt} {decision.reason}{where}"
        if self.step.local:
            self.say(f"{headline}; go on with: {continuation(self.allocation, self.loaded, self.run_dir)}")
            return again
        signals = self._signals
        failed = self._failed_before()
        act = exclude(self.allocation, decision.exclude, failed, say=complain) if decision.exclude or failed else tuple
        outcome = requeue(self.allocation, say=complain, signals=lambda: self._signals)
        if outcome is Requeued.QUEUED:
            without = act()
            self.journal.append("requeued", attempt=attempt, job_id=run_id, exclude=list(without))
            more = f", without {', '.join(without)}" if without else ""
            self.say(f"{headline}; job {run_id} is back in the queue{more}")
            deadline = time.monotonic() + KILLED_WITHIN_S
            while self._signals == signals and time.monotonic() < deadline and not self.ward.is_orphaned:
                time.sleep(0.1)  # Slurm ends this batch step
        elif outcome is Requeued.ENDING:
            complain(f"{headline}; left as it is, since Slurm is ending job {run_id} itself")
        elif outcome is Requeued.NOT_ALLOWED:
            self._go_on_elsewhere(f"{headline}; job {run_id} may not be requeued")
        else:
            complain(f"{headline}; it could not be requeued, type: scontrol requeue {run_id}")
        return again

    def _go_on_elsewhere(self, headline: str) -> None:
        """This job may not come back: send a new one that goes on, where that is allowed, else tell the command."""
        is_batch = self._facts().is_batch
        command = continuation(self.allocation, self.loaded, self.run_dir, is_batch=is_batch)
        if may_resubmit(self.allocation, self.loaded, self.run_dir, is_batch=is_batch):
            try:
                self.say(f"{headline}, so it goes on as job {resubmit(self.run_dir)}")
                return
            except SlurmCommandError as error:
                complain(f"no new job could be sent: {error}")
        complain(f"{headline}, go on with: {command}")
