"""What a cluster is, what of it will bite, and a site file to start from. Pure, but for `look`."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hpc.quantities import slurm_minutes
from hpc.schema import LaunchConfig, SlurmConfig
from hpc.slurm import killwait, site
from hpc.slurm.commands import Partition
from hpc.slurm.site import SiteConfig

CRED_EXPIRE_S = 120  # slurm.conf(5), AuthInfo
SHORT_DEFAULT_MIN = 240
FEW_FILES = 4096
SLOW_TO_NOTICE_S = 120
_CONTAINER_PROGRAMS = ("enroot", "apptainer", "singularity", "podman")
_DAY = "1-00:00:00"


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A cluster, and what matters of the machine that asks."""

    config: SiteConfig
    programs: tuple[str, ...] = ()
    """Container programs on PATH."""
    memlock: int = resource.RLIM_INFINITY
    """Bytes that a process may lock, in the shell that submits."""
    open_files: int = 1 << 20

    @property
    def may_preempt(self) -> bool:
        return self.config.settings.get("PreemptType", "") not in ("", "preempt/none")

    def preempt_mode(self, partition: dict[str, str]) -> str:
        """How jobs of a partition make room: OFF, CANCEL, REQUEUE, SUSPEND; "QOS" where that decides."""
        if not self.may_preempt:
            return "OFF"
        if self.config.settings["PreemptType"] == "preempt/qos":
            return "QOS"
        return (partition.get("PreemptMode") or self.config.settings.get("PreemptMode", "OFF")).split(",")[-1]

    @property
    def cred_expire_s(self) -> int:
        text = self.config.inside("AuthInfo", "cred_expire") or ""
        return int(text) if text.isdecimal() else CRED_EXPIRE_S


@dataclass(frozen=True, kw_only=True)
class Bite:
    """Something about a cluster that will bite: the setting, what it means for a run, what to do."""

    setting: str
    meaning: str
    advice: str


def look() -> Cluster:
    """Ask the cluster and this machine.

    Raises:
        SlurmUnreachable: no Slurm can be asked from here, and why.
        SlurmCommandError: its answer is no configuration.
    """
    return Cluster(
        config=site.ask(),
        programs=tuple(name for name in _CONTAINER_PROGRAMS if shutil.which(name)),
        memlock=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    )


def facts(cluster: Cluster) -> list[tuple[str, str]]:
    """What the cluster is, as names and values for people."""
    settings = cluster.config.settings
    exempt = settings.get("PreemptExemptTime", "00:00:00")
    signal = "with the job's own signal first" if _sends_user_signal(cluster) else "SIGTERM, not the job's own signal"
    plugins = ["pyxis (srun --container-image)"] if "--container-image" in cluster.config.srun_help else []
    rows = [
        ("Slurm", cluster.config.version),
        ("name", settings.get("ClusterName", "?")),
        ("JobRequeue", settings.get("JobRequeue", "?")),
        ("KillWait", settings.get("KillWait", "?")),
        ("preemption", f"{settings.get('PreemptType', '?')}, {settings.get('PreemptMode', '?')}"),
    ]
    if cluster.may_preempt:
        rows.append(("its notice", signal + (f"; not in the first {exempt}" if exempt.strip("0:") else "")))
    return [
        *rows,
        ("wait after a requeue", f"{cluster.cred_expire_s} s (AuthInfo, cred_expire)"),
        ("processes of a job", settings.get("ProctrackType", "?")),
        ("time limit, overrun", settings.get("OverTimeLimit", "?")),
        ("accounting", settings.get("AccountingStorageType", "?")),
        ("containers", ", ".join([*plugins, *cluster.programs]) or "none seen here"),
    ]


PARTITION_COLUMNS = (
    "partition",
    "state",
    "nodes",
    "GPUs of a node",
    "cores",
    "MaxTime",
    "DefaultTime",
    "preempted",
    "grace",
)


def partition_rows(cluster: Cluster) -> list[tuple[str, ...]]:
    """One row for each kind of node in each partition, under PARTITION_COLUMNS."""
    rows: list[tuple[str, ...]] = []
    for partition in cluster.config.partitions:
        name = partition["PartitionName"]
        marked = f"{name}*" if partition.get("Default") == "YES" else name
        mode = cluster.preempt_mode(partition)
        grace = f"{partition.get('GraceTime', '?')} s" if mode not in ("OFF", "QOS") else "-"
        times = (partition.get("MaxTime", "?"), partition.get("DefaultTime", "?"))
        for kind in cluster.config.kinds_of(name):
            gpus = site.gpus(kind.gres) or "-"
            state = partition.get("State", "?")
            rows.append((marked, state, str(kind.nodes), gpus, kind.cpus_per_node, *times, mode, grace))
    return rows


