"""What a process holds: descriptors, threads, memory. Two of these tell whether something leaked in between.

Bounds are absolute, because a leak by a fault shows as a number of faults, and an allocator keeps what it once had.
Used by services.bench.verify_faults.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import psutil

from common.limits import MIB

DESCRIPTORS_MORE_MAX, THREADS_MORE_MAX = 2, 2
MEMORY_MORE_BYTES_MAX = 96 * MIB
MEMORY_MORE_SHARE_MAX = 0.15
SETTLE_S_MAX = 10.0


@dataclass(frozen=True)
class Footprint:
    """One process at one moment."""

    n_descriptors: int
    n_threads: int
    rss_bytes: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        process = psutil.Process(pid)
        with process.oneshot():
            return cls(process.num_fds(), process.num_threads(), process.memory_info().rss)

    def grown_beyond(self, before: Footprint) -> list[str]:
        """What is more now than a process may keep; empty when all is well."""
        rss_max = before.rss_bytes + max(MEMORY_MORE_BYTES_MAX, int(MEMORY_MORE_SHARE_MAX * before.rss_bytes))
        found = []
        if self.n_descriptors > before.n_descriptors + DESCRIPTORS_MORE_MAX:
            found.append(f"{before.n_descriptors} descriptors became {self.n_descriptors}")
        if self.n_threads > before.n_threads + THREADS_MORE_MAX:
            found.append(f"{before.n_threads} threads became {self.n_threads}")
        if self.rss_bytes > rss_max:
            found.append(f"{before.rss_bytes // MIB} MiB became {self.rss_bytes // MIB} MiB")
        return found


def footprints(pids: Mapping[str, int]) -> dict[str, Footprint]:
    """The footprint of each named process. Raises psutil.NoSuchProcess when one ended."""
    return {name: Footprint.of(pid) for name, pid in pids.items()}


def leaks(
    before: Mapping[str, Footprint],
    look: Callable[[], Mapping[str, Footprint]],
    settle_s: float = SETTLE_S_MAX,
) -> list[str]:
    """What grew beyond its bound, once things had `settle_s` to settle; sentences, empty when nothing did."""
    until_s = time.monotonic() + settle_s
    while True:
        now = look()
        found = [
            f"{name}: {text}"
            for name, at_first in before.items()
            for text in now[name].grown_beyond(at_first)
        ]
        if not found or time.monotonic() > until_s:
            return found
        time.sleep(0.2)
