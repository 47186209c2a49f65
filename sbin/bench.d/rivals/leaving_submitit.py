"""The submitit rival of `sbin/bench leftovers`: leaving_submitit.py MINUTES NODELIST SCRIPT ARGUMENTS..., prints the job id."""

import runpy
import sys
from pathlib import Path

import submitit


class Leaving:
    def __init__(self, command: list[str]) -> None:
        self.command = command

    def __call__(self) -> None:
        submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
        sys.argv = self.command
        runpy.run_path(self.command[0], run_name="__main__")


if __name__ == "__main__":
    import leaving_submitit  # so that the job finds the class by the module's name

    minutes, nodelist, *command = sys.argv[1:]
    executor = submitit.SlurmExecutor(Path(command[-1]) / "submitit")
    more = {"no_requeue": True, "nodelist": nodelist}
    executor.update_parameters(
        nodes=2,
        ntasks_per_node=2,
        gpus_per_node=2,
        time=int(minutes),
        signal_delay_s=20,  # its own 90 s are more than the whole of a minute: no rank would come to its work
        additional_parameters=more,
    )
    print(executor.submit(leaving_submitit.Leaving(command)).job_id)
