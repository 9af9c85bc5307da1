"""Watches one split read: what its stages take, and so whether the worker is still worth waiting for.

A worker may slow down in the middle of a read (heat, somebody else's program). The guard is told every stage that
ended and asked at each boundary how many more chunks to give away, and whether to give up those that are out. It keeps
the newest times only, because that is what heat changes. Pure but for the clock it is given; the arithmetic is
services.mac.choose. Used by services.mac.read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

from services.mac.choose import Outlook, StageTimes, chunks_to_send, should_abandon
from services.mac.remote_span import TailRan

NEWEST = 2
"""Stages whose mean counts as the present pace."""
LATE = 1.25
"""Something that is late is expected to take so many times as long as it has taken already."""


class Guard:
    """One read's stage times. `prior`: what they were before, None when nothing is known."""

    def __init__(
        self, n_ubatches: int, tail_per_head: float, prior: StageTimes | None, clock: Callable[[], float]
    ) -> None:
        """tail_per_head: tail layers over head layers; with the time of heads it gives that of tails."""
        self._n_ubatches, self._prior, self._clock = n_ubatches, prior, clock
        self._tail_per_head = prior.tail_s / prior.head_s if prior and prior.head_s else tail_per_head
        self._heads: list[float] = []
        self._tails: deque[float] = deque(maxlen=NEWEST)
        self._workers: deque[float] = deque(maxlen=NEWEST)
        self._links: deque[float] = deque(maxlen=NEWEST)
        self._imports: deque[float] = deque(maxlen=NEWEST)
        self._sent_at: deque[float] = deque()
        self._busy_since = clock()
        """When the worker began what it does now, as far as we can tell."""

    # --- what happened

    def head_ran(self, seconds: float) -> None:
        self._heads.append(seconds)

    def tail_ran(self, seconds: float) -> None:
        self._tails.append(seconds)

    def asked_to_sync(self) -> None:
        """Rows of the mirror are on their way."""
        self._busy_since = self._clock()

    def sent(self) -> None:
        """A chunk left."""
        now = self._clock()
        if not self._sent_at:
            self._busy_since = now
        self._sent_at.append(now)

    def came_home(self, answer: TailRan, import_s: float) -> None:
        """The first of the chunks in flight is home."""
        self._workers.append(answer.worker_s)
        self._imports.append(import_s)
        self._links.append(max(0.0, answer.round_trip_s - answer.queue_s - answer.worker_s))
        done_at = self._sent_at.popleft() + answer.round_trip_s
        self._busy_since = min(self._clock(), max(done_at, self._sent_at[0]) if self._sent_at else done_at)

    # --- what follows

    def n_more(self, heads_left: int, n_ready: int) -> int:
        """How many further chunks to give the worker."""
        return chunks_to_send(self.outlook(heads_left, n_ready))

    def gives_up(self, heads_left: int, n_ready: int, n_redone: int, elapsed_s: float) -> bool:
        """Whether to give up what is in flight. elapsed_s: the host's working and waiting time in this read."""
        now = self.outlook(heads_left, n_ready)
        alone_s = self._n_ubatches * (_mean(self._heads, now.times.head_s) * (1 + self._tail_per_head))
        return should_abandon(replace(now, n_redone=n_redone, elapsed_s=elapsed_s, alone_s=alone_s))

    def outlook(self, heads_left: int, n_ready: int) -> Outlook:
        """The read as it stands; what is late stretches the worker's pace."""
        times = self.times()
        spent_s = self._clock() - self._busy_since
        expected_s = times.worker_s + times.link_s / 2 if self._sent_at else 0.0
        busy_s = expected_s - spent_s
        if busy_s < 0:
            busy_s = (LATE - 1) * spent_s
            if self._sent_at:
                times = replace(times, worker_s=max(times.worker_s, LATE * spent_s))
        return Outlook(times, heads_left, n_ready, len(self._sent_at), busy_s)

    def times(self) -> StageTimes:
        """The present pace; a worker not heard of counts as fast as the host."""
        prior = self._prior or StageTimes(0.0, 0.0, 0.0)
        head_s = _mean(self._heads[-NEWEST:], prior.head_s)
        tail_s = _mean(self._tails, head_s * self._tail_per_head)
        return StageTimes(
            head_s,
            tail_s,
            _mean(self._workers, prior.worker_s or tail_s),
            _mean(self._links, prior.link_s),
            _mean(self._imports, prior.import_s),
        )


def _mean(values: Iterable[float], default: float) -> float:
    found = list(values)
    return sum(found) / len(found) if found else default
