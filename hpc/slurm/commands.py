"""The only place that runs a Slurm command: by argv, with a time-out, and answers as values.

The step's own `srun` is a child that the controller watches; its argv is built and started in `hpc.allocation`.
Slurm's programs may print bytes of any encoding (a job name of another user, say): they are decoded with escapes and
never stop a caller. Variables that change what the programs print (SQUEUE_FORMAT and the like) do not reach them.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hpc.errors import SlurmCommandError, printable
from hpc.slurm.states import JobState, parse_state

TIMEOUT_S = 30.0
_SHAPING_PREFIXES = ("SQUEUE_", "SINFO_", "SACCT_", "SCONTROL_", "SCANCEL_", "SLURM_TIME_FORMAT", "LANG", "LC_")
_JOB_ID = re.compile(r"[0-9]+(?:[_+][0-9]+)?")
_FIELD = re.compile(r"(?:^|(?<=\s))([A-Za-z][A-Za-z0-9_/:&]*)=")
_FREE_TEXT = frozenset(
    "JobName Comment AdminComment SystemComment Extra Command WorkDir StdErr StdIn StdOut MailUser SubmitLine".split()
)
_AFTER_FREE_TEXT = frozenset(
    "UserId WorkDir Comment AdminComment SystemComment StdErr StdIn StdOut Power TresPerNode MailUser".split()
)
_KEPT = frozenset({"SLURM_CONF", "SLURM_CLUSTER_NAME", "SLURM_RESTART_COUNT"})  # these reach tasks through srun alone
_USABLE = ("idle", "mix", "alloc", "comp", "resv", "plan")
_told: set[str] = set()


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a Slurm command said. `returncode` is `subprocess`'s."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def complaint(self) -> str:
        """What it complained about, as one line."""
        lines = [line.strip() for line in (self.stderr or self.stdout).splitlines() if line.strip()]
        return printable("; ".join(lines)) or f"exit code {self.returncode}"


@dataclass(frozen=True, kw_only=True)
class LiveJob:
    """A job that is not over. `restarts` is how often Slurm has begun it anew, SLURM_RESTART_COUNT."""

    state: JobState
    restarts: int
    began: float | None = None
    """When the present attempt began, in seconds since 1970; None while it waits."""


@dataclass(frozen=True, kw_only=True)
class Partition:
    """One kind of node in one partition; a partition of several kinds gives several. `gres` is "" for none."""

    name: str
    is_default: bool
    available: str
    time_limit: str
    nodes: int
    cpus_per_node: str
    memory_mib: str
    gres: str
    features: str


class NodeKind(NamedTuple):
    """What a node has, in sinfo's words and numbers."""

    gpus: str
    features: str
    cores: int = 0
    memory_mib: int = 0


def ask(
    program: str,
    arguments: Sequence[str] = (),
    *,
    timeout_s: float = TIMEOUT_S,
    environ: Mapping[str, str] | None = None,
) -> Answer:
    """Run one Slurm program to its end; an exit code other than 0 is the caller's to judge.

    `environ` replaces the environment of this process; LC_ALL is set in any case.

    Raises:
        SlurmCommandError: the program is missing or may not be run, or gave no answer within `timeout_s`.
    """
    base = os.environ if environ is None else environ
    env = {name: value for name, value in base.items() if not name.startswith(_SHAPING_PREFIXES)}
    env["LC_ALL"] = "C.UTF-8"
    try:
        process = subprocess.Popen(
            [program, *arguments],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            restore_signals=False,  # SIGPIPE stays ignored: a busy munged or slurmctld that hangs up is asked again
        )
    except FileNotFoundError:
        raise SlurmCommandError(
            f"{program} is not on PATH; run this on a machine with Slurm's client programs (module load slurm?)"
        ) from None
    except OSError as error:
        raise SlurmCommandError(f"{program} cannot be run: {error.strerror or error}") from None
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise SlurmCommandError(
            f"{program} gave no answer within {timeout_s:g} s; the Slurm controller may be overloaded or down: try `sinfo`"
        ) from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
    return Answer(
        returncode=process.returncode,
        stdout=stdout.decode("utf-8", "backslashreplace"),
        stderr=stderr.decode("utf-8", "backslashreplace"),
    )


