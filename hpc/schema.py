"""Every setting of the toolkit: its name, its type, its default and what it means. No torch here.

A job's own parameters stand beside these at the top level (jobs/<name>/config.py); hpc/config.py merges all of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hpc.errors import ConfigError


@dataclass
class SlurmConfig:
    """What is asked of Slurm. None means: not asked for, so that the site's default holds."""

    nodes: int = 1
    """--nodes"""
    gpus_per_node: str | None = "1"
    """GPUs of each node: a count, or type and count ("a100:4"); null for a job without GPUs (launch.workers_per_node)."""
    gpu_request: str = "gpus-per-node"
    """How the site wants GPUs to be asked for: "gpus-per-node" or "gres"."""
    time: str | None = None
    """Time limit in any of Slurm's notations: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS."""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    mem: str | None = None
    """Memory of each node with its unit ("64G"); a bare number is MiB, as for sbatch. "0" is all of the node's."""
    mem_per_gpu: str | None = None
    mem_per_cpu: str | None = None
    cpus_per_gpu: int | None = None
    """CPU cores of each GPU's worker, whatever the layout."""
    cpus_per_task: int | None = None
    """CPU cores of each Slurm task, as sbatch counts them; give this or cpus_per_gpu."""
    constraint: str | None = None
    exclude: str | None = None
    exclude_failed_h: float = 24.0
    """Nodes that failed one of your runs in so many hours are left out, besides slurm.exclude: at submission and at a requeue, at
    most a quarter of those that would do; 0 takes them all. `python -m hpc.doctor --failed-nodes` shows them."""
    nodelist: str | None = None
    reservation: str | None = None
    signal: str = "USR2"
    """The warning signal before the time limit, by name without SIG; USR2, since NCCL may use USR1. Script and handlers take it from here."""
    signal_lead_s: int = 120
    """Seconds before the time limit at which the warning signal is sent (Slurm may send it up to 60 s early)."""
    requeue: bool = True
    """Let Slurm put the job back into the queue after preemption or a node's failure."""
    setup: list[str] = field(default_factory=list)
    """Shell lines before Python starts (module load, source activate); the job ends if one fails."""
    allow_root: bool = False
    """Submit although you are root."""
    extra: dict[str, str | bool | None] = field(default_factory=dict)
    """Any other option of sbatch by its long name: extra.mail-type=END; true for an option without a value (extra.hold=true),
    false or null for one that is left out although the site's file names it."""


@dataclass
class LaunchConfig:
    """How workers are started inside the allocation."""

    layout: str = "task-per-node"
    """"task-per-node": one agent per node imports torch once and forks a worker per GPU; "task-per-gpu": RANK=SLURM_PROCID."""
    workers_per_node: int | None = None
    """Workers of each node; by default one per allocated GPU, or one on a node without."""
    python: str | None = None
    """The interpreter of the batch step and the workers; by default the one that submits."""
    preload: list[str] = field(default_factory=list)
    """Modules imported once per node before the workers are forked, besides torch; they must not touch the GPU."""
    fork: bool = True
    """Fork workers from the agent that has imported torch; false starts a fresh interpreter for each."""
    rendezvous_timeout_s: float = 600.0
    """How long ranks wait for each other before the run is given up, in seconds; the default suits a cold file system."""
    allow_loopback: bool = False
    """Accept a loopback master for several nodes; only for several simulated nodes on one machine."""
    grace_s: float = 30.0
    """Seconds that workers have between a forwarded SIGTERM and SIGKILL. A step that still runs gets that SIGTERM so long, and
    8 s more, before the time limit, so that the job can be requeued in time. When Slurm itself ends the job (scancel), they have
    its KillWait less 8 s, if that is shorter, so that the node is clean when Slurm kills the rest."""
    max_restarts: int = 3
    """How often workers that were killed, lost or never started are started again inside one allocation; a step that is kept
    gives the whole number back, and such a restart comes without a pause."""
    retry_failures: int = 0
    """How often a program that failed by itself (an exception, an exit code) is started again inside one allocation."""
    hang_timeout_s: float = 600.0
    """Seconds without a step after which a worker of a training job is taken to hang and is ended (saves, evaluations and the
    start-up may take six times as long); 0 never does. A worker that is stopped by SIGSTOP is noticed after 10 s anyway.
    A script of yours is looked after from its first call of hpc.beats.beat() on, or as output_beats says."""
    output_beats: bool = False
    """For a script: what a rank prints counts as a step, so that a rank that prints nothing for hang_timeout_s is ended."""
    slow_after_s: float = 60.0
    """Seconds for which a rank of a training job has to need clearly longer for its own part of a step than the others (1.5 times,
    and a tenth of a step) until it is named."""
    resubmit: bool | None = None
    """Where the job may not be requeued, send a new one that goes on with the run, once after each attempt: null does so when the
    site forbids it, true also with slurm.requeue=false, false never (the command is printed)."""
    preflight: str = "quick"
    """"quick": each agent looks at its own node while it imports torch, at no cost; "full": before the first start in each
    allocation all of `hpc.doctor --allocation`, a minute or two; the job goes back into the queue without nodes that are not fit."""
    code: str = "snapshot"
    """"snapshot": jobs run the code as it was at submission; "live": as it is when the job starts (changes are named)."""


