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


class Lap:
    """How long a stage took; known when its `with` is over."""

    seconds = 0.0


class ReadClock:
    """Collects the stages of one read. `restart` forgets them when the read is redone; elapsed time goes on."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._read_at_s = clock()
        self._ended_at_s: float | None = None
        self._entries: list[dict[str, Any]] = []
        self.wait_s = 0.0
        """Seconds of waiting for the worker, failed attempts included."""
        self.work_s = 0.0
        """Seconds in which the host computed or took rows over, failed attempts included."""

    @property
    def elapsed_s(self) -> float:
        """Seconds since the read began, failed attempts included; up to its end, once it has ended."""
        return (self._clock() if self._ended_at_s is None else self._ended_at_s) - self._read_at_s

    def stop(self) -> None:
        """The read is over."""
        self._ended_at_s = self._clock()

    def restart(self) -> None:
        self._entries = []

    def stages(self) -> tuple[UbatchTimes, ...]:
        return tuple(UbatchTimes(**entry) for entry in self._entries)

    @contextmanager
    def head(self, ubatch: Ubatch) -> Iterator[Lap]:
        """Around the head layers of `ubatch`, or all layers when it runs on the host alone."""
        at_s = self.elapsed_s
        with self._working() as lap:
            yield lap
        self._entries.append(
            {"position": ubatch.position, "n_tokens": ubatch.n_tokens, "head_at_s": at_s}
            | {"head_s": lap.seconds}
        )

    def sent(self, index: int) -> None:
        """The residual of ubatch `index` leaves for the worker."""
        self._entries[index]["sent_at_s"] = self.elapsed_s

    def returned(self, index: int) -> None:
        """Ubatch `index` came back from the worker in vain: the host runs its tail."""
        for name in ("worker_s", "sent_at_s", "queue_s", "round_trip_s", "ack_at_s", "import_s"):
            self._entries[index].pop(name, None)

    @contextmanager
    def taken_home(self, index: int, answer: TailRan) -> Iterator[Lap]:
        """Around the import of the worker's rows of ubatch `index`."""
        at_s = self.elapsed_s
        with self._working() as lap:
            yield lap
        self._entries[index] |= {
            "worker_s": answer.worker_s,
            "queue_s": answer.queue_s,
            "round_trip_s": answer.round_trip_s,
            "ack_at_s": at_s,
            "import_s": lap.seconds,
        }

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait for the worker."""
        at_s = self.elapsed_s
        yield
        self.wait_s += self.elapsed_s - at_s

    @contextmanager
    def tail(self, index: int) -> Iterator[Lap]:
        """Around the tail layers of ubatch `index` on the host."""
        at_s = self.elapsed_s
        with self._working() as lap:
            yield lap
        self._entries[index] |= {"tail_at_s": at_s, "tail_s": lap.seconds}

    @contextmanager
    def _working(self) -> Iterator[Lap]:
        lap, at_s = Lap(), self.elapsed_s
        yield lap
        lap.seconds = self.elapsed_s - at_s
        self.work_s += lap.seconds
