"""From a configuration to a job in the queue, or to a run on this machine: what the door of the login node does."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import hpc
from hpc import snapshot
from hpc.config import Loaded
from hpc.errors import SlurmCommandError, SubmissionError, UsageError, printable
from hpc.login import badnodes, delivery
from hpc.login.inherited import without_outer_job
from hpc.login.plan import Place, Plan, make_plan, output_file
from hpc.rundir import RunDirectory, check_own, directory_name, new_run_id, run_name, write_private
from hpc.slurm import commands


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A job that is in the queue."""

    job_id: str
    plan: Plan
    output: Path
    """The batch step's screen; of an array the pattern of its elements' files."""
    notes: tuple[str, ...]


@dataclass
class _Made:
    """A run directory, and what of it was not there before."""

    directory: RunDirectory
    topmost: Path | None
    """The highest directory that was made; None when the run directory was there."""
    before: dict[Path, str] = field(default_factory=dict)
    """What stood in the files of a run directory that was there, which a submission replaces."""
    copy: Path | None = None
    """The copy of the code that was made in it."""

    def remove(self) -> None:
        """Take away what was made, as if nothing had been asked."""
        if self.topmost is None:
            if self.copy is not None:
                shutil.rmtree(self.copy, ignore_errors=True)
            for file in (self.directory.config_file, self.directory.job_script):
                if file in self.before:
                    write_private(file, self.before[file])
                else:
                    file.unlink(missing_ok=True)
        else:
            shutil.rmtree(self.directory.path, ignore_errors=True)
            for path in (self.directory.path, *self.directory.path.parents):
                if path != self.directory.path:
                    try:
                        path.rmdir()
                    except OSError:
                        return
                if path == self.topmost:
                    return


def preview(loaded: Loaded) -> Plan:
    """The plan as it would be sent now, with a run directory that is not made.

    Raises:
        UsageError: something in the configuration or in a path that cannot be sent.
    """
    config = loaded.config
    run_dir = Path(os.path.abspath(config.run_root)) / f"{directory_name(run_name(config))}-{new_run_id()}"
    run_dir = run_dir if config.run_dir is None else Path(os.path.abspath(config.run_dir))
    workdir = Path(os.getcwd())
    root = snapshot.work_tree(workdir) or workdir
    manifest = snapshot.Manifest(root=str(root), directory=os.path.relpath(workdir, root))
    return make_plan(loaded, _place(loaded, run_dir, run_dir / "code", manifest))


def send(loaded: Loaded) -> Sent:
    """Make the run directory, copy the code, write the script and submit it.

    Raises:
        UsageError: refused here or by the cluster; nothing is queued, and what was made is gone again.
        SlurmCommandError: no answer from Slurm, so that the job may be queued; the run directory stays.
    """
    config = loaded.config
    _refuse_root(config.slurm.allow_root)
    inherited = without_outer_job(os.environ, keep_gpus=False)
    preview(loaded)
    if shutil.which("sbatch", path=inherited.environ.get("PATH")) is None:
        raise SubmissionError(
            "sbatch is not on PATH, so this is no machine of a Slurm cluster (module load slurm?); "
            "--local runs the job here, --dry-run shows what would be sent"
        )
    made = _make_directory(loaded)
    if made.topmost is None:
        _refuse_while_one_runs(_jobs_of(list(made.directory.events())))
    try:
        plan, manifest = _prepare(loaded, made, inherited.environ)
        left_out = badnodes.left_out(config.slurm)
        too_long = delivery.time_limit_note(config.slurm.time, config.slurm.partition)
        job_id = delivery.deliver(made.directory.job_script, inherited.environ, left_out.options)
    except SlurmCommandError:
        raise  # the job may be queued, and needs its directory
    except BaseException:
        made.remove()
        raise
    made.directory.append_event(
        "submitted",
        job_id=job_id,
        name=plan.name,
        workdir=str(plan.place.workdir),
        commit=manifest.commit,
        dirty=manifest.dirty,
        files=len(manifest.files),
    )
    notes = [*inherited.warnings, *plan.notes, *_snapshot_notes(loaded, manifest)]
    notes += [note for note in (too_long, left_out.note, _python_note(plan.place.python)) if note]
    is_array = any(key == "array" for key, _ in plan.directives)
    output = output_file(plan.run_dir, f"{job_id}_*" if is_array else job_id)
    return Sent(job_id=job_id, plan=plan, output=output, notes=tuple(notes))


def _refuse_root(allowed: bool) -> None:
    if os.geteuid() == 0 and not allowed:
        raise UsageError(
            "you are root, and a job of root can touch everybody's processes and files; "
            "submit as an ordinary user, or give --allow-root"
        )


