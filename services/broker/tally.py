"""What the broker's metrics say: counts are added as they happen, gauges looked up now and then."""

from __future__ import annotations

import time
from collections.abc import Sequence

from common.metrics import Metrics
from services.broker.journal import Journal
from services.broker.ledger import Ledger
from services.broker.pushing import Pushing


class Tally:
    """The broker's series."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._seen: dict[str, int] = {}

    def opened(self, n_pages: int) -> None:
        """A conversation began; the journal had so many of its pages."""
        if n_pages:
            self._metrics.add("journal_recoveries_total")

    def released(self, n_groups: int) -> None:
        """The host freed so many groups."""
        self._metrics.add("held_released_groups_total", n_groups)

    def lag(self, began_s: float | None) -> None:
        """A page waits for the disk since then; None: none does."""
        self._metrics.set("journal_lag_seconds", time.monotonic() - began_s if began_s else 0.0)

    def look(self, ledger: Ledger, journal: Journal, workers: Sequence[Pushing]) -> None:
        """Look everything up that is a state."""
        host = kept = released = 0
        for held in ledger.open.values():
            n_layers, first = len(held.form.layers), held.group_first * held.form.group_pages
            host += max(0, held.n_tokens // held.form.page_tokens - first) * n_layers
            kept += len(held.places)
            released += first * n_layers
        placed = 0
        for each in workers:
            if (served := ledger.open.get(each.conversation)) is not None:
                first, end = each.groups_placed
                placed += (end - first) * served.form.group_pages * len(served.form.layers)
        for where, n in (("host", host), ("journal", kept), ("journal_only", released), ("worker", placed)):
            self._metrics.set("held_pages", n, where=where)
        self._metrics.set("journal_bytes", journal.n_bytes)
        self._grow("journal_dropped_files_total", journal.dropped_files)
        self._grow("journal_damaged_total", journal.damaged)
        self._grow("pages_pushed_total", sum(each.n_pushes for each in workers))
        self._grow("pages_repushed_total", sum(each.n_repushed for each in workers))
        self._grow("page_hash_mismatch_total", sum(each.n_mismatches for each in workers))

    def _grow(self, name: str, value: int) -> None:
        self._metrics.add(name, value - self._seen.get(name, 0))
        self._seen[name] = value
