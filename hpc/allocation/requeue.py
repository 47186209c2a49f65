"""Slurm's side of coming back: what it says about this job, and the requeue, which is the controller's last act.

Slurm 22.05 and 24.11: `scontrol requeue` of a running job takes its nodes at once, a second call can hit the attempt
that follows, and a job that was preempted or lost a node is requeued by Slurm itself.
"""

from __future__ import annotations

import enum
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hpc import ledger
from hpc.allocation.allocation import Allocation
from hpc.config import Loaded
from hpc.errors import NodelistError, SlurmCommandError
from hpc.ledger import Failure
from hpc.rundir import RunDirectory
from hpc.slurm import commands
from hpc.slurm.commands import NodeKind
from hpc.slurm.nodelist import expand_nodelist
from hpc.slurm.states import JobState, parse_state

TRY_PAUSES_S = (1.0, 5.0)
ANSWER_LIMIT_S = 10.0
"""How long scontrol may take: what hangs is tried again, and the time left may be short."""
RESUBMIT_LIMIT_S = 120.0
KILLED_WITHIN_S = 60.0
"""How long after a requeue Slurm may take to end the batch step."""
BATCH_KILLED = "the death of its batch script"
_TOLD_AS = ("JobLaunchFailure", "RaisedSignal")


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """What `scontrol show job` says; everything is unknown when there was no answer."""

    state: JobState | None = None
    restarts: int | None = None
    may_requeue: bool = True
    partition: str = ""
    excluded: str = ""
    """Nodes that the job does without, in Slurm's notation."""
    names_nodes: bool = False
    """It asks for certain nodes, or for those of a reservation, of which there may be no more than it needs."""
    features: str = ""
    is_batch: bool = True
    preempted: bool = False
    end_time: float | None = None
    """Seconds since 1970."""
    cut_short: str | None = None
    """Slurm is ending the job by itself, and would not bring it back: "the time limit", "preemption" that cancels, or
    "the death of its batch script"."""


class Requeued(enum.Enum):
    """How an attempt to requeue ended."""

    QUEUED = "queued"
    """It is in the queue, or on its way there."""
    ENDING = "ending"
    """Slurm is ending the job, as after scancel: it was left alone."""
    NOT_ALLOWED = "not allowed"
    REFUSED = "refused"


def job_facts(allocation: Allocation, timeout_s: float = ANSWER_LIMIT_S) -> JobFacts:
    """What Slurm says about this job now.

    Raises:
        SlurmCommandError: scontrol gave no answer.
    """
    return facts_of(commands.show_job(allocation.job_id, timeout_s=timeout_s))


def facts_of(fields: Mapping[str, str]) -> JobFacts:
    """The facts in the fields of `scontrol show job`."""
    restarts = fields.get("Restarts", "")
    state = parse_state(fields["JobState"]) if "JobState" in fields else None
    return JobFacts(
        state=state,
        restarts=int(restarts) if restarts.isdecimal() else None,
        may_requeue=fields.get("Requeue", "1") != "0" and fields.get("BatchFlag", "1") != "0",
        partition=fields.get("Partition", ""),
        excluded=_given(fields, "ExcNodeList"),
        names_nodes=bool(_given(fields, "ReqNodeList") or _given(fields, "Reservation")),
        features=_given(fields, "Features"),
        is_batch=fields.get("BatchFlag", "1") != "0",
        # also set in past tense after a requeue: only a running job is being preempted
        preempted=fields.get("PreemptTime", "None") not in ("None", "") and fields.get("JobState") == "RUNNING",
        end_time=_moment(fields.get("EndTime", "")),
        cut_short=_cut_short(fields, state) if state is not None else None,
    )


