"""`outrigger worker`: the far end of the cable. The command itself lives with the process it starts."""

from device.worker import command

__all__ = ["command"]
