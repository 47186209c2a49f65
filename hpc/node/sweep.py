"""One look over this node, and one sweep: leftover processes of this user, who holds GPUs, and files of the dead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hpc.errors import SlurmCommandError
from hpc.node import gpus, processes, residue
from hpc.node.belonging import Judgement, Place, Standing, judge, must_ask, start_number
from hpc.node.gpus import Gpu
from hpc.node.processes import Process
from hpc.node.residue import Folder, Residue
from hpc.slurm import commands
from hpc.slurm.commands import LiveJob

GRACE_S = 2.0
"""From SIGTERM to SIGKILL: who was asked to save has had the job's own time for it."""


@dataclass(frozen=True, kw_only=True)
class Scope:
    """What a look is for: everything of this user's, one job's, or what one start of a step has left."""

    job_id: str = ""
    over: str = ""
    """HPC_MARK of a start that is over, as its controller knows."""

    def has(self, process: Process) -> bool:
        mark = process.mark
        if self.over:
            return mark is not None and mark.start == self.over
        return not self.job_id or (mark is not None and mark.job_id == self.job_id)


EVERYTHING = Scope()


@dataclass(frozen=True, kw_only=True)
class View:
    """What one look has found."""

    node: str
    judged: list[Judgement]
    """Leftovers, what Slurm could not be asked about, and all of this user that hold a GPU."""
    residue: list[Residue]
    gpus: list[Gpu]
    notes: list[str] = field(default_factory=list)

    @property
    def leftovers(self) -> list[Judgement]:
        return [one for one in self.judged if one.standing is Standing.LEFTOVER]

    @property
    def unknown(self) -> list[Judgement]:
        return [one for one in self.judged if one.standing is Standing.UNKNOWN]

    @property
    def is_clean(self) -> bool:
        return not (self.leftovers or self.unknown or self.residue)

    def gpu_mib(self, pid: int) -> int | None:
        """GPU memory of a process, over all GPUs; None when it holds none."""
        held = [gpu.holders[pid] for gpu in self.gpus if pid in gpu.holders]
        return sum(held) if held else None


