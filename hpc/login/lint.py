"""What will go wrong with a batch script that somebody wrote by hand: the classic mistakes, found without running it.

RULES is the table; each rule looks at the script as `hpc.login.batchscript` reads it and gives findings. A rule keeps
silent where it cannot be sure: values that only the shell knows are left alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hpc.errors import UsageError, printable
from hpc.login import batchscript
from hpc.login.batchscript import BatchScript, Command

SIZE_LIMIT = 4 * 1024 * 1024  # Slurm's own for a batch script: slurm.conf(5), max_script_size
_TORCHRUN = re.compile(r"\btorchrun\b|\btorch\.distributed\.(?:run|launch)\b|\baccelerate\s+launch\b")
_OURS = re.compile(r"\bhpc\.(?:launch|node)\b|\bhpc\s+(?:launch|node)\b|\bddp\.sbatch\b")
_NOT_SIGNALS = frozenset(["EXIT", "0", "ERR", "DEBUG", "RETURN", "-", "--"])
_LONG = frozenset("srun mpirun mpiexec torchrun accelerate deepspeed".split())
_PORT = re.compile(r"(?:MASTER_PORT=|--master[_-]port[= ])[\"']?(\d{2,5})\b|--rdzv[_-]endpoint[= ]\S*?:(\d{2,5})\b")
_NPROC = re.compile(r"--nproc[_-]per[_-]node[= ][\"']?(\d+)\b")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One mistake: where, what, why it bites, and what to write instead."""

    line: int
    what: str
    why: str
    instead: str


