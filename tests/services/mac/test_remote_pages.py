"""Aim: of several workers that hold pages each is asked before any is waited for, and one that fails costs the others
nothing.

Method: HeldWorkers with ends that answer at once or never, and a clock that only their waiting moves.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from common.attention.partial import PartialAttention
from common.engine.kv_source import PageQuery, QueryRows
from common.errors import LinkDownError
from common.wire import held as h
from services.mac.remote_pages import ANSWER_S_FIRST, HeldGroups, HeldWorker, HeldWorkers
from services.mac.tally import Tally
from services.runtime.conversation import Received

SHAPE = (2, 3, 8)
"""Key/value heads, rows, elements."""


class Time:
    now = 0.0


class End:
    """A worker: answers each group with its own number as the maximum, from `first` on, or says nothing."""

    def __init__(self, time: Time, first: int = 0, *, answers: bool = True, sends: bool = True) -> None:
        self._time, self._first, self._answers, self._sends = time, first, answers, sends
        self.asked: deque[h.Attend] = deque()

    def send(self, message: h.Attend, *arrays: object, wait_s: float = 0.0) -> None:
        if not self._sends:
            raise LinkDownError("no bridge")
        assert self._time.now == 0.0, "all are asked before one is waited for"
        self.asked.append(message)

    def recv(self, timeout_s: float | None, *, hot_s: float = 0.0) -> Received | None:
        if not (self._answers and self.asked):
            self._time.now += timeout_s or 0.0
            return None
        asked = self.asked.popleft()
        groups = range(self._first + asked.group_first, self._first + asked.group_end)
        parts = [partial(group) for group in (groups if asked.per_group else groups[:1])]
        told = h.Attended(asked.epoch, asked.ticket, len(parts), 0, 0, *SHAPE, 1.0, 0.0, 1.0, 0.0, 1.0)
        frames = tuple(memoryview(np.stack([getattr(p, name) for p in parts])).cast("B") for name in "mlo")
        return Received(told, frames, b"", 1, 1)

    def losses(self) -> int:
        return 0

    def close(self) -> None:
        pass


def partial(group: int) -> PartialAttention:
    m = np.full(SHAPE[:2], group, np.float32)
    return PartialAttention(m, np.ones_like(m), np.full(SHAPE, group, np.float32))


@pytest.mark.parametrize("failing", [{"answers": False}, {"sends": False}])
def test_one_that_fails_costs_the_others_nothing(failing):
    time, erred, here = Time(), [], []
    ends = [End(time, 0, **failing), End(time, 2)]
    workers = [HeldWorker(number, end) for number, end in enumerate(ends)]

    def attend_here(query: PageQuery, groups: range) -> list[PartialAttention]:
        here.extend(groups)
        return [partial(group) for group in groups]

    tally = Tally()
    held = HeldWorkers(
        workers, attend_here, tally, lambda *what: erred.append(what[0]), 0, clock=lambda: time.now
    )
    held.take(h.Placed(1, 0, 5, 0, 2))
    held.take(h.Placed(1, 1, 6, 2, 5))
    source = HeldGroups(6, held)
    source.start_attend(PageQuery(0, np.zeros(SHAPE, np.float32), 1.0, QueryRows(10_000, 1, SHAPE[1])))
    parts = list(source.wait_attend())
    assert [int(part.m[0, 0]) for part in parts] == [0, 1, 2, 3, 4, 5], "oldest first, whoever answered"
    assert (sorted(here), erred) == ([0, 1, 5], [0])
    assert time.now == pytest.approx(0.0 if "sends" in failing else ANSWER_S_FIRST)
    assert held.n_placed(6) == 3, "the other one is asked again"


def test_answers_that_nobody_awaited_do_not_stay():
    """As when a page is lost between question and answer: the sequence is given up."""
    time = Time()
    worker = HeldWorker(0, End(time))
    worker.take(h.Placed(1, 0, 5, 0, 2))
    query = PageQuery(0, np.zeros(SHAPE, np.float32), 1.0, QueryRows(10_000, 1, SHAPE[1]))
    for ticket in (1, 2):
        worker.ask(ticket, query, range(2), True)
    worker.answer(2, 1.0, lambda: time.now)
    assert worker._answers.keys() == {1}
    worker.limit(2)
    assert not worker._answers and not worker._frames and not worker._waiting
    assert worker.placed == range(2)
