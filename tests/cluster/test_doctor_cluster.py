"""hpc.doctor on the real Slurm: what the cluster is, a sick node, and the path of a notice."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator

import pytest
from cluster_rig import FINAL_STATES, Rig


def doctor(rig: Rig, *words: str, **options: object) -> subprocess.CompletedProcess[str]:
    argv = [rig.python, "-m", "hpc.doctor", *words]
    return rig.run(argv, env={"HPC_SITE_CONFIG": ""}, **options)  # type: ignore[arg-type]


def test_the_cluster_is_what_it_is_and_its_site_file_is_taken(cluster: Rig) -> None:
    assert cluster.clone is not None
    site = cluster.clone / "site-of-doctor.yaml"
    done = doctor(cluster, "--site-file", str(site), check=True)
    version = re.sub("[^0-9.]", "", cluster.slurm("scontrol", "--version"))
    assert f" {version}\n" in done.stdout.splitlines(True)[0] and "\nlow*  " in done.stdout, done.stdout
    assert "GPUs of a node" in done.stdout and "send_user_signal" in done.stdout
    argv = [cluster.python, "-m", "hpc.submit", "--dry-run"]
    sent = cluster.run(argv, env={"HPC_SITE_CONFIG": str(site)}, check=True).stdout
    assert "#SBATCH --partition=low\n" in sent and "#SBATCH --time=1-00:00:00\n" in sent
    site.unlink()


@pytest.fixture
def sick(cluster: Rig) -> Iterator[str]:
    """The second node, with hardly any shared memory: seen by what its slurmd starts, and by nobody else."""
    node = cluster.node_names[1]
    inside = ["nsenter", f"--target={cluster.daemon(f'slurmd-{node}')}", "--mount"]
    subprocess.run([*inside, "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/dev/shm"], check=True)
    yield node
    subprocess.run([*inside, "umount", "--lazy", "/dev/shm"], check=True)


def test_x14_a_sick_node_is_named_left_out_by_the_requeue_and_by_the_next_submission(cluster: Rig, sick: str) -> None:
    well = cluster.node_names[0]
    words = [cluster.python, "-m", "hpc.doctor", "--allocation"]
    done = cluster.run(["salloc", "--quiet", "--nodes=2", "--gpus-per-node=1", *words], timeout=180)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"\n{sick}: /dev/shm has 1 MiB free, 32 MiB at least were needed\n" in done.stdout
    assert f"--exclude={sick}," in done.stdout and "all-reduce over all 2 ranks (gloo): " in done.stdout
    row = next(line.split() for line in done.stdout.splitlines() if line.startswith(f"{well} "))
    assert "-" not in row[:-1], done.stdout  # of one rank per node there is nothing to add up on a node

    busy = cluster.sbatch("--nodelist", well, "--exclusive", "--output=/dev/null", "--wrap", "sleep 300")
    cluster.wait_for_state(busy, "RUNNING")
    submit = [cluster.python, "-m", "hpc.submit", "--gpus-per-node", "1"]
    sent = cluster.run([*submit, "launch.preflight=full", "--", "hostname"], env={"HPC_SITE_CONFIG": ""}, check=True)
    job_id = cluster.track(re.findall(r"^job (\d+)", sent.stdout, re.MULTILINE)[0])
    deadline = time.monotonic() + 120
    while cluster.job(job_id)["Restarts"] == "0":
        assert time.monotonic() < deadline and cluster.state(job_id) not in FINAL_STATES, cluster.report(job_id)
        time.sleep(0.5)
    cluster.slurm("scancel", busy)
    assert cluster.wait(job_id) == "COMPLETED", cluster.report(job_id)
    job = cluster.job(job_id)
    assert (job["Restarts"], job["ExcNodeList"], job["NodeList"]) == ("1", sick, well)
    assert f"preflight: {sick}: /dev/shm has 1 MiB free" in cluster.output(job_id), cluster.report(job_id)

    held = [*submit, "slurm.extra.hold=true", "--", "hostname"]
    later = cluster.run(held, env={"HPC_SITE_CONFIG": ""}, check=True)
    later_id = cluster.track(re.findall(r"^job (\d+)", later.stdout, re.MULTILINE)[0])
    assert f"left out: {sick} (not fit" in later.stderr and cluster.job(later_id)["ExcNodeList"] == sick
    shown = doctor(cluster, "--failed-nodes", check=True).stdout
    assert re.search(rf"^{sick} +not fit +0.\d h ago +{job_id} ", shown, re.MULTILINE), shown


def test_signals_prove_the_path_of_a_notice(cluster: Rig) -> None:
    done = doctor(cluster, "--signals", "slurm.nodes=2", "slurm.gpus_per_node=2", "slurm.signal_lead_s=85", timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every one of 4 ranks heard SIGUSR2" in done.stdout and "all stopped at the same step" in done.stdout
    (job_id,) = re.findall(r"^job (\d+) sent", done.stdout, re.MULTILINE)
    cluster.track(job_id)
    assert cluster.job(job_id)["Restarts"] == "1" and cluster.wait(job_id) == "CANCELLED"
    (record,) = re.findall(r"sent, (.+);", done.stdout)
    events = [json.loads(line) for line in open(f"{record}/record.jsonl")]
    assert [event["reason"] for event in events if event["event"] == "stopping"][0] == "SIGUSR2"