def show_job(job_id: str, *, timeout_s: float = TIMEOUT_S) -> dict[str, str]:
    """The fields of `scontrol show job`, {} when Slurm does not know the job (any more).

    Values may hold blanks and "="; of an array's elements the first is given.

    Raises:
        SlurmCommandError: no answer, or one that is neither a job nor "no such job".
    """
    answer = ask("scontrol", ["show", "job", _checked(job_id)], timeout_s=timeout_s)
    if answer.returncode != 0:
        if "invalid job id" in (answer.stderr + answer.stdout).lower():
            return {}
        raise SlurmCommandError(f"scontrol show job {job_id}: {answer.complaint}")
    return parse_job(answer.stdout)


def parse_job(text: str) -> dict[str, str]:
    """The fields of one job as `scontrol show job` prints them, on several lines or (with -o) on one.

    A field that holds a user's text (a name, a comment, a path) ends at the end of its line, or on one line at the next
    field that can follow it; what such a text says about other fields is not believed.
    """
    lines = [line.rstrip() for line in text.strip("\n").split("\n\n", 1)[0].split("\n")]
    one_line = len([line for line in lines if line]) == 1
    fields: dict[str, str] = {}
    for line in lines:
        matches = list(_FIELD.finditer(line))
        index = 0
        while index < len(matches):
            name = matches[index][1]
            following = index + 1
            if name in _FREE_TEXT:
                while following < len(matches) and not (one_line and matches[following][1] in _AFTER_FREE_TEXT):
                    following += 1
            end = matches[following].start() if following < len(matches) else len(line)
            fields.setdefault(name, line[matches[index].end() : end].strip())
            index = following
    return fields


def state_of(job_id: str) -> JobState | None:
    """The job's state: squeue is asked first, then scontrol, then accounting; None when none of them knows the job.

    Where accounting is missing, one warning is printed on stderr, once per process.

    Raises:
        SlurmCommandError: squeue and scontrol gave no answer at all.
    """
    _checked(job_id)
    failure: SlurmCommandError | None = None
    try:
        answer = ask("squeue", ["--noheader", "--states=all", f"--jobs={job_id}", "--format=%T"])
        states = [parse_state(line) for line in answer.stdout.splitlines() if line.strip()]
        if answer.returncode == 0 and states:
            return _least_finished(states)
    except SlurmCommandError as error:
        failure = error
    try:
        fields = show_job(job_id)
        if "JobState" in fields:
            return parse_state(fields["JobState"])
    except SlurmCommandError as error:
        failure = failure or error
    state = _state_in_accounting(job_id)
    if state is None and failure is not None:
        raise failure
    return state


def _state_in_accounting(job_id: str) -> JobState | None:
    try:
        answer = ask(
            "sacct",
            ["--noheader", "--parsable2", "--allocations", "--duplicates", f"--jobs={job_id}", "--format=State"],
        )
        complaint = answer.complaint if answer.returncode != 0 else ""
    except SlurmCommandError as error:
        complaint = str(error)
    if complaint:
        _tell_once(f"no accounting to ask for states that squeue has forgotten ({complaint})")
        return None
    lines = [line for line in answer.stdout.splitlines() if line.strip()]
    return parse_state(lines[-1]) if lines else None  # one line per attempt, the last one counts


def _least_finished(states: Sequence[JobState]) -> JobState:
    """Of the states of an array's elements the one that is furthest from a good end."""
    phases = (
        lambda state: state.is_running,
        lambda state: state.is_completing,
        lambda state: state.is_pending,
        lambda state: not state.succeeded,
    )
    for phase in phases:
        for state in states:
            if phase(state):
                return state
    return states[0]


def partitions() -> list[Partition]:
    """What the cluster offers, in its own order.

    Raises:
        SlurmCommandError: sinfo failed.
    """
    answer = ask("sinfo", ["--noheader", "--format=%P|%a|%l|%D|%c|%m|%G|%f"])
    if answer.returncode != 0:
        raise SlurmCommandError(f"sinfo: {answer.complaint}")
    found = []
    for line in answer.stdout.splitlines():
        columns = line.strip().split("|")
        if len(columns) != 8:
            continue
        name, available, time_limit, nodes, cpus, memory, gres, features = columns
        found.append(
            Partition(
                name=name.rstrip("*"),
                is_default=name.endswith("*"),
                available=available,
                time_limit=time_limit,
                nodes=int(nodes) if nodes.isdecimal() else 0,
                cpus_per_node=cpus,
                memory_mib=memory,
                gres="" if gres == "(null)" else gres,
                features="" if features == "(null)" else features,
            )
        )
    return found


