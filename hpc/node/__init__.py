"""What runs once per Slurm task: the agent that owns this task's workers."""
