"""What runs in every worker: the training core. Knows nothing of Slurm."""