def bites(cluster: Cluster) -> list[Bite]:
    """What of the cluster will bite, most to be feared first."""
    return [bite for rule in _RULES for bite in rule(cluster)]


# ---- coming back -----------------------------------------------------------------------------------------------------


def _requeue(cluster: Cluster) -> Iterator[Bite]:
    settings = cluster.config.settings
    if settings.get("JobRequeue") == "0":
        yield Bite(
            setting="JobRequeue=0",
            meaning="a job that is preempted or loses a node is gone for good, unless it was sent with --requeue",
            advice="hpc.submit and sbin/ddp.sbatch ask for it; write #SBATCH --requeue into scripts of your own",
        )
    if cluster.cred_expire_s >= 60:
        yield Bite(
            setting=f"AuthInfo, cred_expire={cluster.cred_expire_s}",
            meaning=f"a job that was requeued waits {cluster.cred_expire_s} s before it may start, even on an idle cluster",
            advice="nothing to do; a restart inside the allocation (launch.max_restarts) does not wait",
        )
    if settings.get("JobFileAppend") == "0":
        yield Bite(
            setting="JobFileAppend=0",
            meaning="each attempt empties the log of the one before it",
            advice="hpc.submit writes --open-mode=append; write it into scripts of your own",
        )


def _preemption(cluster: Cluster) -> Iterator[Bite]:
    modes: dict[str, list[str]] = {}
    no_grace = []
    for partition in cluster.config.partitions:
        mode = cluster.preempt_mode(partition)
        modes.setdefault(mode, []).append(partition["PartitionName"])
        if mode in ("CANCEL", "REQUEUE") and partition.get("GraceTime") == "0":
            no_grace.append(partition["PartitionName"])
    kill_wait = cluster.config.settings.get("KillWait", "KillWait")
    if "CANCEL" in modes:
        yield Bite(
            setting=f"PreemptMode=CANCEL in {', '.join(modes['CANCEL'])}",
            meaning="Slurm ends a preempted job and does not bring it back",
            advice="jobs of hpc.submit requeue themselves within the grace time; else: hpc.submit --continue RUN_DIR",
        )
    if any(mode in modes for mode in ("SUSPEND", "GANG")):
        names = ", ".join(modes.get("SUSPEND", []) + modes.get("GANG", []))
        yield Bite(
            setting=f"PreemptMode=SUSPEND in {names}",
            meaning="a job that makes room is stopped with its GPU memory in place, and its time limit goes on",
            advice="expect collectives to time out after it: the run then goes on from its newest checkpoint",
        )
    if no_grace:
        yield Bite(
            setting=f"GraceTime=0 in {', '.join(no_grace)}",
            meaning=f"a preempted job has no time but KillWait ({kill_wait}) between SIGTERM and SIGKILL",
            advice="a save must fit into it, or save more often: train.save_every_s",
        )
    if "QOS" in modes:
        yield Bite(
            setting="PreemptType=preempt/qos",
            meaning="who makes room, how and with what notice hangs on the quality of service",
            advice="ask: sacctmgr show qos format=name,preempt,preemptmode,gracetime",
        )
    if cluster.may_preempt and not _sends_user_signal(cluster):
        yield Bite(
            setting="no send_user_signal in PreemptParameters",
            meaning="a preemption sends SIGTERM alone, never the signal of --signal",
            advice="jobs of hpc.train save at both; a script of yours that waits for USR1 needs a handler for SIGTERM too",
        )


def _sends_user_signal(cluster: Cluster) -> bool:
    return "send_user_signal" in cluster.config.settings.get("PreemptParameters", "").lower()