@dataclass(frozen=True, kw_only=True)
class Continued:
    """A run that goes on as another job."""

    job_id: str
    run_dir: Path
    output: Path
    note: str | None = None


def send_again(path: Path, *, allow_root: bool = False) -> Continued:
    """Send the batch script of a run once more: the same request, code and run directory, for its next attempt.

    Once after each attempt, whoever asks. Inside the run's own job the new one waits for the end of that.

    Raises:
        UsageError: root without `allow_root` (but for the run's own job), no such run, a job of it is in the queue or runs, or it was continued after this attempt already.
        SubmissionError: the cluster refused, and nothing is queued.
        SlurmCommandError: no answer from Slurm, so that the job may be queued.
    """
    run_dir = RunDirectory.open(path, shared=True)  # what is on the way to it was looked at when it was made
    sent = run_dir.batch_script()
    if sent is None:
        raise UsageError(
            f"{printable(str(path))} has no job.sh: it was not sent by hpc.submit; send it as you did before"
        )
    job_script, index = sent
    check_own(job_script)
    events = list(run_dir.events())
    jobs = _jobs_of(events, told="submitted" if index is None else "started")  # an element's begins in the job itself
    last = max((event["attempt"] for event in events if isinstance(event.get("attempt"), int)), default=0)
    inherited = without_outer_job(os.environ, keep_gpus=False)
    own = inherited.outer_job
    if own not in jobs:
        _refuse_root(allow_root)
    if own not in jobs[-1:]:
        _refuse_while_one_runs(jobs)
    left_out = badnodes.left_out_again(run_dir.config_file)
    script = run_dir.path / f"job-after-{last}.sh"
    try:
        descriptor = os.open(script, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        raise UsageError(
            f"attempt {last} was continued already, {_how_it_was_continued(events, last, script)}"
        ) from None
    options = [
        *left_out.options,
        *([f"--array={index}"] if index is not None else []),
        *([f"--dependency=afterany:{own}"] if own is not None and own in jobs else []),
    ]
    try:
        with open(descriptor, "wb") as stream:
            stream.write(job_script.read_bytes())
        job_id = delivery.deliver(script, inherited.environ, options)
    except SlurmCommandError:
        raise  # the job may be queued
    except BaseException:
        script.unlink()
        raise
    job_id = job_id if index is None else f"{job_id}_{index}"
    run_dir.append_event("continued", attempt=last, job_id=jobs[-1] if jobs else None, new_job_id=job_id)
    output = output_file(job_script.parent, job_id)
    return Continued(job_id=job_id, run_dir=run_dir.path, output=output, note=left_out.note)


def _jobs_of(events: Sequence[Mapping[str, Any]], told: str = "submitted") -> list[str]:
    """The jobs of a run, the last one that was sent last."""
    key_of = {told: "job_id", "continued": "new_job_id"}
    found = [event.get(key_of[kind]) for event in events if (kind := event.get("event")) in key_of]
    return [str(job) for job in found if job]


def _refuse_while_one_runs(jobs: Sequence[str]) -> None:
    """Two jobs in one run directory would train on the same checkpoints."""
    state = commands.state_of(jobs[-1]) if jobs else None
    if state is not None and not state.is_finished:  # nor one whose name is not known here
        raise UsageError(f"job {jobs[-1]} of this run is {state.value}: it goes on there; scancel it first")


def _how_it_was_continued(events: Sequence[Mapping[str, Any]], attempt: int, script: Path) -> str:
    path = printable(str(script))
    if any(event.get("event") == "continued" and event.get("attempt") == attempt for event in events):
        return f"see {path}"
    return (
        f"but the answer of sbatch is not known: look for {path} in: squeue --me --format='%i %T %o'; if it is not there, "
        f"remove that file, and the run can be continued"
    )


def _prepare(loaded: Loaded, made: _Made, environ: Mapping[str, str]) -> tuple[Plan, snapshot.Manifest]:
    """Copy the code, write configuration and script, and let the cluster test the request.

    The copy is made by a thread: it waits for git and the disk while submitit is imported.
    """
    directory = made.directory
    made.copy = destination = _free_name(directory.code)
    workdir = Path(os.getcwd())
    with ThreadPoolExecutor(1) as pool:
        copying = pool.submit(snapshot.take, workdir, destination)
        from hpc.login import submitter  # late: submitit takes longer to import than all refusals before it

        manifest = copying.result()
    plan = make_plan(loaded, _place(loaded, directory.path, destination, manifest))
    write_private(directory.config_file, plan.config_yaml)
    write_private(directory.job_script, submitter.render(plan))
    slurm = loaded.config.slurm
    delivery.check(directory.job_script, environ, nodes=slurm.nodes, partition=slurm.partition)
    return plan, manifest


def run_here(loaded: Loaded) -> NoReturn:
    """Become the controller of a local run, in a new run directory; the variables of an outer job are taken away.

    Raises:
        UsageError: the run directory cannot be made, or the interpreter not be run.
    """
    inherited = without_outer_job(os.environ, keep_gpus=True)
    plan = preview(loaded)
    made = _make_directory(loaded, local=True)
    run_dir = made.directory.path
    write_private(made.directory.config_file, plan.config_yaml)
    if inherited.outer_job is not None:
        print(
            f"inside job {printable(inherited.outer_job)}: its Slurm variables are ignored, the run starts by itself here",
            file=sys.stderr,
        )
    print(f"run directory {printable(str(run_dir))}", file=sys.stderr, flush=True)
    environ = dict(inherited.environ)
    toolkit = plan.place.toolkit
    if toolkit is not None:
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(toolkit), environ.get("PYTHONPATH"))))
    python = plan.place.python
    try:
        os.execve(python, [python, "-u", "-m", "hpc.launch", "--local", "--run-dir", str(run_dir)], environ)
    except OSError as error:
        made.remove()
        raise UsageError(
            f"the interpreter {printable(python)} cannot be run ({error.strerror}); correct launch.python"
        ) from None


