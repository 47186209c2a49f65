"""Hand a batch script to sbatch exactly once, and understand its answer, also a lost one."""

from __future__ import annotations

import math
import os
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpc.errors import SlurmCommandError, SubmissionError
from hpc.quantities import slurm_minutes
from hpc.slurm import commands

SUBMIT_TIMEOUT_S = float(os.environ.get("HPC_SUBMIT_TIMEOUT_S", "60"))
LOOK_PAUSES_S = (0.0, 2.0, 5.0)
"""Pauses before each look for a job whose answer was lost; a busy controller lists it late."""

_LOST = re.compile(
    r"timed? ?out|zero bytes|unable to contact|communication|connect|transport|connection|try again later|protocol",
    re.IGNORECASE,
)
_JOB_ID = re.compile(r"\bSubmitted batch job ([0-9]+)")
"""A site's wrapper of sbatch may say more, of other jobs too. Source: sbatch(1), "DESCRIPTION"."""

_REASONS = (
    ("invalid partition", "there is no such partition"),
    ("invalid account or account/partition", "you may not use this account, or not in this partition"),
    ("invalid account", "there is no such account for you"),
    ("invalid qos", "there is no such quality of service for you"),
    ("requested node configuration is not available", "no nodes of the partition can ever give what is asked for"),
    ("node count specification invalid", "the partition does not have so many nodes"),
    ("more processors requested", "more CPU cores are asked for than there are"),
    ("invalid generic resource", "no node has such GPUs"),
    ("invalid feature specification", "no node has such a feature (--constraint)"),
    ("requested time limit is invalid", "the time limit is longer than the partition allows"),
    ("memory specification can not be satisfied", "no node has so much memory"),
    ("invalid node name", "there is no such node"),
    ("requested reservation is invalid", "there is no such reservation for you"),
    ("access/permission denied", "you may not do this here"),
    ("user's group not permitted", "your group may not use this partition"),
    ("job violates accounting/qos policy", "a limit of your account or quality of service is reached"),
    ("invalid wckey", "there is no such wckey for you"),
    ("unrecognized option", "sbatch does not know an option of slurm.extra"),
)
_OFFERS_MATTER = re.compile(r"partition|node|processors|generic resource|feature|time limit|memory|gres", re.IGNORECASE)


def deliver(script: Path, environ: Mapping[str, str], options: Sequence[str] = ()) -> str:
    """Run sbatch on the script and return the job's id; `options` of sbatch count before those in the script.

    sbatch runs once. If its answer is lost, the job is looked for by the script's path, which no other job has.

    Raises:
        SubmissionError: the cluster refused; nothing is queued. Says why, and what the cluster offers.
        SlurmCommandError: the answer is lost and the job was not seen, so it may still come.
    """
    try:
        umask = os.umask(0o077)  # sbatch hands it on, and the job's output file is made with it
        try:
            answer = commands.ask("sbatch", [*options, str(script)], timeout_s=SUBMIT_TIMEOUT_S, environ=environ)
        finally:
            os.umask(umask)
    except (SlurmCommandError, KeyboardInterrupt) as error:
        return _look_for(script, "interrupted" if isinstance(error, KeyboardInterrupt) else str(error))
    found = _JOB_ID.search(answer.stdout)
    if answer.returncode == 0 and found:
        return found[1]
    if answer.returncode == 0 or answer.returncode < 0 or _LOST.search(answer.stderr):
        return _look_for(script, f"sbatch: {answer.complaint}")
    raise SubmissionError(_refusal(answer.complaint))


