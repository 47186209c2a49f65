"""What a cluster says of itself: `scontrol show config`, `scontrol show partition` and `sinfo`, as values."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hpc.errors import SlurmCommandError
from hpc.slurm import commands
from hpc.slurm.commands import Partition


@dataclass(frozen=True, kw_only=True)
class SiteConfig:
    """The cluster's configuration, in Slurm's words."""

    settings: dict[str, str]
    """As slurm.conf(5) names them; "(null)" is ""."""
    partitions: tuple[dict[str, str], ...]
    """The fields of `scontrol show partition`, "PartitionName" among them."""
    kinds: tuple[Partition, ...]
    """The kinds of nodes in each partition, as sinfo tells them."""
    srun_help: str = ""
    """What `srun --help` prints: plug-ins of the site add their options to it."""

    @property
    def version(self) -> str:
        return self.settings.get("SLURM_VERSION", "?")

    def seconds(self, name: str) -> int | None:
        """A setting such as "30 sec" or "0 min" in seconds; None when it is not given in numbers."""
        match = re.match(r"(\d+) *(sec|min)?\b", self.settings.get(name, ""))
        return int(match[1]) * (60 if match[2] == "min" else 1) if match else None

    def inside(self, name: str, key: str) -> str | None:
        """A value within a setting: of AuthInfo="socket=/run/m,cred_expire=5" cred_expire is "5"; None for none."""
        for item in self.settings.get(name, "").split(","):
            found, _, value = item.strip().partition("=")
            if found.lower() == key.lower():
                return value
        return None

    def kinds_of(self, partition: str) -> list[Partition]:
        return [kind for kind in self.kinds if kind.name == partition]


def ask() -> SiteConfig:
    """Ask this cluster.

    Raises:
        SlurmCommandError: scontrol or sinfo is missing, failed or gave no answer.
    """
    texts = []
    for words in (["show", "config"], ["show", "partition"]):
        answer = commands.ask("scontrol", words)
        if answer.returncode != 0:
            raise SlurmCommandError(f"scontrol {' '.join(words)}: {answer.complaint}")
        texts.append(answer.stdout)
    settings = parse_config(texts[0])
    if "SLURM_VERSION" not in settings:
        raise SlurmCommandError("scontrol show config printed no configuration; look at it yourself")
    try:
        srun_help = commands.ask("srun", ["--help"]).stdout
    except SlurmCommandError:
        srun_help = ""
    return SiteConfig(
        settings=settings,
        partitions=tuple(parse_partitions(texts[1])),
        kinds=tuple(commands.partitions()),
        srun_help=srun_help,
    )


def cluster_name() -> str:
    """Slurm's name of this cluster, as jobs find it in SLURM_CLUSTER_NAME; "" when it is not told.

    Raises:
        SlurmCommandError: scontrol is missing or gave no answer.
    """
    return parse_config(commands.ask("scontrol", ["show", "config"]).stdout).get("ClusterName", "")


def parse_config(text: str) -> dict[str, str]:
    """The settings of `scontrol show config`: one "Name = value" per line."""
    settings: dict[str, str] = {}
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        if equals and re.fullmatch(r"[A-Za-z_]+(\[\d+\])?", name.strip()):
            value = value.strip()
            settings.setdefault(name.strip(), "" if value.startswith("(null") else value)
    return settings


def parse_partitions(text: str) -> list[dict[str, str]]:
    """The partitions of `scontrol show partition`, on several lines each or (with -o) on one."""
    found: list[dict[str, str]] = []
    for name, value in re.findall(r"(?:^|(?<=\s))([A-Za-z]\w*)=(\S*)", text):
        if name == "PartitionName":
            found.append({})
        if found:
            found[-1].setdefault(name, "" if value == "(null)" else value)
    return found


def gpus(gres: str) -> str:
    """The GPUs in a node's generic resources, in short: "gpu:a100:4(S:0-1),nvme:1" gives "a100:4"; "" for none."""
    found = re.findall(r"(?:^|,)gpu:((?:[A-Za-z_][\w.+-]*:)?\d+)", re.sub(r"\([^)]*\)", "", gres))
    return ",".join(found)