class Sweeper:
    """Looks and ends for one user on one node; what it once knows to be over stays over."""

    def __init__(
        self,
        environ: Mapping[str, str],
        scope: Scope = EVERYTHING,
        *,
        grace_s: float = GRACE_S,
        answer_s: float = commands.TIMEOUT_S,
    ) -> None:
        """`environ`: of the process that asks; `answer_s`: how long Slurm may take for each answer."""
        self._scope, self._grace_s, self._answer_s = scope, grace_s, answer_s
        own = processes.mark_of(environ)
        self.place = Place(
            node=processes.node_name(environ),
            cluster=environ.get("SLURM_CLUSTER_NAME", ""),
            ancestors=frozenset(processes.ancestors()),
            own=own,
        )
        self._told_name = "SLURMD_NODENAME" in environ
        self._over: set[tuple[str, int]] = set()
        self.notes: list[str] = []

    def look(self, *, ask_gpus: bool = True) -> View:
        """Find everything; Slurm is asked only when some process or folder could be a job's that is over."""
        seen = processes.look()
        judged = self._judge(seen)
        self._note_other_names(seen)
        inside = {one.process.pid for one in judged if one.standing is Standing.LEFTOVER}
        by_pid = {one.process.pid: one for one in judged}
        for child in processes.descendants([by_pid[pid].process for pid in inside], seen):
            if by_pid[child.pid].standing is Standing.UNMARKED and not (child.is_login_shell or child.terminal):
                by_pid[child.pid] = Judgement(process=child, standing=Standing.LEFTOVER, reason="child of a leftover")
        holders = gpus.ask(None, self._note) if ask_gpus else []
        holding = {pid for gpu in holders for pid in gpu.holders}
        shown = [
            one
            for one in by_pid.values()
            if self._scope.has(one.process) or one.reason == "child of a leftover"
            if one.standing in (Standing.LEFTOVER, Standing.UNKNOWN) or one.process.pid in holding
        ]
        return View(
            node=self.place.node,
            judged=shown,
            residue=self._residue(list(by_pid.values())),
            gpus=holders,
            notes=self.notes,
        )

    def _note_other_names(self, seen: Sequence[Process]) -> None:
        """Outside of a job this node's name is a guess; another one is said."""
        marks = [process.mark for process in seen if process.mark is not None]
        names = sorted({mark.node for mark in marks if mark.node != self.place.node})
        if names and not self._told_name:
            self._note(
                f"processes of node {', '.join(names[:5])} are left alone; if Slurm calls this machine so, "
                f"set SLURMD_NODENAME={names[0]}"
            )

    def end(self, view: View) -> list[Process]:
        """End the leftovers of this look and what they start meanwhile, then take the files away; who was ended."""
        known = {(one.process.pid, one.process.started) for one in view.leftovers}

        def left() -> Sequence[Process]:
            seen = processes.look()
            roots = [process for process in seen if (process.pid, process.started) in known]
            found = {process.pid: process for process in roots}
            for process in seen:  # the same attempts' others, which a look can miss while they are being born
                if self._is_over(process) and self._scope.has(process):
                    found[process.pid] = process
            for child in processes.descendants(list(found.values()), seen):
                if child.mark is None and not (child.is_login_shell or child.terminal):
                    found[child.pid] = child
                    known.add((child.pid, child.started))
            return list(found.values())

        ended = processes.end(left, grace_s=self._grace_s) if known else []
        for one in view.residue:
            residue.remove(one)
        return ended

    def _is_over(self, process: Process) -> bool:
        """Without asking anybody anew: an attempt that was over stays so."""
        one = judge(process, self.place, None, self._scope.over)
        return one.standing is Standing.LEFTOVER or (
            one.standing is Standing.UNKNOWN and one.attempt is not None and one.attempt in self._over
        )

    def _judge(self, seen: Sequence[Process]) -> list[Judgement]:
        """Of what is out of this look's scope only what needs no answer from Slurm is known."""
        over, scope = self._scope.over, self._scope
        asking = {
            process.pid: process for process in seen if must_ask(process, self.place, over) and scope.has(process)
        }
        jobs = self._ask_slurm({process.mark.job_id for process in asking.values() if process.mark is not None})
        judged = [judge(process, self.place, jobs if process.pid in asking else None, over) for process in seen]
        self._over |= {one.attempt for one in judged if one.standing is Standing.LEFTOVER and one.attempt and not over}
        return judged

    def _ask_slurm(self, job_ids: set[str]) -> Mapping[str, LiveJob] | None:
        if not job_ids:
            return {}
        try:
            return commands.live_jobs(job_ids, timeout_s=self._answer_s)
        except SlurmCommandError as error:
            self._note(f"nothing of other jobs is ended: {error}")
            return None

    def _residue(self, judged: Sequence[Judgement]) -> list[Residue]:
        """Files of the dead. What is being swept, and the batch script that waits for it, does not count as alive."""
        alive = [one.process for one in judged if one.standing is not Standing.LEFTOVER and not self._is_own(one)]
        try:
            processes.look(whole=True)
            found = residue.find(alive, self._folder_is_over, self._note)
        except processes.Starved as why:
            self._note(f"files of dead processes are left where they are: {why}")
            return []
        return [one for one in found if one.of_job or not self._scope.job_id]

    def _is_own(self, one: Judgement) -> bool:
        process, own = one.process, self.place.own
        if process.pid in self.place.ancestors or process.is_login_shell:
            return True
        mark = process.mark
        batch = mark is not None and not mark.step_id
        return bool(own and mark and batch and (own.job_id, own.restarts) == (mark.job_id, mark.restarts))

    def _folder_is_over(self, folder: Folder) -> bool:
        job_id, restarts = folder.job_id, folder.restarts
        if not self.place.cluster or folder.cluster != self.place.cluster:
            return False
        if self._scope.over:
            return self._scope.over.startswith(f"{job_id}.{restarts}.{folder.start}.")
        if self._scope.job_id not in ("", job_id):
            return False
        own = self.place.own
        if own is not None and own.job_id == job_id:
            earlier = bool(own.start) and folder.start < start_number(own)
            return restarts < own.restarts or (restarts == own.restarts and earlier)
        if (job_id, restarts) not in self._over:
            jobs = self._ask_slurm({job_id})
            if jobs is None or (job_id in jobs and jobs[job_id].restarts <= restarts):
                return False
            self._over.add((job_id, restarts))
        return True

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def lines(view: View) -> list[str]:
    """What a look has found, for a person: one line each."""
    told = [f"{view.node}: {note}" for note in view.notes]
    rows = [("pid", "age", "job", "GPU MiB", "standing", "command")]
    for one in sorted(view.judged, key=lambda one: one.process.pid):
        process, held = one.process, view.gpu_mib(one.process.pid)
        job = process.mark.job_id if process.mark else "-"
        size = "-" if held is None else str(held)
        command = " ".join(process.command)
        rows.append(
            (
                str(process.pid),
                _duration(process.age_s),
                job,
                size,
                f"{one.standing.value}: {one.reason}",
                command if len(command) <= 100 else command[:97] + "...",
            )
        )
    if len(rows) > 1:
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        told += [f"{view.node}: " + "  ".join([*map(str.ljust, row[:5], widths), row[5]]).rstrip() for row in rows]
    told += [f"{view.node}: {one.path}  {_bytes(one.size)}  {one.reason}" for one in view.residue]
    if view.is_clean:
        told.append(f"{view.node}: clean")
    return told


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def _bytes(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB" if size >= 1 << 20 else f"{size} bytes"
