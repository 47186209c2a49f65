"""Run PyTorch training on Slurm: submit, start on every GPU, come back, leave nothing behind.

Where a line runs decides where it lives:

    hpc/login/       on the login node: `python -m hpc.submit`; never imports torch
    hpc/allocation/  in the batch step: the controller, `python -m hpc.launch`; never imports torch
    hpc/node/        one agent per Slurm task: `python -m hpc.node`
    hpc/train/       one worker per GPU: `python -m hpc.train`; knows nothing of Slurm
    hpc/slurm/       host lists, job states, Slurm's commands

The modules beside these rooms (errors, exitcodes, ranks, config, rundir) are the small values that they hand
to each other.
"""

__version__ = "0.1.0"
