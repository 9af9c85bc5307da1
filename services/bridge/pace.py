"""How long a worker's answers about pages take: its work, and the way there and back. Pure; used by page_errands.

Both are kept apart because the way costs the same for one group as for twenty.
"""

from __future__ import annotations

from common.wire.held import PagesPaced

NEWEST = 0.05
"""Weight of the newest answer."""


class Pace:
    """Averages over the newest answers; 0: there was none."""

    def __init__(self) -> None:
        self._wait_s = self._row_s = 0.0
        self._n_rows = 0

    def took(self, seconds: float, work_s: float, n_groups: int, n_rows: int) -> None:
        """An answer for n_groups groups and n_rows rows took so long, of which the worker says it worked work_s."""
        work_s = min(work_s, seconds)
        row_s = work_s / (max(1, n_groups) * n_rows)
        weight = NEWEST if self._n_rows else 1.0
        self._wait_s += weight * (seconds - work_s - self._wait_s)
        self._row_s += weight * (row_s - self._row_s)
        self._n_rows = n_rows

    def told(self) -> PagesPaced | None:
        """For the broker."""
        return PagesPaced(self._wait_s, self._row_s, self._n_rows) if self._n_rows else None
