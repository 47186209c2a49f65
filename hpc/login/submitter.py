"""The plan as a batch script, and its submission: the only place that knows submitit.

submitit writes the script's directives and frame. Its own command, a Python process that unpickles a callable on the
compute node, is replaced by one `exec` of the controller, so nothing is pickled at all.
"""

from __future__ import annotations

import shlex

import submitit

from hpc.login.plan import Plan

_SUBMITITS_OWN = {"job_name", "partition", "time", "nodes", "ntasks_per_node", "cpus_per_task", "gpus_per_node"} | {
    "qos", "mem", "mem_per_gpu", "mem_per_cpu", "constraint", "exclude", "account", "gres", "nodelist"
}  # fmt: skip
"""Directives that submitit has a parameter for; the others go through its additional_parameters."""


class BatchExecutor(submitit.SlurmExecutor):
    """submitit's executor for one plan."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan.run_dir, python=f"exec {shlex.quote(plan.argv[0])}")
        self.plan = plan
        directives = {key.replace("-", "_"): _for_sbatch(value) for key, value in plan.directives}
        own = {key: directives.pop(key) for key in _SUBMITITS_OWN & directives.keys()}
        self.update_parameters(
            **{"time": None, "wckey": None, **own},  # 5 minutes and a key "submitit", unless asked for
            setup=plan.setup_lines(),
            stderr_to_stdout=True,
            use_srun=False,
            additional_parameters={key.replace("_", "-"): value for key, value in directives.items()},
        )

    @classmethod
    def affinity(cls) -> int:
        """A script can be written where no Slurm is."""
        return 2

    @property
    def _submitit_command_str(self) -> str:
        return f"{self.python} {shlex.join(self.plan.argv[1:])}"


def render(plan: Plan) -> str:
    """The whole batch script, as sbatch will read it."""
    executor = BatchExecutor(plan)
    text: str = executor._make_submission_file_text(executor._submitit_command_str, "")
    return text


def _for_sbatch(value: str | None) -> str | bool:
    """A directive's value for submitit, which puts it in quotes as for a shell; sbatch takes "\\" as an escape there too.

    Seen with sbatch 22.05.8: every backslash in a #SBATCH line, also one within single quotes, escapes what follows.
    """
    return True if value is None else value.replace("\\", "\\\\")
