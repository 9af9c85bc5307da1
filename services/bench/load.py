"""How much of the machine others used while something was measured: a figure from a busy machine is worth little.

Counts processor time of the whole system and of our own processes; the rest belongs to others (on a virtual machine
also to the hypervisor). Used by services.bench.split.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

import psutil

BUSY_SHARE = 0.05
"""Above this share of the cores the reader is told that the machine was not quiet."""


class LoadMeter:
    """Measures from its making until `others_share` is asked for."""

    def __init__(self, pids: Iterable[int]) -> None:
        """pids: our child processes; this process is ours too."""
        self._pids = [*pids, os.getpid()]
        self._started_s = time.monotonic()
        self._busy_s, self._ours_s = _busy_s(), self._own_s()

    def others_share(self) -> float:
        """Share of all cores' time that was not idle and not ours, 0 to 1."""
        elapsed_s = (time.monotonic() - self._started_s) * (os.cpu_count() or 1)
        others_s = (_busy_s() - self._busy_s) - (self._own_s() - self._ours_s)
        return min(1.0, max(0.0, others_s / elapsed_s)) if elapsed_s > 0 else 0.0

    def _own_s(self) -> float:
        total_s = 0.0
        for pid in self._pids:
            try:
                times = psutil.Process(pid).cpu_times()
            except psutil.NoSuchProcess:
                continue
            total_s += times.user + times.system
            total_s += getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
        return total_s


def _busy_s() -> float:
    """Processor seconds of the whole system since it started, waiting and idling left out."""
    times = psutil.cpu_times()
    return sum(times) - sum(getattr(times, name, 0.0) for name in ("idle", "iowait", "guest", "guest_nice"))