def _place(loaded: Loaded, run_dir: Path, destination: Path, manifest: snapshot.Manifest) -> Place:
    """Where the job will run from; the toolkit's own copy is used when the copied tree is the toolkit's."""
    config = loaded.config
    python = _interpreter(config.launch.python)
    toolkit: Path | None = Path(os.path.abspath(hpc.__file__)).parent.parent
    if toolkit is not None and toolkit.name in ("site-packages", "dist-packages") and python == sys.executable:
        toolkit = None
    copied = config.launch.code == "snapshot" and not config.command and manifest.note is None
    if copied and toolkit is not None and toolkit.is_relative_to(manifest.root):
        toolkit = destination / toolkit.relative_to(manifest.root)
    return Place(
        run_dir=run_dir,
        workdir=Path(os.getcwd()),
        python=python,
        umask=_umask(),
        toolkit=toolkit,
        code=manifest.working_directory(destination) if copied else None,
    )


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _interpreter(asked: str | None) -> str:
    if asked is None:
        return sys.executable
    found = asked if os.sep in asked else shutil.which(asked)
    if found is None:
        raise UsageError(f"launch.python={printable(asked)} is not on PATH; give its absolute path")
    return os.path.abspath(os.path.expanduser(found))


def _python_note(python: str) -> str | None:
    if os.access(python, os.X_OK):
        return None
    return (
        f"{printable(python)} (launch.python) is no program here; the job ends at once where its node has none either"
    )


def _make_directory(loaded: Loaded, *, local: bool = False) -> _Made:
    config, shared = loaded.config, loaded.config.run_root_shared
    wanted = Path(os.path.abspath(config.run_root if config.run_dir is None else Path(config.run_dir).parent))
    missing = [path for path in (wanted, *wanted.parents) if not os.path.exists(path)]
    if config.run_dir is None:
        directory = RunDirectory.create(wanted, directory_name(run_name(config)), shared=shared, local=local)
        return _Made(directory, missing[-1] if missing else directory.path)
    path = Path(os.path.abspath(config.run_dir))
    if os.path.exists(path):
        return _Made(opened := RunDirectory.open(path, shared=shared, local=local), None, _contents(opened))
    directory = RunDirectory.make(path, shared=shared, local=local)
    return _Made(directory, missing[-1] if missing else path)


def _contents(directory: RunDirectory) -> dict[Path, str]:
    """What a submission would replace in a run directory."""
    found = {}
    for file in (directory.config_file, directory.job_script):
        try:
            if file.is_file():
                found[file] = file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UsageError(f"{printable(str(file))} cannot be read: {error}; give another run_dir") from None
    return found


def _free_name(path: Path) -> Path:
    """The path, or the first of path-2, path-3, ... that is free: an earlier submission's copy is left as it is."""
    number, free = 2, path
    while free.exists():
        free, number = path.with_name(f"{path.name}-{number}"), number + 1
    return free


def _snapshot_notes(loaded: Loaded, manifest: snapshot.Manifest) -> list[str]:
    if loaded.config.launch.code != "snapshot":
        return []
    if manifest.note is not None:
        return [f"{printable(manifest.note)}; the job runs the code as it is when it starts"]
    if manifest.left_out and not loaded.config.command:
        return [
            f"{manifest.left_out} files (over 1 MiB, or links out of the tree) are not in the copy of the code; "
            f"if the job imports one, use launch.code=live"
        ]
    return []
