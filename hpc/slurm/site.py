"""What a cluster says of itself: `scontrol show config`, `scontrol show partition` and `sinfo`, as values."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpc.errors import SlurmCommandError, SlurmUnreachable
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
        return seconds(self.settings, name)

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
        SlurmUnreachable: no Slurm can be asked from here: no programs, no slurm.conf, nobody answers.
        SlurmCommandError: the answer is no configuration.
    """
    _check_slurm_conf(os.environ)
    settings = parse_config(_answer("scontrol", ["show", "config"]))
    partitions = parse_partitions(_answer("scontrol", ["show", "partition"]))
    if "SLURM_VERSION" not in settings:
        raise SlurmCommandError("scontrol show config printed no configuration; look at it yourself")
    try:
        srun_help = commands.ask("srun", ["--help"]).stdout
    except SlurmCommandError:
        srun_help = ""
    try:
        kinds = tuple(commands.partitions())
    except SlurmCommandError as error:
        raise SlurmUnreachable(obstacle("sinfo", str(error), os.environ)) from None
    return SiteConfig(settings=settings, partitions=tuple(partitions), kinds=kinds, srun_help=srun_help)


def _answer(program: str, words: Sequence[str]) -> str:
    try:
        answer = commands.ask(program, words)
    except SlurmCommandError as error:
        raise SlurmUnreachable(obstacle(program, str(error), os.environ)) from None
    if answer.returncode != 0:
        raise SlurmUnreachable(obstacle(program, answer.complaint, os.environ))
    return answer.stdout


def _check_slurm_conf(environ: Mapping[str, str]) -> None:
    """Slurm's programs wait up to a minute for the file that SLURM_CONF names (seen with 22.05.8)."""
    named = environ.get("SLURM_CONF", "")
    try:
        if named:
            with open(named, "rb"):
                pass
    except OSError as error:
        raise SlurmUnreachable(
            f"SLURM_CONF={named}: {error.strerror}; the cluster's slurm.conf was needed: unset SLURM_CONF, or have it "
            f"name that file, as on the cluster's login nodes"
        ) from None


def obstacle(program: str, complaint: str, environ: Mapping[str, str]) -> str:
    """Why Slurm cannot be asked, by what its program (or the lack of it) says: found, needed, next move. Pure."""
    words = complaint if len(complaint) <= 300 else complaint[:297] + "..."
    if re.search(r"not on PATH|cannot be run", complaint):
        folders = len([one for one in environ.get("PATH", "").split(os.pathsep) if one])
        found = f"{program} is in none of the {folders} folders of PATH" if "not on" in complaint else complaint
        return (
            f"{found}; Slurm's client programs were needed: run this on the cluster's login node, or load its module "
            f"(module load slurm); without a cluster there is python -m hpc.submit --local"
        )
    if re.search(r"configuration source|fetch_config|slurm\.conf|DNS SRV|s_p_parse_file", complaint, re.IGNORECASE):
        return (
            f"{program} finds no slurm.conf ({words}); a machine of the cluster was needed: run this on its login node, "
            f"or have SLURM_CONF name the cluster's file"
        )
    if re.search(r"munge|authentication|credential", complaint, re.IGNORECASE):
        return (
            f"{program} cannot prove who you are ({words}); a munge daemon with the cluster's key was needed on this "
            f"machine: look with `munge -n | unmunge`, and tell the administrators"
        )
    if re.search(r"contact|connect|timed out|no answer|zero bytes", complaint, re.IGNORECASE):
        return (
            f"Slurm's controller gives no answer ({program}: {words}); a slurmctld that can be reached was needed: "
            f"`scontrol ping` tells whether it is down; try again later, or from another login node"
        )
    return f"{program} failed: {words}; the cluster's answer was needed: try `{program}` yourself, as your jobs would"


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


def seconds(settings: Mapping[str, str], name: str) -> int | None:
    """A setting such as "30 sec" or "0 min" in seconds; None when it is not given in numbers."""
    match = re.match(r"(\d+) *(sec|min)?\b", settings.get(name, ""))
    return int(match[1]) * (60 if match[2] == "min" else 1) if match else None


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
