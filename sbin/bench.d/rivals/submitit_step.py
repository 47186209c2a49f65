"""The submitit rival: the callable that is pickled, and the srun line of the batch script that submitit writes.

`prepare` does inside an allocation what `executor.submit` does before it, so that the time from srun on can be taken.
"""

import shlex
from pathlib import Path

import submitit
from submitit.core.utils import DelayedSubmission


class FirstStep:
    """A job as submitit's documentation shows it: the environment of torch.distributed, then the training."""

    def __call__(self) -> None:
        submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
        import first_step

        first_step.main()


def prepare(folder: Path, job_id: str, python: str) -> list[str]:
    """Pickle the job where its tasks will look for it; the srun command line."""
    folder.mkdir()
    delayed = DelayedSubmission(FirstStep())
    delayed.set_timeout(20, 3)
    delayed.dump(folder / f"{job_id}_submitted.pkl")
    executor = submitit.SlurmExecutor(folder, python=python)
    script = executor._make_submission_file_text(executor._submitit_command_str, "unused")
    line = next(line for line in script.splitlines() if line.startswith("srun "))
    return shlex.split(line.replace("%j", job_id))
