"""The rank's heartbeat for its agent: which phase it is in, and each step as it is done."""

from hpc.beats import Heartbeat

__all__ = ["Heartbeat"]
