"""What an outer job or an earlier run leaves in the environment, and what is handed on without it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpc.errors import printable

KEPT = frozenset(
    {
        "SLURM_CONF",  # which cluster this is
        "SLURM_CONF_SERVER",  # the same, where the configuration is fetched
        "SLURM_JWT",  # who the user is, at sites with token authentication
        "HPC_HOME",
        "HPC_PYTHON",
        "HPC_SITE_CONFIG",
    }
)
DROPPED_PREFIXES = (
    "SLURM_",
    "SLURMD_",
    "SBATCH_",
    "SRUN_",
    "SALLOC_",
    "HPC_",
    "PMI",
    "OMPI_COMM_WORLD_",
    "TORCHELASTIC_",
    "SUBMITIT_",
)
DROPPED = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "NODE_RANK",
        "ROLE_NAME",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "DEVICE_INDEX",
    }
)
VISIBLE_GPUS = frozenset({"CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"})

_FLAGS = {
    "SBATCH_ACCOUNT": "--account",
    "SBATCH_CONSTRAINT": "--constraint",
    "SBATCH_GPUS_PER_NODE": "--gpus-per-node",
    "SBATCH_GRES": "--gpus-per-node",
    "SBATCH_JOB_NAME": "--name",
    "SBATCH_MEM_PER_CPU": "slurm.mem_per_cpu=",
    "SBATCH_MEM_PER_GPU": "slurm.mem_per_gpu=",
    "SBATCH_MEM_PER_NODE": "--mem",
    "SBATCH_PARTITION": "--partition",
    "SBATCH_QOS": "--qos",
    "SBATCH_REQUEUE": "slurm.requeue=true",
    "SBATCH_NO_REQUEUE": "slurm.requeue=false",
    "SBATCH_RESERVATION": "slurm.reservation=",
    "SBATCH_SIGNAL": "slurm.signal=",
    "SBATCH_TIMELIMIT": "--time",
    "SLURM_CLUSTERS": "slurm.extra.clusters=",
}
_SHOWN_LENGTH = 60


@dataclass(frozen=True)
class Inherited:
    """The environment to hand on, and what was taken out of it."""

    environ: Mapping[str, str]
    dropped: tuple[str, ...]
    """Names, sorted."""
    outer_job: str | None
    """The job that this process runs in, if any."""
    warnings: tuple[str, ...]
    """One line for the variables, SBATCH_* and SLURM_CLUSTERS, that a plain sbatch would have obeyed."""


def without_outer_job(environ: Mapping[str, str], *, keep_gpus: bool) -> Inherited:
    """The environment without the variables of an outer job, step or rank.

    `keep_gpus` keeps which GPUs are visible (a run inside the outer allocation); a new job gets its own.
    """
    outer_job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    dropped = []
    for name in environ:
        if name in KEPT:
            continue
        of_outer_job = name in VISIBLE_GPUS and outer_job is not None and not keep_gpus
        if name in DROPPED or name.startswith(DROPPED_PREFIXES) or of_outer_job:
            dropped.append(name)
    gone = set(dropped)
    overriding = sorted(name for name in gone if name.startswith("SBATCH_") or name == "SLURM_CLUSTERS")
    warnings: tuple[str, ...] = ()
    if overriding:
        shown = ", ".join(_ignored(name, environ[name]) for name in overriding)
        warnings = (f"ignored from the environment: {shown}",)
    kept = {name: value for name, value in environ.items() if name not in gone}
    return Inherited(kept, tuple(sorted(gone)), outer_job, warnings)


def _ignored(name: str, value: str) -> str:
    """The variable and what to use instead; its value where that can be no secret (SBATCH_EXPORT may hold any)."""
    shown = printable(value) if len(value) <= _SHOWN_LENGTH else printable(value[:_SHOWN_LENGTH]) + "..."
    if name not in _FLAGS:
        shown = "(not shown)"
    option = name.removeprefix("SBATCH_").lower().replace("_", "-")
    return f"{printable(name)}={shown} (use {_FLAGS.get(name, f'slurm.extra.{printable(option)}=')})"