def _cut_short(fields: Mapping[str, str], state: JobState) -> str | None:
    """Why a job is ending that nobody has cancelled: scancel leaves none of these (seen with 22.05.8).

    A signal that kills the batch script alone (kill -9; scancel --batch) ends the job, too: it leaves JobLaunchFailure and
    the exit code 0:9. (RaisedSignal is another version's word for it, not seen here.) Of a preemption with a grace time it
    could not be told from a scancel in that time, so only one without counts.
    """
    if not (state.is_completing or state is JobState.FAILED):
        return None
    if fields.get("Reason", "").startswith(_TOLD_AS) and re.fullmatch("0:[1-9][0-9]*", fields.get("ExitCode", "")):
        return BATCH_KILLED
    if not state.is_completing:
        return None
    if fields.get("Reason") == "TimeLimit":
        return "the time limit"
    ended, preempted = _moment(fields.get("EndTime", "")), _moment(fields.get("PreemptTime", ""))
    if ended is not None and preempted is not None and abs(ended - preempted) <= 1.0:
        return "preemption"
    return None


def _given(fields: Mapping[str, str], name: str) -> str:
    value = fields.get(name, "")
    return "" if value == "(null)" else value


def _moment(text: str) -> float | None:
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None


def requeue(
    allocation: Allocation,
    *,
    say: Callable[[str], None],
    signals: Callable[[], int] = lambda: 0,
) -> Requeued:
    """Put the job back into the queue, unless it is there, was cancelled, or a newer attempt has begun.

    Three tries. After QUEUED Slurm ends this process soon. `signals`: how many have come; another one ends a pause, since a
    try may have been heard whose answer Slurm's end of the job has killed.
    """
    tried = False
    for pause in (*TRY_PAUSES_S, None):
        heard = signals()
        try:
            facts = job_facts(allocation)
            verdict = _without_asking(facts, allocation.restarts, tried)
            if verdict is not None:
                return verdict
            tried = True
            commands.requeue(allocation.run_id, timeout_s=ANSWER_LIMIT_S)
            return Requeued.QUEUED
        except SlurmCommandError as error:
            more = f"; trying again in {pause:g} s" if pause is not None else ""
            say(f"{error}{more}")
        if pause is not None:
            deadline = time.monotonic() + pause
            while time.monotonic() < deadline and signals() == heard:
                time.sleep(0.1)
    return Requeued.REFUSED


def _without_asking(facts: JobFacts, restarts: int, tried: bool) -> Requeued | None:
    """The outcome when no requeue must be asked for, else None. `tried`: an earlier call may have been heard."""
    if facts.restarts is not None and facts.restarts > restarts:
        return Requeued.QUEUED
    if facts.state is not None and facts.state.is_pending:
        return Requeued.QUEUED
    if facts.cut_short and not tried:  # Slurm takes it back although it is ending: seen with 22.05.8
        return None if facts.may_requeue else Requeued.NOT_ALLOWED
    if facts.state is not None and (facts.state.is_completing or facts.state.is_finished):
        return Requeued.QUEUED if tried and facts.state.is_completing else Requeued.ENDING
    return None if facts.may_requeue else Requeued.NOT_ALLOWED


def exclusion(
    lost: Sequence[str], facts: JobFacts, allocation: Allocation, usable: Mapping[str, NodeKind]
) -> tuple[str, ...]:
    """The nodes that the next attempt does without: those that the user excluded, and the lost ones; () for no change.

    `usable`: what each node of the partition has that may run jobs. Nothing is excluded where too few nodes
    of the same kind would be left, since such a job waits for ever, or where the user asked for certain nodes. Pure.
    """
    before = expand_nodelist(facts.excluded) if facts.excluded else []
    new = [node for node in lost if node not in before]
    if not new or facts.names_nodes:
        return ()
    kinds = {_kind(usable[node], facts) for node in expand_nodelist(allocation.node_list) if node in usable}
    left = [name for name, kind in usable.items() if name not in (*before, *new) and _kind(kind, facts) in kinds]
    return (*before, *new) if len(left) >= allocation.nodes else ()


def with_failed(
    chosen: tuple[str, ...],
    failed: Sequence[Failure],
    facts: JobFacts,
    allocation: Allocation,
    usable: Mapping[str, NodeKind],
) -> tuple[str, ...]:
    """`chosen` by `exclusion`, and the nodes of the ledger that can be spared besides; () for no change. Pure."""
    if facts.names_nodes:
        return chosen
    before = chosen or tuple(expand_nodelist(facts.excluded) if facts.excluded else ())
    kinds = {_kind(usable[node], facts) for node in expand_nodelist(allocation.node_list) if node in usable}
    alike = [name for name, kind in usable.items() if _kind(kind, facts) in kinds]
    more = ledger.to_leave_out(failed, alike, already=before, wanted=allocation.nodes)
    return (*before, *(failure.node for failure in more)) if more else chosen