def _ending(cluster: Cluster) -> Iterator[Bite]:
    kill_wait, grace = cluster.config.seconds("KillWait"), LaunchConfig().grace_s
    if kill_wait is not None and kill_wait < grace:
        yield Bite(
            setting=f"KillWait={kill_wait} s",
            meaning=f"so long after its SIGTERM Slurm kills everything, and a save has {killwait.for_workers(kill_wait):g} s of it, "
            f"not the {grace:g} s of launch.grace_s",
            advice="only after a scancel, or a preemption without grace time: what must not be lost is saved before (train.save_every_s)",
        )
    tracking = cluster.config.settings.get("ProctrackType", "")
    if tracking in ("proctrack/linuxproc", "proctrack/pgid"):
        yield Bite(
            setting=f"ProctrackType={tracking}",
            meaning="a process that goes into the background by itself outlives its job, and may keep a GPU's memory",
            advice="jobs started by hpc end theirs; for others look on the node",
        )
    over = cluster.config.settings.get("OverTimeLimit", "")
    if over not in ("", "0 min", "NONE"):
        yield Bite(
            setting=f"OverTimeLimit={over}",
            meaning="a job runs on beyond its time limit, up to so long, and then ends with no other warning",
            advice="nothing to do: notices count from the limit itself",
        )
    timeout = cluster.config.seconds("SlurmdTimeout")
    if timeout is not None and (timeout > SLOW_TO_NOTICE_S or timeout == 0):
        yield Bite(
            setting=f"SlurmdTimeout={timeout} s",
            meaning="Slurm never gives up a node that is silent"
            if timeout == 0
            else "a lost node is noticed only after that",
            advice="hpc.node notices within about 25 s by itself; other launchers wait for their own time-outs",
        )
    if cluster.config.settings.get("KillOnBadExit") == "0":
        yield Bite(
            setting="KillOnBadExit=0",
            meaning="when one task of a hand-written srun fails, the others wait for it until the time limit",
            advice="hpc.launch asks for it; write srun --kill-on-bad-exit=1 into scripts of your own",
        )


# ---- asking ----------------------------------------------------------------------------------------------------------


def _request(cluster: Cluster) -> Iterator[Bite]:
    settings = cluster.config.settings
    if settings.get("SelectType", "select/cons_tres") != "select/cons_tres":
        yield Bite(
            setting=f"SelectType={settings['SelectType']}",
            meaning="--gpus-per-node is not known here: GPUs are asked for with --gres",
            advice="slurm.gpu_request=gres (the site file below has it)",
        )
    if settings.get("EnforcePartLimits", "NO") == "NO":
        yield Bite(
            setting="EnforcePartLimits=NO",
            meaning="a job that asks for more than its partition allows is taken, and waits for ever",
            advice="hpc.submit says so for the time limit; look at the REASON of squeue",
        )
    if settings.get("JobSubmitPlugins"):
        yield Bite(
            setting=f"JobSubmitPlugins={settings['JobSubmitPlugins']}",
            meaning="rules of the site may change or refuse what is asked for",
            advice="compare with: scontrol show job",
        )
    for partition in cluster.config.partitions:
        name, default = partition["PartitionName"], _minutes(partition.get("DefaultTime", "NONE"))
        if default and default < SHORT_DEFAULT_MIN:
            yield Bite(
                setting=f"DefaultTime={partition['DefaultTime']} in {name}",
                meaning="without --time a job ends so soon",
                advice=f"slurm.time, up to {partition.get('MaxTime', '?')}",
            )
        if partition.get("State", "UP") != "UP":
            yield Bite(
                setting=f"State={partition['State']} in {name}", meaning="jobs wait there", advice="another partition"
            )
    memory = settings.get("DefMemPerCPU") or settings.get("DefMemPerNode") or ""
    if memory.isdecimal() and memory != "0":
        what = "core" if settings.get("DefMemPerCPU") else "node"
        yield Bite(
            setting=f"DefMemPer{'CPU' if what == 'core' else 'Node'}={memory}",
            meaning=f"without --mem a job gets {memory} MiB per {what}, and is killed beyond it (SIGKILL, out of memory)",
            advice="slurm.mem=0 for all of the node's memory, or slurm.mem_per_gpu",
        )


def _login_limits(cluster: Cluster) -> Iterator[Bite]:
    spread = cluster.config.settings.get("PropagateResourceLimits") or "ALL"
    left_out = cluster.config.settings.get("PropagateResourceLimitsExcept", "")
    for name, value, least, unit in (
        ("MEMLOCK", cluster.memlock, resource.RLIM_INFINITY, " bytes"),
        ("NOFILE", cluster.open_files, FEW_FILES, " files"),
    ):
        travels = name in left_out.split(",") if spread == "NONE" else name in spread or spread == "ALL"
        few = value != resource.RLIM_INFINITY and (least == resource.RLIM_INFINITY or value < least)
        if spread != "NONE" and travels and name not in left_out and few:
            yield Bite(
                setting=f"PropagateResourceLimits={spread}",
                meaning=f"the limit {name}={value}{unit} of the shell that submits goes with the job"
                + (": InfiniBand needs it unlimited" if name == "MEMLOCK" else ": many loaders and ranks need more"),
                advice=f"ulimit -{'l' if name == 'MEMLOCK' else 'n'} before sbatch, or --propagate=NONE (slurm.extra.propagate)",
            )


