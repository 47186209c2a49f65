"""The submitit rival of `python -m hpc.submit`: import it, describe the job, submit a function."""

import sys

import submitit


def train() -> None:
    import first_step

    first_step.main()


if __name__ == "__main__":
    executor = submitit.SlurmExecutor(sys.argv[1])
    executor.update_parameters(
        nodes=2, ntasks_per_node=4, gpus_per_node=4, time=60, additional_parameters={"hold": True, "wckey": ""}
    )
    print(executor.submit(train).job_id)