@dataclass
class TrainConfig:
    """The training loop."""

    epochs: int = 1
    """Passes over the training data."""
    max_steps: int | None = None
    """Stop after this many optimizer steps, whatever the epochs say."""
    batch_size: int = 64
    """Samples of one optimizer step over all ranks and micro-batches (the global batch)."""
    accumulate: int = 1
    """Micro-batches per optimizer step."""
    drop_last: bool = False
    """Leave out the samples at the end of an epoch that fill no whole batch; by default they make a smaller one."""
    clip_grad_norm: float | None = None
    """Largest norm of the gradient of one optimizer step, all parameters together; a larger one is scaled down to it."""
    seed: int = 0
    precision: str = "fp32"
    """"fp32", "bf16" or "fp16" (automatic mixed precision)."""
    device: str = "auto"
    """"auto" (the GPU where there is one), "cuda" or "cpu"."""
    strategy: str = "ddp"
    """"ddp", or "dp" (DataParallel: a quick trial in a single process)."""
    sync_batchnorm: bool = True
    """Convert BatchNorm to SyncBatchNorm when there is more than one GPU."""
    find_unused_parameters: bool = False
    """Let DDP look for parameters that got no gradient; slower."""
    loader_workers: int | None = None
    """Data-loader processes of each rank; by default from the cores that the rank may use."""
    threads: int | None = None
    """Threads that compute on the CPU in each rank; by default OMP_NUM_THREADS, or one per core of the rank's share."""
    eval_every_epochs: int = 1
    """Epochs between evaluations on the held-out samples; one always follows the last step. 0: only that one."""
    save_every_steps: int | None = None
    """Steps between checkpoints; null: by time, see save_every_s. One is always written at the end."""
    save_every_s: float | None = None
    """Seconds between checkpoints, to the next logged step or so (log_every_steps); 0: none but the last one. null: chosen from what
    a save is measured to cost and how often this run has failed, so that both lose the least time, and saving at most 2 %."""
    keep_checkpoints: int = 2
    """The newest whole checkpoints that are kept."""
    keep_every_steps: int | None = None
    """Checkpoints of steps that are a multiple of this are never removed."""
    best_metric: str | None = None
    """A metric of the job's evaluation: the checkpoint with the best value is never removed, and each evaluation's step is
    saved. Of equal ones the later is the best."""
    best_mode: str = "max"
    """Whether the highest value of best_metric is the best ("max") or the lowest ("min")."""
    stop_when_diverged: bool = True
    """End the run when the losses of ten logged steps in a row are no finite numbers, or the last one. From the first on no
    checkpoint is written, so that those from before stay."""
    log_every_steps: int = 10
    timeout_s: float = 600.0
    """How long a collective may wait before the process group gives up, in seconds. For a save the ranks wait six times as long."""

    def __post_init__(self) -> None:
        """Refuse values that no training can have.

        Raises:
            ConfigError: names the setting, its value and what it may be.
        """
        least = {"epochs": 1, "max_steps": 1, "batch_size": 1, "accumulate": 1, "loader_workers": 0, "seed": 0}
        least |= {
            "threads": 1,
            "eval_every_epochs": 0,
            "save_every_steps": 1,
            "keep_checkpoints": 1,
            "keep_every_steps": 1,
            "log_every_steps": 1,
        }
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise ConfigError(f"train.{name}={value}: {bound} or more was needed")
        if self.save_every_s is not None and not self.save_every_s >= 0:
            raise ConfigError(f"train.save_every_s={self.save_every_s}: 0 or more was needed")
        if self.save_every_s is not None and self.save_every_steps is not None:
            raise ConfigError(
                f"train.save_every_s={self.save_every_s:g} with train.save_every_steps={self.save_every_steps}: "
                f"give one of them, and null for the other"
            )
        for name in ("clip_grad_norm", "timeout_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"train.{name}={value}: a number above 0 was needed")
        choices = {"precision": ("fp32", "bf16", "fp16"), "device": ("auto", "cuda", "cpu"), "strategy": ("ddp", "dp")}
        choices["best_mode"] = ("max", "min")
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"train.{name}={getattr(self, name)}: one of {', '.join(allowed)} was needed")
        if self.accumulate > self.batch_size:
            raise ConfigError(
                f"train.accumulate={self.accumulate} with train.batch_size={self.batch_size}: each micro-batch needs a "
                f"sample, and the batch size counts all of them; raise train.batch_size"
            )


@dataclass
class Config:
    """The whole: one run."""

    name: str | None = None
    """The job's name; by default the training job's or the script's."""
    job: str = "jobs.digits"
    """The training job: a module of jobs/, or any importable package of the same form."""
    command: list[str] = field(default_factory=list)
    """A script and its arguments to run instead of a training job (what follows "--")."""
    run_root: str = "runs"
    """Where run directories are made."""
    run_dir: str | None = None
    """The run directory itself, when it is to be an existing or a given one."""
    run_root_shared: bool = False
    """Let run directories lie in a folder that belongs to another user or in which others may write, below one in which
    everybody may, or behind another user's link. These people could exchange a run directory, and what is run from it."""
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