def test_only(arguments: Sequence[str], *, environ: Mapping[str, str] | None = None) -> str | None:
    """What `sbatch --test-only` has against a submission, in Slurm's words on one line; None when it would be taken.

    `arguments` is what sbatch would get: options, then the script's path.

    Raises:
        SlurmCommandError: sbatch is missing or gave no answer.
    """
    answer = ask("sbatch", ["--test-only", *arguments], environ=environ)
    return None if answer.returncode == 0 else answer.complaint


def live_jobs(job_ids: Iterable[str], *, timeout_s: float = TIMEOUT_S) -> dict[str, LiveJob]:
    """Those of these jobs (by Slurm's plain numbers, as in SLURM_JOB_ID) that are not over, of whatever user.

    A job is left out only when squeue does not list it among this user's and scontrol knows none that is unfinished.

    Raises:
        SlurmCommandError: no answer from either, or one that cannot be read; nothing is known then.
    """
    wanted = {_checked(job_id) for job_id in job_ids}
    answer = ask(
        "squeue",
        ["--all", "--me", "--noheader", "--Format=JobID:24,State:24,RestartCnt:12,StartTime:24"],
        timeout_s=timeout_s,
    )
    if answer.returncode != 0:
        raise SlurmCommandError(f"squeue: {answer.complaint}")
    found: dict[str, LiveJob] = {}
    for line in filter(str.strip, answer.stdout.splitlines()):
        words = line.split()
        if len(words) != 4 or not (words[0].isdecimal() and words[2].isdecimal()):
            raise SlurmCommandError(f"squeue: {printable(line)!r} was not a job's id, state, restarts and start")
        found[words[0]] = LiveJob(state=parse_state(words[1]), restarts=int(words[2]), began=_began(*words[1::2]))
    live = {job_id: job for job_id, job in found.items() if job_id in wanted and not job.state.is_finished}
    for job_id in sorted(wanted - live.keys()):
        answer = ask("scontrol", ["--all", "show", "job", job_id], timeout_s=timeout_s)
        if answer.returncode != 0 and "invalid job id" not in (answer.stderr + answer.stdout).lower():
            raise SlurmCommandError(f"scontrol show job {job_id}: {answer.complaint}")
        for text in answer.stdout.split("\n\n"):  # of an array, one for each element
            fields = parse_job(text)
            state = parse_state(fields.get("JobState", ""))
            if answer.returncode == 0 and fields.get("JobId") == job_id and not state.is_finished:
                restarts = fields.get("Restarts", "")
                began = _began(fields["JobState"], fields.get("StartTime", ""))
                live[job_id] = LiveJob(state=state, restarts=int(restarts) if restarts.isdecimal() else 0, began=began)
    return live


def _began(state: str, text: str) -> float | None:
    """The start of a job that has started; of one that waits Slurm tells an estimate."""
    if parse_state(state).is_pending:
        return None
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        return None


