"""Aim: several sources are asked before any is awaited, and whoever computes in this process works while others do.
Method: sources that write down when they are asked and awaited, with partials whose fold depends on the order."""

from __future__ import annotations

import numpy as np

from common.attention.partial import PartialAttention, fold_all
from common.engine.kv_source import PageQuery, QueryRows, start_attend, wait_attend

ROWS = QueryRows(10, 1, 1)
QUERY = PageQuery(0, np.zeros((1, 1, 2), np.float32), 1.0, ROWS)


class Source:
    """Notes what happens to it."""

    def __init__(self, name: str, events: list[str], parts: list[PartialAttention]) -> None:
        self._name, self._events, self._parts = name, events, parts

    def start_attend(self, query: PageQuery) -> None:
        assert query is QUERY
        self._events.append(f"ask {self._name}")

    def wait_attend(self) -> list[PartialAttention]:
        self._events.append(f"await {self._name}")
        return self._parts


def part(seed: int) -> PartialAttention:
    rng = np.random.default_rng(seed)
    rows = [rng.normal(size=shape).astype(np.float32) for shape in ((1, 1), (1, 1), (1, 1, 2))]
    return PartialAttention(rows[0], np.abs(rows[1]) + 1, rows[2])


def test_own_pages_are_attended_while_others_answer_and_folded_last():
    parts, events = [part(seed) for seed in range(5)], []
    sources = [Source("old", events, parts[:2]), Source("none", events, []), Source("own", events, parts[2:])]
    start_attend(sources, QUERY)
    found, right = wait_attend(sources), fold_all(parts)
    assert events == ["ask old", "ask none", "ask own", "await own", "await none", "await old"]
    assert all(np.array_equal(getattr(found, name), getattr(right, name)) for name in "mlo")