def _kind(kind: NodeKind, facts: JobFacts) -> tuple[str, str]:
    gpus, features, *_ = kind
    return gpus, features if facts.features else ""  # features that the job does not ask for may differ


def exclude(
    allocation: Allocation,
    lost: Sequence[str],
    failed: Sequence[Failure] = (),
    *,
    say: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> Callable[[], tuple[str, ...]]:
    """Ask what there is, before the requeue; the result is called after it, and returns the nodes that are excluded now.

    Besides the lost nodes those that failed lately are left out, as far as the ledger's bounds allow. Seen with 22.05.8: Slurm lets the user change these nodes from the moment of the requeue on, though the job still ends.
    """
    chosen: tuple[str, ...] = ()
    try:
        facts = job_facts(allocation)
        usable = commands.usable_nodes(facts.partition)
        chosen = with_failed(exclusion(lost, facts, allocation, usable), failed, facts, allocation, usable)
    except (SlurmCommandError, NodelistError) as error:
        say(f"{', '.join(lost) or 'nodes that failed lately'} cannot be excluded: {error}")

    def act() -> tuple[str, ...]:
        for pause in (0.3, 0.7, None) if chosen else ():
            try:
                commands.exclude_nodes(allocation.run_id, chosen, timeout_s=ANSWER_LIMIT_S)
                return chosen
            except SlurmCommandError as error:
                if pause is None:
                    say(f"{', '.join(chosen)} could not be excluded: {error}")
                else:
                    sleep(pause)
        return ()

    return act


def may_resubmit(allocation: Allocation, loaded: Loaded, run_dir: RunDirectory, *, is_batch: bool) -> bool:
    """Whether the run goes on as a new job when this one may not be requeued: it is allowed to, and was sent by hpc.submit.

    Pure but for a look whether there is a script.
    """
    allowed = loaded.config.launch.resubmit
    if allowed is None:
        allowed = loaded.config.slurm.requeue
    return allowed and is_batch and run_dir.batch_script() is not None


def resubmit(run_dir: RunDirectory) -> str:
    """Send the job that goes on with this run, through the door of the login node; returns its id.

    Raises:
        SlurmCommandError: it was not sent, or nobody can tell.
    """
    argv = [sys.executable, "-m", "hpc.submit", "--continue", str(run_dir.path)]
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, errors="backslashreplace", timeout=RESUBMIT_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise SlurmCommandError(f"no answer within {RESUBMIT_LIMIT_S:g} s: look whether it is in the queue") from None
    found = re.match(r"job ([0-9]+(?:_[0-9]+)?) submitted", done.stdout)
    if done.returncode != 0 or found is None:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise SlurmCommandError(lines[-1] if lines else f"hpc.submit exited {done.returncode}")
    return found[1]


def continuation(allocation: Allocation, loaded: Loaded, run_dir: RunDirectory, *, is_batch: bool = True) -> str:
    """The command that goes on with this run, to be typed by the user."""
    path = shlex.quote(str(run_dir.path))
    if not allocation.job_id:
        return f"python -m hpc.launch --local --run-dir {path}"
    if not is_batch:
        return f"python -m hpc.launch --run-dir {path}"
    if run_dir.batch_script() is not None:
        return f"python -m hpc.submit --continue {path}"
    words = ["python -m hpc.submit", f"--config {shlex.quote(str(run_dir.config_file))}"]
    slurm = loaded.config.slurm
    if allocation.nodes != slurm.nodes:  # a raw sbatch: its options are not in the configuration
        words.append(f"--nodes {allocation.nodes}")
    if allocation.gpus_per_node and not str(slurm.gpus_per_node or "").endswith(str(allocation.gpus_per_node)):
        words.append(f"--gpus-per-node {allocation.gpus_per_node}")
    if allocation.array_index is not None and "array" in slurm.extra:
        words.append("slurm.extra.array=null")
    return " ".join([*words, f"run_dir={path}"])
