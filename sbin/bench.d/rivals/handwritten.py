"""What people write by hand: `srun python handwritten.py`, one task per rank, torch's variables from Slurm's.

MASTER_ADDR and MASTER_PORT come from the batch script (`scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1`).
"""

import os

os.environ["RANK"] = os.environ["SLURM_PROCID"]
os.environ["LOCAL_RANK"] = os.environ["SLURM_LOCALID"]
os.environ["WORLD_SIZE"] = os.environ["SLURM_NTASKS"]

import first_step

first_step.main()
