"""What the broker's metrics say: counts are added as they happen, gauges looked up now and then."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from common.metrics import PLACES, Metrics
from services.broker.journal import Journal
from services.broker.ledger import Held, Ledger
from services.broker.pushing import Pushing


class Tally:
    """The broker's series."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._seen: dict[str, int] = {}
        self._came_s: float | None = None
        """When the page that is being written came in; None: none is."""

    def opened(self, n_pages: int) -> None:
        """A conversation began; the journal had so many of its pages."""
        if n_pages:
            self._metrics.add("journal_recoveries_total")

    def released(self, n_groups: int) -> None:
        """The host freed so many groups."""
        self._metrics.add("held_released_groups_total", n_groups)

    @contextmanager
    def writing(self, came_s: float) -> Iterator[None]:
        """Inside, a page is being written that came in then, by the monotonic clock."""
        self._came_s = came_s
        self._look_at_lag()
        try:
            yield
        finally:
            self._came_s = None
            self._look_at_lag()

    def failed(self, cause: str) -> None:
        """Something was not kept, or not carried out."""
        self._metrics.add("journal_failures_total", cause=cause)

    def mismatched(self) -> None:
        """A page in the journal is not what was kept."""
        self._metrics.add("page_hash_mismatch_total")

    def quarantined(self) -> None:
        """A worker's answer was not what the host computes."""
        self._metrics.add("pages_quarantines_total")

    def look(self, ledger: Ledger, journal: Journal, workers: Sequence[Pushing]) -> None:
        """Look everything up that is a state."""
        pages, tokens = Counter[str](), Counter[str]()
        for held in ledger.open.values():
            here = _pages_by_place(held, workers)
            pages.update({where: n * len(held.form.layers) for where, n in here.items()})
            tokens.update({where: n * held.form.page_tokens for where, n in here.items()})
        for where in PLACES:
            self._metrics.set("held_pages", pages[where], where=where)
            self._metrics.set("held_tokens", tokens[where], where=where)
        for each in workers:
            first, end = each.groups_placed
            self._metrics.set("worker_groups", end - first, worker=str(each.worker))
            self._metrics.set("worker_pace_seconds", each.pace_s, worker=str(each.worker))
        self._look_at_lag()
        self._metrics.set("pages_quarantined", sum(each.quarantined for each in workers))
        self._metrics.set("journal_bytes", journal.n_bytes)
        self._grow("journal_dropped_files_total", journal.dropped_files)
        self._grow("journal_damaged_total", journal.damaged)
        self._grow("pages_pushed_total", sum(each.n_pushes for each in workers))
        self._grow("pages_repushed_total", sum(each.n_repushed for each in workers))
        self._grow("page_hash_mismatch_total", sum(each.n_mismatches for each in workers))

    def _grow(self, name: str, value: int) -> None:
        self._metrics.add(name, value - self._seen.get(name, 0))
        self._seen[name] = value

    def _look_at_lag(self) -> None:
        came_s = self._came_s
        self._metrics.set("journal_lag_seconds", 0.0 if came_s is None else time.monotonic() - came_s)


def _pages_by_place(held: Held, workers: Sequence[Pushing]) -> dict[str, int]:
    """Full pages, each of all layers, by where a copy is."""
    gp, first = held.form.group_pages, held.group_first * held.form.group_pages
    placed = [each.groups_placed for each in workers if each.conversation == held.number]
    return {
        "host": max(0, held.n_tokens // held.form.page_tokens - first),
        "journal": held.pages_kept,
        "journal_only": first,
        "worker": sum(end - begin for begin, end in placed) * gp,
    }
