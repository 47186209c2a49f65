"""What of an outer job's environment is handed on, and what is said about the rest."""

from hpc.login.inherited import without_outer_job


def test_outer_job_is_named_and_gone() -> None:
    found = without_outer_job({"SLURM_JOB_ID": "7", "SLURM_CONF": "/c", "HOME": "/h", "RANK": "1"}, keep_gpus=False)
    assert found.outer_job == "7" and found.environ == {"SLURM_CONF": "/c", "HOME": "/h"}
    assert found.dropped == ("RANK", "SLURM_JOB_ID") and found.warnings == ()


def test_gpus_of_the_outer_job_stay_for_a_local_run_only() -> None:
    inside = {"SLURM_JOB_ID": "7", "CUDA_VISIBLE_DEVICES": "2,3"}
    assert without_outer_job(inside, keep_gpus=True).environ == {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert without_outer_job(inside, keep_gpus=False).environ == {}
    outside = {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert without_outer_job(outside, keep_gpus=False).environ == outside


def test_settings_of_the_user_stay() -> None:
    kept = {
        "HPC_HOME": "/t",
        "HPC_PYTHON": "p",
        "HPC_SITE_CONFIG": "s",
        "SLURM_JWT": "j",
        "OMPI_MCA_btl": "tcp",
        "PMAP": "1",
    }
    assert without_outer_job({**kept, "HPC_CONFIG": "x", "PMIX_RANK": "0"}, keep_gpus=False).environ == kept


def test_hostile_sbatch_variables_stay_one_line_and_keep_their_secrets() -> None:
    noise = {"SBATCH_COMMENT": "a\nb\x1b[2J" + "x" * 500, "SBATCH_API_KEY": "s3cret", "SBATCH_\n": "y"}
    (line,) = without_outer_job(noise, keep_gpus=False).warnings
    assert line.isprintable() and "s3cret" not in line and len(line) < 400


def test_the_cluster_that_a_plain_sbatch_would_have_gone_to_is_named() -> None:
    """SLURM_CLUSTERS is no variable of an outer job: it says where the commands go. Source: sbatch(1), --clusters."""
    (line,) = without_outer_job({"SLURM_CLUSTERS": "c2", "SLURM_CLUSTER_NAME": "c1"}, keep_gpus=False).warnings
    assert line == "ignored from the environment: SLURM_CLUSTERS=c2 (use slurm.extra.clusters=)"
