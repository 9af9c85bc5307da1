"""Aim: what `verify --held` says of the whole system counts every token, and a missing or other one is a problem.
Method: answers by hand; the comparison itself runs in `make verify`, on real processes."""

from __future__ import annotations

from common.engine.closeness import Closeness
from services.bench.verify_held import HeldTotals
from services.bench.verify_held_processes import MOMENTS, STRIKES, ProcessCounts


def test_equal_answers_are_counted():
    counts = ProcessCounts()
    counts.compare("one", (1, 2, 3), (1, 2, 3))
    assert (counts.compared, counts.equal, counts.problems) == (3, 3, [])


def test_another_or_missing_token_is_a_problem():
    counts = ProcessCounts()
    counts.compare("other", (1, 2, 3), (1, 7, 3))
    counts.compare("short", (1, 2, 3), (1, 2))
    counts.compare("long", (1, 2), (1, 2, 3))
    assert (counts.compared, counts.equal) == (9, 6)
    assert [text.partition(":")[0] for text in counts.problems] == ["other", "short", "long"]


def test_totals_fail_by_what_happened_to_the_whole_system():
    close = Closeness(compared=2, same_as_stock=2, stock_same=2)
    totals = HeldTotals(compared=4, equal=4, closeness=close)
    totals.processes.append(ProcessCounts(compared=2, equal=2))
    assert (totals.tokens_compared, totals.tokens_equal) == (2, 2)
    passed = totals.passed
    totals.processes.append(ProcessCounts(compared=2, equal=1, problems=["one differs"]))
    assert passed and not totals.passed and totals.problems == ["one differs"]


def test_each_process_of_the_host_and_the_worker_is_struck():
    assert {strike.process for strike in STRIKES} == {
        "worker",
        "worker-1",
        "bridge",
        "bridge-1",
        "broker",
        "mac",
    }
    assert len({strike.name for strike in STRIKES}) == len(STRIKES) and len(MOMENTS) == 2
