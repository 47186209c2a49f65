"""What a recorded cluster says of itself (Slurm 22.05.8, sbin/devcluster), and the same with a setting changed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpc.config import load
from hpc.login import cluster
from hpc.login.cluster import Cluster
from hpc.slurm import commands, site

ROOT = Path(__file__).resolve().parent.parent
RECORDED = ROOT / "tests" / "fake_slurm" / "recorded"
CONFIG, PARTITIONS, SINFO = ((RECORDED / f"{name}.txt").read_text() for name in ("config", "partitions", "sinfo"))


def kind(name: str, nodes: int, gres: str, default: bool = False) -> commands.Partition:
    return commands.Partition(
        name=name, nodes=nodes, gres=gres, is_default=default, available="up", time_limit="infinite",
        cpus_per_node="64", memory_mib="512000", features="",
    )  # fmt: skip


def recorded(*changes: tuple[str, str], kinds: tuple[commands.Partition, ...] = (), **machine: int) -> Cluster:
    """The recorded cluster, in which each text was replaced by another."""
    config, partitions = CONFIG, PARTITIONS
    for old, new in changes:
        assert old in config + partitions, f"not recorded: {old}"
        config, partitions = config.replace(old, new), partitions.replace(old, new)
    settings = site.parse_config(config)
    found = tuple(site.parse_partitions(partitions))
    kinds = kinds or (kind("low", 2, "gpu:4", default=True), kind("high", 2, "gpu:4"))
    return Cluster(config=site.SiteConfig(settings=settings, partitions=found, kinds=kinds), **machine)


def test_the_recorded_answers_are_read_whole() -> None:
    found = recorded()
    settings = found.config.settings
    assert settings["SLURM_VERSION"] == "22.05.8" and settings["SlurmctldHost[0]"] == "head(10.0.0.1)"
    assert settings["PlugStackConfig"] == "" and settings["TaskPluginParam"] == ""
    assert found.config.seconds("KillWait") == 5 and found.config.seconds("OverTimeLimit") == 0
    assert found.config.seconds("PluginDir") is None and found.cred_expire_s == 5
    assert [part["PartitionName"] for part in found.config.partitions] == ["low", "high"]
    assert found.config.partitions[0]["GraceTime"] == "20" and found.config.partitions[1]["PreemptMode"] == "OFF"
    assert site.parse_partitions(PARTITIONS.replace("\n   ", " ")) == site.parse_partitions(PARTITIONS)
    assert cluster.partition_rows(found)[0] == (
        "low*", "UP", "2", "4", "64", "1-00:00:00", "00:30:00", "REQUEUE", "20 s"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("gres", "short"),
    [("gpu:4", "4"), ("gpu:a100:4(S:0-1),nvme:1", "a100:4"), ("craynetwork:4", ""), ("", ""), ("gpu:h100:4,gpu:l4:2", "h100:4,l4:2")],
)  # fmt: skip
def test_gpus_in_short(gres: str, short: str) -> None:
    assert site.gpus(gres) == short


AUTH = "AuthInfo                = socket=/var/lib/hpc-devcluster/munge/munge.socket.2,cred_expire=5"
BITES = [  # what the setting is called | what stands in the recorded cluster | what bites
    ("JobRequeue=0", "JobRequeue              = 1", "JobRequeue              = 0"),
    ("cred_expire=120", AUTH, "AuthInfo                = (null)"),
    ("cred_expire=300", "cred_expire=5", "cred_expire=300"),
    ("JobFileAppend=0", "JobFileAppend           = 1", "JobFileAppend           = 0"),
    ("PreemptMode=CANCEL in low", "PreemptMode=REQUEUE", "PreemptMode=CANCEL"),
    ("PreemptMode=SUSPEND in low", "PreemptMode=REQUEUE", "PreemptMode=GANG,SUSPEND"),
    ("GraceTime=0 in low", "GraceTime=20", "GraceTime=0"),
    ("preempt/qos", "preempt/partition_prio", "preempt/qos"),
    ("send_user_signal", "PreemptParameters       = send_user_signal\n", ""),
    ("KillWait=5", "KillWait                = 60 sec", "KillWait                = 5 sec"),
    ("proctrack/linuxproc", "proctrack/cgroup", "proctrack/linuxproc"),
    ("OverTimeLimit=5 min", "OverTimeLimit           = 0 min", "OverTimeLimit           = 5 min"),
    ("OverTimeLimit=UNLIMITED", "OverTimeLimit           = 0 min", "OverTimeLimit           = UNLIMITED"),
    ("SlurmdTimeout=300", "SlurmdTimeout           = 12 sec", "SlurmdTimeout           = 300 sec"),
    ("KillOnBadExit=0", "KillOnBadExit           = 1", "KillOnBadExit           = 0"),
    ("select/linear", "select/cons_tres", "select/linear"),
    ("EnforcePartLimits=NO", "EnforcePartLimits       = ALL", "EnforcePartLimits       = NO"),
    ("JobSubmitPlugins=lua", "JobSubmitPlugins        = (null)", "JobSubmitPlugins        = lua"),
    ("DefaultTime=00:30:00 in low", "DefaultTime=NONE", "DefaultTime=00:30:00"),
    ("State=DRAIN in low", "State=UP", "State=DRAIN"),
    ("DefMemPerCPU=2000", "DefMemPerCPU            = UNLIMITED", "DefMemPerCPU            = 2000"),
    ("sacct", "accounting_storage/slurmdbd", "accounting_storage/none"),
]
TAME = [  # the recorded cluster without what bites there
    ("JobFileAppend           = 0", "JobFileAppend           = 1"),
    ("PreemptMode             = REQUEUE", "PreemptMode             = REQUEUE\nPreemptParameters       = send_user_signal"),
    ("KillWait                = 5 sec", "KillWait                = 60 sec"),
    ("proctrack/linuxproc", "proctrack/cgroup"),
    ("KillOnBadExit           = 0", "KillOnBadExit           = 1"),
    ("EnforcePartLimits       = NO", "EnforcePartLimits       = ALL"),
    ("DefaultTime=00:30:00", "DefaultTime=NONE"),
    ("DefMemPerCPU            = 2000", "DefMemPerCPU            = UNLIMITED"),
    ("accounting_storage/none", "accounting_storage/slurmdbd"),
]  # fmt: skip


@pytest.mark.parametrize(("setting", "tame", "biting"), BITES, ids=[row[0] for row in BITES])
def test_a_setting_that_bites_is_named(setting: str, tame: str, biting: str) -> None:
    assert cluster.bites(recorded(*TAME)) == []
    found = cluster.bites(recorded(*TAME, (tame, biting)))
    assert any(setting in bite.setting for bite in found), found
    assert all(bite.meaning and bite.advice for bite in found)


def test_limits_of_the_shell_travel_only_where_the_site_lets_them() -> None:
    few = {"memlock": 65536, "open_files": 1024}
    travels = ("PropagateResourceLimits = NONE", "PropagateResourceLimits = ALL")
    said = [bite.meaning for bite in cluster.bites(recorded(*TAME, travels, **few))]
    assert len(said) == 2 and "MEMLOCK=65536" in said[0] and "NOFILE=1024" in said[1]
    assert not cluster.bites(recorded(*TAME, **few)) and not cluster.bites(recorded(*TAME, travels))
    except_one = ("PropagateResourceLimitsExcept = (null)", "PropagateResourceLimitsExcept = MEMLOCK")
    assert len(cluster.bites(recorded(*TAME, travels, except_one, **few))) == 1


SITES = {
    "recorded": (recorded(), {"partition": "low", "gpu_request": "gpus-per-node", "time": "1-00:00:00"}),
    "no GPU": (recorded(kinds=(kind("low", 4, ""), kind("high", 4, "nvme:1"))), {"gpus_per_node": None}),
    "GPUs elsewhere": (recorded(kinds=(kind("low", 4, ""), kind("high", 2, "gpu:a100:8"))), {"partition": "high"}),
    "s02 only gres": (recorded(("select/cons_tres", "select/linear")), {"gpu_request": "gres"}),
    "a week": (recorded(("MaxTime=1-00:00:00", "MaxTime=7-00:00:00")), {"time": "1-00:00:00"}),
    "an hour": (recorded(("MaxTime=1-00:00:00", "MaxTime=01:00:00")), {"time": "01:00:00"}),
    "no short default": (recorded(("DefaultTime=00:30:00", "DefaultTime=NONE")), {"time": None}),
    "odd name": (recorded(("PartitionName=low", "PartitionName=no"), kinds=(kind("no", 1, "gpu:1"),)), {"partition": "no"}),
}  # fmt: skip


@pytest.mark.parametrize("name", SITES)
def test_the_site_file_is_a_configuration(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, wanted = SITES[name]
    file = tmp_path / "site.yaml"
    file.write_text(cluster.site_file(found))
    monkeypatch.setenv("HPC_SITE_CONFIG", str(file))
    slurm = load(job="jobs.digits").config.slurm
    assert {key: getattr(slurm, key) for key in wanted} == wanted, file.read_text()


def doctor(tmp_path: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    answers = tmp_path / "answers"
    answers.mkdir(exist_ok=True)
    for name, text in (("scontrol_show.1", CONFIG), ("scontrol_show.2", PARTITIONS), ("sinfo", SINFO)):
        (answers / name).write_text(text)
    (tmp_path / "calls").unlink(missing_ok=True)
    env = {
        "PATH": f"{ROOT / 'tests' / 'fake_slurm' / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "FAKE_SLURM_ANSWERS": str(answers),
        "FAKE_SLURM_LOG": str(tmp_path / "calls"),
        **environ,
    }
    argv = [sys.executable, "-m", "hpc.doctor", *words]
    return subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)


def test_the_door_shows_the_cluster_and_writes_a_site_file_once(tmp_path: Path) -> None:
    done = doctor(tmp_path, "--site-file", "site.yaml")
    assert done.returncode == 0, done.stderr
    for line in (
        "Slurm                 22.05.8",
        "low*       UP     2      4 ",
        "- KillWait=5 s: ",
        "written: site.yaml",
    ):
        assert line in done.stdout, done.stdout
    before = (tmp_path / "site.yaml").read_text()
    assert "partition: 'low'" in before
    again = doctor(tmp_path, "--site-file", "site.yaml")
    assert again.returncode == 2 and "File exists" in again.stderr and (tmp_path / "site.yaml").read_text() == before


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"PATH": "/nonexistent"}, ("scontrol is in none of the 1 folders of PATH", "module load slurm")),
        (
            {"SLURM_CONF": "/nonexistent/slurm.conf"},
            ("SLURM_CONF=/nonexistent/slurm.conf: No such", "unset SLURM_CONF"),
        ),
        (
            {
                "FAKE_SCONTROL_SHOW_STDERR": "slurm_load_ctl_conf error: Unable to contact slurm controller (connect failure)"
            },
            ("controller gives no answer", "connect failure", "scontrol ping"),
        ),
    ],
)
def test_a_slurm_that_cannot_be_asked_is_one_line_with_the_next_move(
    tmp_path: Path, environ: dict[str, str], words: Sequence[str]
) -> None:
    done = doctor(tmp_path, **{"FAKE_SLURM_ANSWERS": "", "FAKE_SCONTROL_SHOW_EXIT": "1", **environ})
    assert done.returncode == 78 and done.stdout == "", done
    (line,) = done.stderr.splitlines()
    assert line.startswith("hpc.doctor: error: ") and all(word in line for word in words) and "needed" in line, line


@pytest.mark.parametrize(
    ("complaint", "words"),
    [
        ("scontrol: fatal: Could not establish a configuration source", ("finds no slurm.conf", "login node")),
        ("slurm_load_partitions: Zero Bytes were transmitted or received", ("gives no answer", "scontrol ping")),
        ("scontrol gave no answer within 30 s", ("gives no answer", "scontrol ping")),
        ("scontrol: error: Munge encode failed: Failed to access", ("cannot prove who you are", "munge -n")),
        ("scontrol cannot be run: Permission denied", ("Permission denied", "login node")),
        ("scontrol: something new", ("failed: scontrol: something new", "yourself")),
    ],
)
def test_what_a_slurm_that_cannot_be_asked_lacks(complaint: str, words: Sequence[str]) -> None:
    told = site.obstacle("scontrol", complaint, {"PATH": "/bin"})
    assert all(word in told for word in words) and "needed" in told, told