@dataclass(frozen=True, kw_only=True)
class Script:
    """A batch script, and the directory that it would be submitted from."""

    read: BatchScript
    directory: Path

    @property
    def sruns(self) -> list[Command]:
        return [command for command in self.read.commands if command.program == "srun"]

    @property
    def is_ours(self) -> bool:
        return any(_OURS.search(command.text) for command in self.read.commands)

    @property
    def torchrun(self) -> Command | None:
        return next((command for command in self.read.commands if _TORCHRUN.search(command.text)), None)

    def number(self, name: str) -> int | None:
        """An option's value when it is one plain number."""
        value = self.read.value(name)
        return int(value) if value.isdecimal() and len(value) < 9 else None

    @property
    def nodes(self) -> int:
        return self.number("nodes") or 1

    @property
    def gpus_per_node(self) -> int | None:
        """GPUs of each node, as asked for; None when that is not said, or not in numbers."""
        for name in ("gpus-per-node", "gres", "gpus"):
            value = self.read.value(name)
            if name == "gres" and not value.startswith("gpu"):
                continue
            counts = [int(count) for count in re.findall(r"(?:^|:)(\d{1,4})(?=$|,|\()", value)]
            if counts:
                return sum(counts) // (self.nodes if name == "gpus" else 1)
            if name == "gres" and value:
                return 1  # "gpu" alone is one
        return None

    @property
    def tasks_per_node(self) -> int:
        per_node, tasks = self.number("ntasks-per-node"), self.number("ntasks")
        return per_node or (max(1, tasks // self.nodes) if tasks else 1)

    @property
    def signal(self) -> tuple[str, str]:
        """The warning signal of --signal and who gets it: ("USR1", "B"), ("TERM", ""); ("", "") for none."""
        match = re.match(r"(?:([RB]+):)?(?:SIG)?(\w+)", self.read.value("signal").upper())
        names = {"10": "USR1", "12": "USR2", "15": "TERM"}
        return (names.get(match[2], match[2]), match[1] or "") if match else ("", "")

    def traps(self) -> list[tuple[Command, list[str]]]:
        """The traps for signals (not for the end of the script), with the signals' names."""
        found = []
        for command in self.read.commands:
            if command.program == "trap" and len(command.words) > 2:
                names = [word.upper().removeprefix("SIG") for word in command.words[2:]]
                names = [name for name in names if name not in _NOT_SIGNALS]
                if names and command.words[1] not in ("", "-"):
                    found.append((command, names))
        return found


Rule = Callable[[Script], Iterator[Finding]]


def check_file(path: Path) -> list[Finding]:
    """The findings in a file, by line, as it would be submitted from the working directory.

    Raises:
        UsageError: it cannot be read, or is no text.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"{printable(str(path))}: {error.strerror or error}; give the path of a batch script"
        ) from None
    if b"\0" in data or len(data) > SIZE_LIMIT:
        raise UsageError(f"{printable(str(path))} is binary, or larger than 4 MiB; a batch script was needed")
    return check(data.decode("utf-8", "backslashreplace"), Path.cwd())


def check(text: str, directory: Path) -> list[Finding]:
    """The findings in a text, by line, as it would be submitted from this directory."""
    script = Script(read=batchscript.read(text), directory=directory)
    return sorted((finding for rule in RULES for finding in rule(script)), key=lambda finding: finding.line)


# ---- what sbatch does not take ---------------------------------------------------------------------------------------


def _first_line(script: Script) -> Iterator[Finding]:
    if not script.read.text.startswith("#!"):
        yield Finding(
            line=1, what="the first line names no interpreter", why="sbatch refuses the script",
            instead="#!/bin/bash as the very first line",
        )  # fmt: skip
    if "\r\n" in script.read.text:
        line = script.read.text[: script.read.text.index("\r\n")].count("\n") + 1
        yield Finding(
            line=line, what="DOS line breaks", why="sbatch refuses the script, and bash reads \\r as part of each word",
            instead="Unix line breaks: sed -i 's/\\r$//' FILE",
        )  # fmt: skip


def _ignored_directives(script: Script) -> Iterator[Finding]:
    for line in sorted({one.line for one in script.read.directives if one.ignored}):
        yield Finding(
            line=line, what="a #SBATCH line behind the first command", why="sbatch stops reading there: it has no effect",
            instead="it above the first command",
        )  # fmt: skip
    for number, text in enumerate(script.read.text.splitlines(), 1):
        if re.match(r"#[ \t]+SBATCH[ \t]+-", text):
            yield Finding(
                line=number, what="`# SBATCH` with a blank", why="it is a comment, and has no effect",
                instead="#SBATCH without the blank, or ## in front of what shall not count",
            )  # fmt: skip


def _variables_in_directives(script: Script) -> Iterator[Finding]:
    for one in script.read.directives:
        if "$" in one.value and not one.ignored:
            yield Finding(
                line=one.line, what=f"a variable in --{one.name}={one.value}",
                why="sbatch reads directives without a shell: the dollar sign stays",
                instead=f"the value itself, Slurm's patterns (%j, %x), or --{one.name} on sbatch's command line",
            )  # fmt: skip


# ---- signals ---------------------------------------------------------------------------------------------------------


def _foreground_under_trap(script: Script) -> Iterator[Finding]:
    traps = script.traps()
    if not traps:
        return
    for command in script.read.commands:
        if command.program in _LONG and not command.is_background and command.line > traps[0][0].line:
            names = ", ".join(dict.fromkeys(name for _, found in traps for name in found))
            if command.replaces_the_shell:
                yield Finding(
                    line=command.line, what=f"exec {command.program} after a trap for {names}",
                    why="exec replaces the shell, and its traps are gone",
                    instead=f"{command.program} ... & and wait for it, or leave the trap out",
                )  # fmt: skip
            else:
                yield Finding(
                    line=command.line,
                    what=f"{command.program} in the foreground, with a trap for {names} (line {traps[0][0].line})",
                    why="bash runs a trap only after the command in the foreground has ended: too late to save",
                    instead=f'{command.program} ... & child=$!; wait "$child" (again after the trap), '
                    "or handle the signal in the program itself",
                )  # fmt: skip


def _background_without_wait(script: Script) -> Iterator[Finding]:
    last_wait = max((command.line for command in script.read.commands if command.program == "wait"), default=0)
    for command in script.sruns:
        if command.is_background and command.line > last_wait and not re.search(r"\bwait\b", command.text):
            yield Finding(
                line=command.line, what="srun in the background and no wait behind it",
                why="the script ends at once, and Slurm kills what still runs", instead="wait at the end",
            )  # fmt: skip


def _signal_and_its_hearer(script: Script) -> Iterator[Finding]:
    name, who = script.signal
    if not name:
        return
    directive = script.read.given("signal")
    assert directive is not None
    trapped = {one for _, names in script.traps() for one in names}
    if name in trapped and "B" not in who:
        yield Finding(
            line=directive.line, what=f"--signal={directive.value} with a trap for {name} in the script",
            why="without B: only the tasks of job steps get the signal, the batch shell does not",
            instead=f"--signal=B:{directive.value.split(':')[-1]}, or the handler in the program itself",
        )  # fmt: skip
    if "B" in who and name not in trapped and not script.is_ours:
        yield Finding(
            line=directive.line, what=f"--signal={directive.value}, and no trap for {name}",
            why=f"only the batch shell gets the signal, and SIG{name} ends it: the job dies early and nothing is saved",
            instead=f"--signal={directive.value.split(':')[-1]} for the tasks, or a trap for {name}",
        )  # fmt: skip
    torchrun = script.torchrun
    if torchrun is not None and name in ("USR1", "USR2") and "B" not in who:
        yield Finding(
            line=directive.line, what=f"--signal={directive.value} with torchrun (line {torchrun.line})",
            why=f"torchrun has no handler for SIG{name} and dies of it at once; its workers do not hear it",
            instead="--signal=TERM@120, which torchrun passes on, or a launcher that passes the warning on (hpc.launch)",
        )  # fmt: skip


# ---- coming back -----------------------------------------------------------------------------------------------------


def _requeue(script: Script) -> Iterator[Finding]:
    if script.read.given("requeue") is None and script.read.given("no-requeue") is None:
        yield Finding(
            line=1, what="no --requeue",
            why="after a preemption or a lost node the job may not come back: it then hangs on the site's JobRequeue",
            instead="#SBATCH --requeue (or --no-requeue, if it must not)",
        )  # fmt: skip
    if script.read.value("open-mode") != "append" and script.read.given("no-requeue") is None:
        found = script.read.given("open-mode")
        yield Finding(
            line=found.line if found else 1,
            what=f"--open-mode={found.value}" if found else "no --open-mode",
            why="each attempt may empty the log of the one before it",
            instead="#SBATCH --open-mode=append",
        )  # fmt: skip


def _log_folder(script: Script) -> Iterator[Finding]:
    base = script.directory / script.read.value("chdir")
    for name in ("output", "error"):
        found = script.read.given(name)
        if found is None or "/" not in found.value or "$" in found.value:
            continue
        folder = found.value.rpartition("/")[0] or "/"
        if "%" in folder:
            yield Finding(
                line=found.line, what=f"a pattern in the folder of --{name}={found.value}",
                why="Slurm makes no folders: the job fails at once and leaves no log",
                instead="a folder that is there, and the pattern in the file's name",
            )  # fmt: skip
        elif not (base / folder).is_dir():
            yield Finding(
                line=found.line, what=f"the folder {folder} of --{name} is not there, seen from {script.directory}",
                why="Slurm makes no folders: the job fails at once and leaves no log (a mkdir in the script is too late)",
                instead=f"mkdir -p {folder} before sbatch, or a file where the job is submitted",
            )  # fmt: skip


# ---- tasks, GPUs, cores ----------------------------------------------------------------------------------------------


def _tasks_against_gpus(script: Script) -> Iterator[Finding]:
    gpus, tasks = script.gpus_per_node, script.tasks_per_node
    names = ("ntasks-per-node", "ntasks", "gpus-per-node", "gres", "gpus")
    line = next((found.line for name in names if (found := script.read.given(name))), 1)
    torchrun = script.torchrun
    if torchrun is not None:
        started = _NPROC.search(torchrun.text)
        if tasks > 1:
            yield Finding(
                line=line, what=f"{tasks} tasks on each node, each of which starts torchrun (line {torchrun.line})",
                why="torchrun itself starts a process per GPU: every GPU gets several, and they fight for the port",
                instead="#SBATCH --ntasks-per-node=1, or srun python without torchrun",
            )  # fmt: skip
        if started and gpus and int(started[1]) != gpus:
            yield Finding(
                line=torchrun.line, what=f"{started[0]} with {gpus} GPUs on each node",
                why="GPUs stay idle" if int(started[1]) < gpus else "several processes share a GPU, or find none",
                instead=f"--nproc-per-node={gpus}",
            )  # fmt: skip
        if script.nodes > 1 and not any(command.line == torchrun.line for command in script.sruns):
            yield Finding(
                line=torchrun.line, what=f"torchrun without srun, for {script.nodes} nodes",
                why="the batch script runs on the first node alone: the others stay idle, or torchrun waits for them",
                instead="srun torchrun ...",
            )  # fmt: skip
    elif script.sruns and gpus and not script.is_ours and tasks != gpus:
        asked = {name for command in script.sruns for name, _ in batchscript.options(command.words[1:])}
        if not asked & {"ntasks", "ntasks-per-node"}:
            few = tasks < gpus
            yield Finding(
                line=line, what=f"{tasks} task{'s' if tasks > 1 else ''} and {gpus} GPUs on each node",
                why="GPUs stay idle: DDP wants a process for each" if few else "several tasks share a GPU, or find none",
                instead=f"#SBATCH --ntasks-per-node={gpus} (or one task that starts {gpus} workers: hpc.node, torchrun)",
            )  # fmt: skip


def _hidden_gpus(script: Script) -> Iterator[Finding]:
    for one in script.read.directives:
        if not one.ignored and (one.name == "gpus-per-task" or (one.name == "gpu-bind" and "none" not in one.value)):
            yield Finding(
                line=one.line, what=f"--{one.name}={one.value}",
                why="each task sees its own GPU alone, under number 0: NCCL loses the direct way to the others",
                instead="#SBATCH --gpus-per-node=N, and the GPU chosen by local rank",
            )  # fmt: skip


def _visible_devices(script: Script) -> Iterator[Finding]:
    for command in script.read.commands:
        if match := re.search(r"\b(CUDA|ROCR|HIP)_VISIBLE_DEVICES=", command.text):
            yield Finding(
                line=command.line, what=f"{match[1]}_VISIBLE_DEVICES set by hand",
                why="Slurm sets it to the GPUs that the job was given; other numbers are somebody else's, or none",
                instead="nothing: choose cuda:LOCAL_RANK among those that are visible",
            )  # fmt: skip
            return


def _cores_of_steps(script: Script) -> Iterator[Finding]:
    found = script.read.given("cpus-per-task")
    if found is None or "SRUN_CPUS_PER_TASK" in script.read.text:
        return
    for command in script.sruns:
        if "cpus-per-task" not in {name for name, _ in batchscript.options(command.words[1:])}:
            yield Finding(
                line=command.line, what=f"srun without --cpus-per-task (line {found.line} asks for {found.value})",
                why="since Slurm 22.05 srun does not take it over from sbatch: all loaders share one core",
                instead="srun --cpus-per-task=$SLURM_CPUS_PER_TASK ...",
            )  # fmt: skip


# ---- meeting, ending -------------------------------------------------------------------------------------------------


def _fixed_port(script: Script) -> Iterator[Finding]:
    for command in _first_of_line(script):
        if match := _PORT.search(command.text):
            yield Finding(
                line=command.line, what=f"a fixed port, {match[1] or match[2]}",
                why="two jobs on one node, or the last attempt's leftover, hold the same: address already in use",
                instead="one that follows the job: MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))",
            )  # fmt: skip


def _loopback_master(script: Script) -> Iterator[Finding]:
    for command in _first_of_line(script):
        found = re.search(
            r"MASTER_ADDR=[\"']?(localhost|127\.[\d.]+)|--rdzv[_-]endpoint[= ]?(localhost|127\.)", command.text
        )
        if found and script.nodes > 1:
            yield Finding(
                line=command.line, what=f"a master on {found[1] or found[2]} for {script.nodes} nodes",
                why="each node would look for it in itself, and wait until the time-out",
                instead='MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            )  # fmt: skip


def _lost_exit_code(script: Script) -> Iterator[Finding]:
    if "pipefail" in script.read.text:
        return
    for command in script.sruns:
        if command.operator in ("|", "|&"):
            yield Finding(
                line=command.line, what="srun in a pipe", instead="set -o pipefail above it, or --output=FILE",
                why="the pipe's exit code is that of its last program: a failed run counts as a good one",
            )  # fmt: skip


def _kills_by_name(script: Script) -> Iterator[Finding]:
    for command in script.read.commands:
        words = command.words if command.program == "srun" else command.words[:1]
        if {"pkill", "killall"} & {word.rpartition("/")[2] for word in words}:
            yield Finding(
                line=command.line, what="processes ended by name (pkill, killall)",
                why="it hits your other jobs on the same node as well",
                instead='kill "$child" with the id of what you started, or python -m hpc.clean',
            )  # fmt: skip


def _first_of_line(script: Script) -> Iterator[Command]:
    seen: set[int] = set()
    for command in script.read.commands:
        if command.line not in seen:
            seen.add(command.line)
            yield command


RULES: tuple[Rule, ...] = (
    _first_line,
    _ignored_directives,
    _variables_in_directives,
    _foreground_under_trap,
    _background_without_wait,
    _signal_and_its_hearer,
    _requeue,
    _log_folder,
    _tasks_against_gpus,
    _hidden_gpus,
    _visible_devices,
    _cores_of_steps,
    _fixed_port,
    _loopback_master,
    _lost_exit_code,
    _kills_by_name,
)