def check(script: Path, environ: Mapping[str, str], *, nodes: int, partition: str | None) -> None:
    """Refuse what the cluster can never run but may take all the same, to leave it in the queue for ever.

    `sbatch --test-only` also refuses for nodes that are away today; then its word counts only where more nodes are
    asked for than there are.

    Raises:
        SubmissionError: the cluster can never run it, as `deliver`.
    """
    try:
        complaint = commands.test_only([str(script)], environ=environ)
        if complaint is None or _LOST.search(complaint):
            return
        impossible = "node configuration is not available" in complaint.lower()
        if impossible and _some_are_away() and nodes <= _nodes_of(partition):
            return
    except SlurmCommandError:
        return  # sbatch itself will tell
    raise SubmissionError(_refusal(complaint))


def _some_are_away() -> bool:
    answer = commands.ask("sinfo", ["--noheader", "--format=%n", "--states=down,drain,fail,maint,no_respond"])
    return answer.returncode != 0 or bool(answer.stdout.strip())


def _nodes_of(partition: str | None) -> int:
    """All nodes of a partition (of several, "a,b", of all of them together; None: of the default one)."""
    wanted = partition.split(",") if partition is not None else None
    return sum(part.nodes for part in commands.partitions() if (part.is_default if not wanted else part.name in wanted))


def time_limit_note(time: str | None, partition: str | None) -> str | None:
    """A line for the user when the time limit is longer than the partition's; such a job may wait for ever."""
    if time is None:
        return None
    asked = slurm_minutes(time) or math.inf
    try:
        found = commands.partitions()
    except SlurmCommandError:
        return None
    for part in found:
        if part.is_default if partition is None else part.name == partition:
            try:
                limit = slurm_minutes(part.time_limit) or math.inf
            except ValueError:
                continue
            if asked > limit:
                return (
                    f"the time limit {time} is longer than partition {part.name} allows ({part.time_limit}): "
                    f"the job may wait for ever"
                )
    return None


def _look_for(script: Path, why: str) -> str:
    """The job that a lost answer of sbatch made, if it is seen in the queue.

    Raises:
        SlurmCommandError: it is not seen.
    """
    trouble = ""
    for pause in LOOK_PAUSES_S:
        try:
            time.sleep(pause)
            job_id = commands.find_job_by_command(script)
        except SlurmCommandError as error:
            trouble = f" (asking for it: {error})"
            continue
        except KeyboardInterrupt:
            trouble = " (asking for it: interrupted)"
            break
        trouble = ""
        if job_id is not None:
            return job_id
    seen = "whether the job was taken cannot be told" if trouble else "the job is not in the queue, but may still come"
    raise SlurmCommandError(
        f"the answer of sbatch was lost ({why}): {seen}{trouble}; nothing is sent twice: before you submit again, "
        f"look for {shlex.quote(str(script))} in: squeue --me --format='%i %T %o'"
    )


def _refusal(complaint: str) -> str:
    """A refusal in the user's words, Slurm's own behind them, and what there is instead."""
    lowered = complaint.lower()
    said = re.sub(r"sbatch: (error|fatal): (Batch job submission failed: )?", "", complaint)
    reason = next((words for text, words in _REASONS if text in lowered), None)
    message = f"the cluster refused the job: {f'{reason} ({said})' if reason else said}"
    if _OFFERS_MATTER.search(complaint):
        message += offers()
    return f"{message}; nothing was submitted"


def offers() -> str:
    """The partitions, their nodes, GPUs and longest time, as the end of a sentence; "" when sinfo does not tell."""
    try:
        found = commands.partitions()
    except SlurmCommandError:
        return ""
    shown = []
    for part in found[:20]:
        gpus = ", ".join(item.partition("(")[0] for item in part.gres.split(",") if item.startswith("gpu")) or "no GPU"
        limit = "no time limit" if part.time_limit == "infinite" else f"up to {part.time_limit}"
        default = " (the default)" if part.is_default else ""
        shown.append(f"{part.name}{default}: {part.nodes} nodes with {gpus}, {part.cpus_per_node} cores, {limit}")
    if len(found) > len(shown):
        shown.append("and more (sinfo)")
    return f"; there is {'; '.join(shown)}" if shown else ""
