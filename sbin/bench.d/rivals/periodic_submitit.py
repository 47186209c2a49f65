"""The same training as a Checkpointable of submitit: told to go, it saves and comes back through the queue. Submits itself."""

import os

import submitit


class Training:
    """A job as submitit's documentation shows it."""

    def __call__(self) -> None:
        submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
        import periodic

        start = f"{os.environ['SLURM_JOB_ID']}-{os.environ.get('SLURM_RESTART_COUNT', '0')}"
        self.trainer = periodic.Trainer(start)
        self.trainer.train()

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """Called in rank 0's signal handler."""
        self.trainer.save()
        return submitit.helpers.DelayedSubmission(Training())


if __name__ == "__main__":
    import periodic_submitit  # so that the pickle names this module, and not __main__

    executor = submitit.SlurmExecutor(os.environ["BENCH_FOLDER"] + "/submitit")
    ranks = int(os.environ["BENCH_RANKS"])
    executor.update_parameters(
        nodes=1, ntasks_per_node=ranks, gpus_per_node=ranks, time=60, srun_args=["--kill-on-bad-exit=1"],
        additional_parameters={"requeue": True, "wckey": ""},
    )  # fmt: skip
    print(executor.submit(periodic_submitit.Training()).job_id)