def _accounting(cluster: Cluster) -> Iterator[Bite]:
    if cluster.config.settings.get("AccountingStorageType", "").endswith("/none"):
        age = cluster.config.settings.get("MinJobAge", "a while")
        yield Bite(
            setting="no accounting (sacct)",
            meaning=f"how a job ended is forgotten {age} after its end",
            advice="python -m hpc.status RUN_DIR keeps its own record",
        )


_RULES: tuple[Callable[[Cluster], Iterator[Bite]], ...] = (
    _requeue, _preemption, _ending, _request, _login_limits, _accounting,
)  # fmt: skip


# ---- the site file ---------------------------------------------------------------------------------------------------


def site_file(cluster: Cluster) -> str:
    """A configuration to start from ($HPC_SITE_CONFIG): what is known is set, the rest stands there as comments."""
    chosen = _partition(cluster)
    kinds = cluster.config.kinds_of(chosen["PartitionName"]) if chosen else []
    has_gpus = any(site.gpus(kind.gres) for kind in kinds)
    lines = [
        f"# Cluster {cluster.config.settings.get('ClusterName', '?')}, Slurm {cluster.config.version}:"
        " a start, written by hpc.doctor. Use it as",
        "# ~/.config/hpc/site.yaml, /etc/hpc/site.yaml, or the file that HPC_SITE_CONFIG names. All settings: hpc/schema.py",
        "slurm:",
    ]
    if chosen is not None:
        lines.append(f"  partition: '{chosen['PartitionName']}'")
        others = [one["PartitionName"] for one in cluster.config.partitions if one is not chosen]
        if others:
            lines[-1] += f"   # or {', '.join(others[:8])}"
        time = _time(chosen)
        if time is not None:
            lines.append(
                f"  time: '{time}'   # the site's own is {chosen.get('DefaultTime')}, the longest {chosen.get('MaxTime')}"
            )
    if not has_gpus:
        lines.append("  gpus_per_node: null   # no GPU was seen here")
    elif cluster.config.settings.get("SelectType", "select/cons_tres") == "select/cons_tres":
        lines.append("  gpu_request: gpus-per-node   # or gres, where the site refuses that form")
    else:
        lines.append("  gpu_request: gres")
    lines += [
        "  # account: NAME",
        f"  # mem: '0'   # all of a node's memory; cpus_per_gpu: {_cores(kinds)}",
        f"  # signal_lead_s: {SlurmConfig().signal_lead_s}   # the warning, so many seconds before the time limit",
        "  # setup: ['module load cuda']",
        "# launch:",
        "#   python: /shared/venv/bin/python",
    ]
    return "\n".join(lines) + "\n"


def _partition(cluster: Cluster) -> dict[str, str] | None:
    """The partition to start with: one that is up, with GPUs if there are any, the default one before others."""

    def worth(partition: dict[str, str]) -> tuple[bool, bool, bool, int]:
        kinds = cluster.config.kinds_of(partition["PartitionName"])
        nodes = sum(kind.nodes for kind in kinds if site.gpus(kind.gres))
        default = partition.get("Default") == "YES"
        return partition.get("State", "UP") == "UP", nodes > 0, default, nodes

    return max(cluster.config.partitions, key=worth, default=None)


def _time(partition: dict[str, str]) -> str | None:
    """A time limit to ask for where the default one is short: the longest, but a day at most."""
    default, longest = _minutes(partition.get("DefaultTime", "NONE")), _minutes(partition.get("MaxTime", "UNLIMITED"))
    if not default or default >= SHORT_DEFAULT_MIN:
        return None
    return partition["MaxTime"] if longest and longest <= 24 * 60 else _DAY


def _minutes(text: str) -> int:
    """A limit of a partition in minutes; 0 for none."""
    try:
        return slurm_minutes(text)
    except ValueError:
        return 0


def _cores(kinds: list[Partition]) -> str:
    for kind in kinds:
        counts = [int(item.rpartition(":")[2]) for item in site.gpus(kind.gres).split(",") if item]
        if counts and sum(counts) and kind.cpus_per_node.rstrip("+").isdecimal():
            return str(max(1, int(kind.cpus_per_node.rstrip("+")) // sum(counts)))
    return "8"