def on_every_node(
    job_id: str,
    nodes: int,
    command: Sequence[str],
    *,
    without: Sequence[str] = (),
    timeout_s: float,
    environ: Mapping[str, str] | None = None,
) -> Answer:
    """Run a command once on each node of a running allocation, beside whatever runs there, without its GPUs.

    `without`: nodes that are left out, by name; `nodes` does not count them. `environ` is as for `ask`.

    Raises:
        SlurmCommandError: srun is missing, or was not through within `timeout_s` (what it started is ended then).
    Source: srun(1), --overlap, --mem=0, --gres=none, --no-kill, and "INPUT ENVIRONMENT VARIABLES": what the job asked for
    is in them too, and with it such a step is refused (seen with 22.05.8: SLURM_GPUS_PER_NODE, SLURM_MEM_PER_CPU).
    """
    base = os.environ if environ is None else environ
    env = {name: text for name, text in base.items() if name in _KEPT or not name.startswith("SLURM_")}
    options = [f"--jobid={_checked(job_id)}", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
    options += ["--overlap", "--mem=0", "--gres=none", "--no-kill", "--kill-on-bad-exit=0", "--label", "--export=ALL"]
    options += [f"--exclude={','.join(without)}"] if without else []
    return ask("srun", [*options, *command], timeout_s=timeout_s, environ=env)


def find_job_by_command(script_path: str | os.PathLike[str]) -> str | None:
    """The id of this user's newest job whose batch script is the file, as far as Slurm still knows it; None for none.

    Tells after a lost answer from sbatch whether the job was taken after all.

    Raises:
        SlurmCommandError: squeue failed.
    """
    path = os.fspath(script_path)
    answer = ask("squeue", ["--me", "--noheader", "--states=all", "--format=%F|%o"])
    if answer.returncode != 0:
        raise SlurmCommandError(f"squeue: {answer.complaint}")
    wanted = os.fsencode(path).decode("utf-8", "backslashreplace")
    found = []
    for line in answer.stdout.splitlines():
        job_id, _, command = line.strip().partition("|")
        if job_id.isdecimal() and (command == wanted or command.startswith(wanted + " ")):
            found.append(int(job_id))
    return str(max(found)) if found else None


def cancel(
    job_id: str, *, signal_name: str | None = None, whole_job: bool = False, timeout_s: float = TIMEOUT_S
) -> None:
    """Cancel a job, or send it a signal: to its steps' tasks, or with `whole_job` to the batch step as well.

    A job that has already ended is no error.

    Raises:
        SlurmCommandError: scancel refused for another reason.
    """
    arguments = [] if signal_name is None else [f"--signal={signal_name}"]
    if whole_job:
        arguments.append("--full")
    answer = ask("scancel", [*arguments, _checked(job_id)], timeout_s=timeout_s)
    if answer.returncode != 0 and "already complet" not in answer.stderr.lower():
        raise SlurmCommandError(f"scancel {job_id}: {answer.complaint}")


def lost_nodes(node_list: str) -> list[str]:
    """The nodes of a host list that are down, failing or do not answer, by name.

    Raises:
        SlurmCommandError: sinfo failed.
    Source: sinfo(1), "NODE STATE CODES": "*" behind a state means that the node does not answer.
    """
    answer = ask("sinfo", ["--noheader", "--Node", f"--nodes={node_list}", "--format=%N|%T"])
    if answer.returncode != 0:
        raise SlurmCommandError(f"sinfo: {answer.complaint}")
    lost: dict[str, None] = {}
    for line in answer.stdout.splitlines():
        name, _, state = line.strip().partition("|")
        if state.endswith("*") or state.lower().startswith(("down", "fail")):
            lost[name] = None
    return list(lost)


def usable_nodes(partition: str) -> dict[str, NodeKind]:
    """What each node of a partition (or of several, "a,b") that may run jobs has, by name.

    Raises:
        SlurmCommandError: sinfo failed.
    """
    answer = ask("sinfo", ["--noheader", "--Node", f"--partition={partition}", "--format=%N|%T|%G|%f|%c|%m"])
    if answer.returncode != 0:
        raise SlurmCommandError(f"sinfo: {answer.complaint}")
    nodes = {}
    for line in answer.stdout.splitlines():
        columns = line.strip().split("|")
        if len(columns) == 6 and columns[1].lower().startswith(_USABLE) and not columns[1].endswith("*"):
            cores, memory = (int(text) if text.isdecimal() else 0 for text in columns[4:])
            gpus = re.sub(r"\([^)]*\)", "", columns[2])
            nodes[columns[0]] = NodeKind(gpus=gpus, features=columns[3], cores=cores, memory_mib=memory)
    return nodes


def exclude_nodes(job_id: str, nodes: Sequence[str], *, timeout_s: float = TIMEOUT_S) -> None:
    """Have a job that waits do without these nodes from now on; they replace those that it did without before.

    Raises:
        SlurmCommandError: Slurm refused, as it does for a job that runs.
    """
    answer = ask(
        "scontrol", ["update", f"JobId={_checked(job_id)}", f"ExcNodeList={','.join(nodes)}"], timeout_s=timeout_s
    )
    if answer.returncode != 0:
        raise SlurmCommandError(f"scontrol update of job {job_id}: {answer.complaint}")


def requeue(job_id: str, *, timeout_s: float = TIMEOUT_S) -> None:
    """Put a job, or one element of an array ("1234_2"), back into the queue. A running one loses its nodes at once.

    Raises:
        SlurmCommandError: Slurm refused, as it does for a job that was submitted without --requeue.
    """
    answer = ask("scontrol", ["requeue", _checked(job_id)], timeout_s=timeout_s)
    if answer.returncode != 0:
        raise SlurmCommandError(f"scontrol requeue {job_id}: {answer.complaint}")


def _checked(job_id: str) -> str:
    if not _JOB_ID.fullmatch(job_id):
        raise SlurmCommandError(f"{job_id!r} is not a job id; one such as 1234 or 1234_2 was needed")
    return job_id


def _tell_once(text: str) -> None:
    if text not in _told:
        _told.add(text)
        print(f"hpc: warning: {printable(text)}", file=sys.stderr, flush=True)
