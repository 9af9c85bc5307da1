"""Aim: the broker's gauges say where copies are and what waits; its counters grow by what happened.

Method: a real ledger and a real registry; a worker that was granted room and took pages.
"""

from __future__ import annotations

import time
from pathlib import Path

from common.metrics import Metrics
from common.wire import held as h
from services.broker.journal import Journal
from services.broker.ledger import Ledger
from services.broker.pushing import Pushing
from services.broker.tally import Tally
from tests.services.broker.pages import FORM

N_PAGES = 6


def ledger_of_one() -> Ledger:
    """Six full pages of 64 tokens in two layers are kept; the host let go the first group of two pages."""
    ledger = Ledger()
    ledger.begin(1, FORM, 128, ())
    for page in range(N_PAGES):
        for layer in FORM.layers:
            ledger.kept(1, h.PagePlace(layer, page, "a.journal", 4096, 0))
    ledger.host_holds(1, 1, N_PAGES * FORM.page_tokens + 7)
    return ledger


def with_one_group(ledger: Ledger) -> Pushing:
    """A worker that holds the first group."""
    pushing = Pushing(0)
    pushing.up(h.PagesUp(1, "emulator", 1 << 30))
    (ask,) = pushing.serve(ledger.open[1])
    pushing.assign(0, 1)
    for push in pushing.granted(h.PagesGranted(ask.ticket, 2, 1, 1 << 30, 1 << 20, 0)):
        keys = (push.place.page + 1) * FORM.page_tokens
        pushing.pushed(h.PagePushed(push.ticket, 2, push.place.layer, keys, 0.001))
    return pushing


class Read:
    """A tally and what its registry says."""

    def __init__(self) -> None:
        self.metrics = Metrics("broker")
        self.tally = Tally(self.metrics)

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"outrigger_{name}", labels)


def test_pages_and_tokens_by_place(tmp_path: Path) -> None:
    read, ledger, journal = Read(), ledger_of_one(), Journal(tmp_path / "journal", 1 << 24)
    places = ("host", "journal", "journal_only", "worker")
    worker = with_one_group(ledger)
    read.tally.look(ledger, journal, [worker])
    assert [read.value("held_pages", where=where) for where in places] == [8, 12, 4, 4]
    assert [read.value("held_tokens", where=where) for where in places] == [256, 384, 128, 128]
    ledger.end(1)
    read.tally.look(ledger, journal, [worker])
    assert [read.value("held_pages", where=where) for where in places] == [0, 0, 0, 0]
    assert read.value("pages_pushed_total") == 4
    journal.close()


def test_the_journals_pages_are_the_ledgers_after_any_turn_of_events(tmp_path: Path) -> None:
    """An answer's pages come, are cut and kept anew as a read's; a release is begun and given up; a page is lost."""
    read, ledger, journal = Read(), ledger_of_one(), Journal(tmp_path / "journal", 1 << 24)
    held, (first, second) = ledger.open[1], FORM.layers
    keep = lambda layer, page: ledger.kept(1, h.PagePlace(layer, page, "b.journal", 8192, 1))  # noqa: E731
    events = (
        (lambda: keep(first, 6), 12),  # not of all layers yet
        (lambda: keep(second, 6), 14),
        (lambda: ledger.host_holds(1, 1, 7 * 64), 14),
        (lambda: ledger.prepare_release(1), 14),
        (lambda: ledger.abort_release(1), 14),
        (lambda: ledger.cut(1, 5 * 64 + 3), 10),  # an answer's rows are made canonical
        (lambda: keep(first, 5), 10),
        (lambda: ledger.lost(1, held.places[4, second]), 8),
        (lambda: keep(second, 5), 8),  # behind a gap
        (lambda: keep(second, 4), 12),
        (lambda: ledger.cut(1, 0), 0),
    )
    for event, n_pages in events:
        event()
        read.tally.look(ledger, journal, [])
        assert read.value("held_pages", where="journal") == n_pages == 2 * held.pages_kept
        assert read.value("held_tokens", where="journal") == 32 * n_pages
    journal.close()


def test_lag_is_how_long_ago_the_page_came_in(tmp_path: Path) -> None:
    read, journal = Read(), Journal(tmp_path / "journal", 1 << 24)
    with read.tally.writing(time.monotonic() - 30):
        assert read.value("journal_lag_seconds") >= 30
        read.tally.look(Ledger(), journal, [])
        assert read.value("journal_lag_seconds") >= 30
    assert read.value("journal_lag_seconds") == 0
    journal.close()


def test_failures_by_cause_and_quarantines(tmp_path: Path) -> None:
    read, journal, ledger = Read(), Journal(tmp_path / "journal", 1 << 24), ledger_of_one()
    for cause in ("disk_full", "a cause nobody declared"):
        read.tally.failed(cause)
    causes = ("disk_full", "other", "io")
    assert [read.value("journal_failures_total", cause=cause) for cause in causes] == [1, 1, 0]
    pushing = with_one_group(ledger)
    pushing.erred(h.WorkerErred(0, 2, "shadow", "other numbers", quarantine=True))
    read.tally.quarantined()
    read.tally.look(ledger, journal, [pushing])
    assert read.value("pages_quarantined") == 1 and read.value("pages_quarantines_total") == 1
    assert read.value("held_pages", where="worker") == 0
    journal.close()
