"""Where the time of a read goes, ubatch by ubatch: a stopwatch that makes UbatchTimes.

All times are of one clock in one thread, except what the worker and the bridge report of themselves. Used by
services.mac.read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from common.wire.messages import UbatchTimes
from services.mac.grid import Ubatch
from services.mac.remote_span import TailRan


class ReadClock:
    """Collects the stages of one read. `restart` forgets them when the read is redone; elapsed time goes on."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._read_at_s = clock()
        self._entries: list[dict[str, Any]] = []
        self.wait_s = 0.0
        """Seconds of waiting for the worker, failed attempts included."""

    @property
    def elapsed_s(self) -> float:
        """Seconds since the read began, failed attempts included."""
        return self._clock() - self._read_at_s

    def restart(self) -> None:
        self._entries = []

    def stages(self) -> tuple[UbatchTimes, ...]:
        return tuple(UbatchTimes(**entry) for entry in self._entries)

    @contextmanager
    def head(self, ubatch: Ubatch) -> Iterator[None]:
        """Around the head layers of `ubatch`, or all layers when it runs on the host alone."""
        at_s = self.elapsed_s
        yield
        self._entries.append(
            {"position": ubatch.position, "n_tokens": ubatch.n_tokens, "head_at_s": at_s}
            | {"head_s": self.elapsed_s - at_s}
        )

    @contextmanager
    def taken_home(self, index: int, answer: TailRan) -> Iterator[None]:
        """Around the import of the worker's rows of ubatch `index`."""
        at_s = self.elapsed_s
        yield
        self._entries[index] |= {
            "worker_s": answer.worker_s,
            "round_trip_s": answer.round_trip_s,
            "ack_at_s": at_s,
            "import_s": self.elapsed_s - at_s,
        }

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait for the worker."""
        at_s = self.elapsed_s
        yield
        self.wait_s += self.elapsed_s - at_s

    @contextmanager
    def tail(self, index: int) -> Iterator[None]:
        """Around the tail layers of ubatch `index` on the host."""
        at_s = self.elapsed_s
        yield
        self._entries[index] |= {"tail_at_s": at_s, "tail_s": self.elapsed_s - at_s}
