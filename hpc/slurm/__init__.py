"""Slurm as text and commands: host lists, job states, and the only place that runs its programs."""
