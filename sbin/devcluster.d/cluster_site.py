"""Names, addresses and paths of one dev cluster: pure values, nothing is touched here.

Cluster number 0 is the one people use. HPC_DEVCLUSTER_NUMBER=1..9 names a second one beside it, with its own state
directory, bridge, subnet, ports, node names and device nodes, so that a test can break it without disturbing anybody.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

USERS = ("hpcuser", "hpcother")  # the first runs the jobs, the second proves that nobody else is touched
CPUS_PER_NODE = 8  # slurmd is told to believe it (config_overrides)
MEMORY_PER_NODE_MIB = 32000
GRACE_TIME_S = 20
KILL_WAIT_S = 5
SLURMD_TIMEOUT_S = 12
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class DevclusterError(Exception):
    """What was found, what was needed and the next move, on one line."""


@dataclass(frozen=True)
class Shape:
    """What `up` was asked for; kept in cluster.json from `up` to `down`."""

    nodes: int = 2
    gpus_per_node: int = 4
    proctrack: str = "linuxproc"
    accounting: bool = False
    epilog: bool = False

    def __str__(self) -> str:
        more = (" --accounting" if self.accounting else "") + (" --epilog" if self.epilog else "")
        return f"--nodes {self.nodes} --gpus-per-node {self.gpus_per_node} --proctrack {self.proctrack}{more}"

    def to_json(self) -> str:
        return json.dumps(asdict(self)) + "\n"


@dataclass(frozen=True)
class Site:
    """Where everything of cluster `number` lives on this machine."""

    number: int

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Site:
        text = environment.get("HPC_DEVCLUSTER_NUMBER", "0")
        if len(text) != 1 or text not in "0123456789":
            raise DevclusterError(f"HPC_DEVCLUSTER_NUMBER={text!r}: needs one digit; unset it for the usual cluster")
        return cls(int(text))

    @property
    def state(self) -> Path:
        return Path("/var/lib/hpc-devcluster" + (f"-{self.number}" if self.number else ""))

    @property
    def venv(self) -> Path:
        """The virtual environment of the jobs, one for all clusters of the machine."""
        return Site(0).state / "venv"

    @property
    def cluster_name(self) -> str:
        return f"hpcdev{self.number}"

    @property
    def bridge(self) -> str:
        return f"hpcdev{self.number}"

    @property
    def login_address(self) -> str:
        return f"10.213.{70 + self.number}.1"

    @property
    def slurmctld_port(self) -> int:
        return 27810 + 10 * self.number

    @property
    def slurmd_port(self) -> int:
        return self.slurmctld_port + 1

    @property
    def slurmdbd_port(self) -> int:
        return self.slurmctld_port + 2

    @property
    def slurm_conf(self) -> Path:
        return self.state / "etc" / "slurm.conf"

    @property
    def munge_socket(self) -> Path:
        return self.state / "munge" / "munge.socket.2"

    @property
    def device_prefix(self) -> str:
        return f"/dev/c{self.number}fakegpu" if self.number else "/dev/fakegpu"

    @property
    def node_prefix(self) -> str:
        return f"c{self.number}node" if self.number else "node"

    def node(self, index: int) -> Node:
        return Node(self, index)

    def nodes(self, shape: Shape) -> list[Node]:
        return [Node(self, index) for index in range(1, shape.nodes + 1)]

    def pid_file(self, daemon: str) -> Path:
        return self.state / "run" / f"{daemon}.pid"

    def log_file(self, daemon: str) -> Path:
        return self.state / "log" / f"{daemon}.log"

    def saved_shape(self) -> Shape | None:
        """What is up, or was when the machine or `up` was killed; None after `down`."""
        try:
            return Shape(**json.loads((self.state / "cluster.json").read_text()))
        except FileNotFoundError:
            return None


@dataclass(frozen=True)
class Node:
    """One node: a network namespace, a cable to the bridge, and a slurmd inside."""

    site: Site
    index: int

    @property
    def name(self) -> str:
        return f"{self.site.node_prefix}{self.index}"

    @property
    def address(self) -> str:
        return f"10.213.{70 + self.site.number}.{10 + self.index}"

    @property
    def namespace(self) -> str:
        return f"hpcdev-{self.name}"

    @property
    def namespace_path(self) -> Path:
        return Path("/run/netns") / self.namespace

    @property
    def cable(self) -> str:
        """The host's end of the cable; the node's end is eth0."""
        return f"hpcdev{self.site.number}-{self.index}"

    @property
    def daemon(self) -> str:
        return f"slurmd-{self.name}"


def slurm_conf(site: Site, shape: Shape, login_host: str) -> str:
    """The cluster as slurm.conf; short times everywhere, so that a requeue takes seconds."""
    state = site.state
    names = f"{site.node_prefix}[1-{shape.nodes}]"
    lines = [
        f"ClusterName={site.cluster_name}",
        f"SlurmctldHost={login_host}({site.login_address})",
        f"SlurmctldPort={site.slurmctld_port}",
        f"SlurmdPort={site.slurmd_port}",
        "SlurmUser=root",
        "AuthType=auth/munge",
        "CredType=cred/munge",
        f"AuthInfo=socket={site.munge_socket},cred_expire=5",  # a requeued job is eligible after this, not after 120 s
        f"StateSaveLocation={state}/slurmctld",
        f"SlurmdSpoolDir={state}/spool/%n",
        f"SlurmctldPidFile={state}/run/slurmctld.own.pid",
        f"SlurmdPidFile={state}/run/slurmd-%n.own.pid",
        f"SlurmctldLogFile={state}/log/slurmctld.log",
        f"SlurmdLogFile={state}/log/slurmd-%n.log",
        "SlurmdParameters=config_overrides",
        f"ProctrackType=proctrack/{shape.proctrack}",
        "TaskPlugin=task/none",
        "SwitchType=switch/none",
        "MpiDefault=none",
        "PropagateResourceLimits=NONE",  # the limits of who types sbatch say nothing about a node
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core_Memory",
        "DefMemPerCPU=2000",
        "GresTypes=gpu",
        "SchedulerType=sched/backfill",
        "SchedulerParameters=sched_interval=2,bf_interval=3,batch_sched_delay=0",
        f"KillWait={KILL_WAIT_S}",
        f"SlurmdTimeout={SLURMD_TIMEOUT_S}",
        "ReturnToService=2",
        "JobRequeue=1",
        "MinJobAge=900",  # `scontrol show job` still knows a job this long after its end
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",
        f"FirstJobId={_first_job_id(state)}",
        *([f"Epilog={site.slurm_conf.parent}/epilog.d/*"] if shape.epilog else []),
        *_accounting_lines(site, shape),
    ]
    for node in site.nodes(shape):
        lines.append(
            f"NodeName={node.name} NodeHostname={node.name} NodeAddr={node.address} CPUs={CPUS_PER_NODE} Boards=1 "
            f"SocketsPerBoard=1 CoresPerSocket={CPUS_PER_NODE} ThreadsPerCore=1 RealMemory={MEMORY_PER_NODE_MIB} "
            f"Gres=gpu:{shape.gpus_per_node} State=UNKNOWN"
        )
    common = f"Nodes={names} State=UP MaxTime=1-00:00:00 DefaultTime=00:30:00"
    lines.append(f"PartitionName=low {common} Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={GRACE_TIME_S}")
    lines.append(f"PartitionName=high {common} PriorityTier=10 PreemptMode=OFF")
    return "\n".join(lines) + "\n"


def _first_job_id(state: Path) -> int:
    """Job ids go on after `down` and `up`: people name directories by them."""
    try:
        return int((state / "first-job-id").read_text())
    except FileNotFoundError:
        return 1


def _accounting_lines(site: Site, shape: Shape) -> list[str]:
    if not shape.accounting:
        return ["AccountingStorageType=accounting_storage/none", "JobAcctGatherType=jobacct_gather/none"]
    return [
        "AccountingStorageType=accounting_storage/slurmdbd",
        f"AccountingStorageHost={site.login_address}",
        f"AccountingStoragePort={site.slurmdbd_port}",
        f"AccountingStoragePass={site.munge_socket}",  # not a password: the munge to use on the way to slurmdbd
        "AccountingStorageTRES=gres/gpu",
        "JobAcctGatherType=jobacct_gather/linux",
        "JobAcctGatherFrequency=5",
    ]


def gres_conf(site: Site, shape: Shape) -> str:
    names = f"{site.node_prefix}[1-{shape.nodes}]"
    return f"NodeName={names} Name=gpu File={site.device_prefix}[0-{shape.gpus_per_node - 1}]\n"


def cgroup_conf(unified: bool) -> str:
    """unified: the machine has cgroup v2 alone."""
    return "CgroupPlugin=autodetect\n" if unified else "CgroupPlugin=cgroup/v1\n"


def slurmdbd_conf(site: Site, login_host: str) -> str:
    return "\n".join(
        [
            "AuthType=auth/munge",
            f"AuthInfo=socket={site.munge_socket}",
            f"DbdHost={login_host}",
            f"DbdAddr={site.login_address}",
            f"DbdPort={site.slurmdbd_port}",
            "SlurmUser=root",
            f"LogFile={site.state}/log/slurmdbd.log",
            f"PidFile={site.state}/run/slurmdbd.own.pid",
            "StorageType=accounting_storage/mysql",
            "StorageHost=localhost",
            "StorageUser=root",
            "StorageLoc=slurm_acct",
            "",
        ]
    )
