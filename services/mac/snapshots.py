"""Snapshots: the recurrent states kept of one sequence, by grid point, within a number of bytes.

Each point has one state for every part of the sequence and counts once all are there. When room or the machine's memory
is short, points nobody asked for go first, then the oldest; a state that finds no memory is not kept, which costs a
later turn some reading and nothing else. Which points are wanted is decided by landmarks. Used by
services.mac.sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import psutil

from common.limits import MIB
from common.log import get_log
from common.state.recurrent import RecurrentSnapshot

MEMORY_LEFT_BYTES = 256 * MIB
"""No state is kept while the machine has less than this to spare."""

log = get_log()


def memory_free_bytes() -> int:
    """Bytes the machine can still give to programs."""
    return int(psutil.virtual_memory().available)


class Snapshots:
    """States of `n_parts` parts, together `bytes_each` a point, at most budget_bytes in all."""

    def __init__(
        self,
        n_parts: int,
        bytes_each: int,
        budget_bytes: int,
        memory_free: Callable[[], int] = memory_free_bytes,
    ) -> None:
        self.capacity = budget_bytes // bytes_each if bytes_each else 0
        self.wanted: frozenset[int] = frozenset()
        self._n_parts, self._bytes_each = n_parts, bytes_each
        self._memory_free = memory_free
        self._kept: dict[int, dict[int, RecurrentSnapshot]] = {}
        self._pinned = 0

    @property
    def n_bytes(self) -> int:
        """Bytes of all states kept."""
        return sum(snapshot.n_bytes for kept in self._kept.values() for snapshot in kept.values())

    @property
    def points(self) -> set[int]:
        """Points to which all parts can go back."""
        return {point for point, kept in self._kept.items() if len(kept) == self._n_parts}

    def at(self, point: int) -> dict[int, RecurrentSnapshot]:
        """The states at `point` by part. KeyError when none was kept."""
        return self._kept[point]

    def want(self, points: frozenset[int], pinned: int) -> None:
        """From now on these points are worth a state. `pinned` is what a failed read goes back to: never dropped."""
        self.wanted, self._pinned = points, pinned
        self._fit(self.capacity)

    def put(self, point: int, part: int, take: Callable[[], RecurrentSnapshot]) -> None:
        """Keep what `take` copies as the state of `part` at `point`, unless memory is short."""
        if self._memory_free() < MEMORY_LEFT_BYTES + self._bytes_each and point != self._pinned:
            self._shrink(point)
            return
        try:
            self._kept.setdefault(point, {})[part] = take()
        except MemoryError:
            self._shrink(point)
            if point == self._pinned:
                raise
        self._fit(self.capacity)

    def limit(self, point: int) -> None:
        """The sequence changed after `point`."""
        self._kept = {at: kept for at, kept in self._kept.items() if at <= point}

    def clear(self) -> None:
        """Forget all of them."""
        self._kept.clear()
        self.wanted, self._pinned = frozenset(), 0

    def shed(self) -> None:
        """Memory is short elsewhere: drop every state but the pinned one."""
        self._fit(0)

    def share(self, other: Snapshots) -> None:
        """Keep what `other` keeps (the states themselves are not copied), as far as there is room here."""
        self._kept = {at: dict(kept) for at, kept in other._kept.items()}
        self.want(other.wanted, other._pinned)

    def recut(self, bounds: Sequence[tuple[int, int]]) -> None:
        """The sequence has other parts now, layers [first, last) each: points that all parts had are kept."""
        self._kept = {point: _recut(list(self._kept[point].values()), bounds) for point in self.points}
        self._n_parts = len(bounds)

    def _shrink(self, point: int) -> None:
        """Memory is short: the state at hand is not kept, and half of the others go."""
        self._kept.pop(point, None)
        n_left = len(self._kept) // 2
        log.warning("memory is short, recurrent states are dropped", kept=n_left, dropped_at=point)
        self._fit(n_left)

    def _fit(self, n: int) -> None:
        droppable = sorted(
            self._kept.keys() - {self._pinned}, key=lambda point: (point in self.wanted, point)
        )
        for point in droppable[: max(0, len(self._kept) - n)]:
            del self._kept[point]


def _recut(whole: list[RecurrentSnapshot], bounds: Sequence[tuple[int, int]]) -> dict[int, RecurrentSnapshot]:
    """The states of one point, which together are those of all layers, by other parts."""
    conv = {layer: rows for snapshot in whole for layer, rows in snapshot.conv.items()}
    state = {layer: rows for snapshot in whole for layer, rows in snapshot.state.items()}
    n_valid = whole[0].n_valid
    return {
        part: RecurrentSnapshot(
            first,
            last,
            n_valid,
            {layer: rows for layer, rows in conv.items() if first <= layer < last},
            {layer: rows for layer, rows in state.items() if first <= layer < last},
        )
        for part, (first, last) in enumerate(bounds)
    }
