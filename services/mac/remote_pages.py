"""HeldGroups: the groups of pages that left the host's memory, as one source: workers first, the journal always.

Each worker that holds some of them is asked before anybody attends; whatever it does then (nothing, late, wrong, not
finite, of another life), the same groups are attended from the journal's files with the same kernels, so that the bits
are the same and the token comes. One group in `shadow_every` is computed on both sides and compared.
Used by holding.py, on the compute thread.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from common.attention.partial import PartialAttention
from common.engine.kv_source import PageQuery
from common.errors import LinkError, OutriggerError
from common.log import get_log
from common.wire import held as h
from services.mac.hold_channel import Asks

ANSWER_S_FIRST, ANSWER_S_MIN, ANSWER_S_MAX, LATE = 10.0, 0.25, 10.0, 8.0
"""A worker not timed yet has ANSWER_S_FIRST; then LATE times its pace, within the other two."""
HOT_S = 0.001
NEWEST = 0.2
"""Weight of the newest answer in a worker's pace."""
FROZEN_WITHIN = 1e-2
"""How far answers of frozen pages may be from ours (docs/frozen-pages.md), relative to the largest output."""

log = get_log()
Attend = Callable[[PageQuery, range], Iterable[PartialAttention]]
"""Attends whole groups here: one partial for each, when it is taken."""
Erred = Callable[[int, int, str, str, bool], None]
"""worker, epoch, cause, detail, quarantine"""


class Counts(Protocol):
    """What is counted of held groups."""

    def groups_attended(self, n: int, worker: int | None) -> None: ...
    def waited_for_pages(self, n_tokens: int, seconds: float, worker_s: float) -> None: ...
    def pages_fell_back(self, cause: str) -> None: ...
    def shadow_checked(self, outcome: str) -> None: ...
    def pages_recalled(self, n: int) -> None: ...
    def pages_waiting(self, n: int) -> None: ...


class HeldWorker:
    """One worker's end of route "attention", and the groups it was heard to hold."""

    def __init__(self, number: int, asker: Asks) -> None:
        self.number, self.asker = number, asker
        self.placed = range(0)
        self.epoch = 0
        self._first = 0
        self._answers: dict[int, h.Attended | h.AttendFailed] = {}
        self._frames: dict[int, tuple] = {}
        self._waiting: set[int] = set()
        self._losses = asker.losses()
        self._pace: dict[bool, float] = {}
        """Seconds a query row and group, by whether there are many rows."""

    def take(self, placed: h.Placed) -> None:
        """It holds these groups now."""
        self.epoch, self._first = placed.epoch, placed.group_first
        self._losses = self.asker.losses()
        self.placed = range(placed.group_first, placed.group_end)

    def limit(self, end: int) -> None:
        """Groups from `end` on are void. Called between steps: what was never awaited, nobody takes any more."""
        self.placed = range(self.placed.start, max(self.placed.start, min(self.placed.stop, end)))
        for left in (self._waiting, self._answers, self._frames):
            left.clear()

    def ask(self, ticket: int, query: PageQuery, groups: range, per_group: bool) -> float:
        """Send a query; returns the seconds it may take. Raises OutriggerError."""
        n_head, n_rows, head_dim = query.q.shape
        rows = np.array(query.q, order="C", copy=True)  # the asker's array changes before it may have left
        first, end = groups.start - self._first, groups.stop - self._first
        message = h.Attend(
            self.epoch,
            ticket,
            query.layer,
            query.rows.n_tokens,
            first,
            end,
            per_group,
            query.scale,
            n_head,
            n_rows,
            head_dim,
        )
        self.asker.send(message, rows, wait_s=0.0)
        self._waiting.add(ticket)
        pace = self._pace.get(query.rows.n_tokens > 1)
        if pace is None:
            return ANSWER_S_FIRST
        return min(ANSWER_S_MAX, max(ANSWER_S_MIN, LATE * pace * n_rows * len(groups)))

    def answer(self, ticket: int, until_s: float, clock: Callable[[], float]) -> tuple[h.Attended, tuple]:
        """The answer to a query, or LinkError. One that is there is taken, however long another was waited for."""
        while ticket not in self._answers:
            if self.asker.losses() != self._losses:
                self._losses = self.asker.losses()
                self._waiting.clear()
                raise LinkError("the bridge went away", cause="down")
            left_s = max(0.0, until_s - clock())
            received = self.asker.recv(min(left_s, 0.1), hot_s=min(left_s, HOT_S))
            if received is None and not left_s:
                self._waiting.discard(ticket)
                raise LinkError("no answer in time", cause="deadline")
            if received is not None and received.message.ticket in self._waiting:
                self._waiting.discard(received.message.ticket)
                self._answers[received.message.ticket] = received.message
                self._frames[received.message.ticket] = received.frames
        message, frames = self._answers.pop(ticket), self._frames.pop(ticket)
        if isinstance(message, h.AttendFailed):
            raise LinkError(message.detail, cause=message.cause)
        return message, frames

    def timed(self, query: PageQuery, n_groups: int, seconds: float) -> None:
        """An answer took so long."""
        many, pace = query.rows.n_tokens > 1, seconds / (query.rows.n_rows * n_groups)
        before = self._pace.get(many, pace)
        self._pace[many] = max(pace, before) if pace > before else before + NEWEST * (pace - before)


@dataclass
class _Asked:
    """A run of groups, who was asked for it (None: nobody), and until when."""

    groups: range
    worker: HeldWorker | None = None
    ticket: int = 0
    per_group: bool = True
    checked: range = range(0)
    started_s: float = 0.0
    until_s: float = 0.0


class HeldGroups:
    """A KvSource of the groups [0, n_groups). Made anew for each ubatch."""

    def __init__(self, n_groups: int, workers: HeldWorkers) -> None:
        self._n_groups, self._workers = n_groups, workers
        self._query: PageQuery | None = None
        self._asked: list[_Asked] = []

    def start_attend(self, query: PageQuery) -> None:
        """See KvSource."""
        self._query, self._asked = query, self._workers.ask(query, self._n_groups)

    def wait_attend(self) -> Iterator[PartialAttention]:
        """See KvSource; what is to be done here is done first. Raises as reading the journal does, of a lost page."""
        assert self._query is not None, "awaited before it was asked"
        runs, parts = self._asked, dict[int, Iterable[PartialAttention]]()
        for number in sorted(range(len(runs)), key=lambda number: runs[number].worker is not None):
            found = self._workers.parts(self._query, runs[number])
            parts[number] = found if len(runs) == 1 else list(found)
        for number in range(len(runs)):
            yield from parts[number]


class HeldWorkers:
    """All workers that may hold groups, and how the groups are attended without them."""

    def __init__(
        self,
        workers: list[HeldWorker],
        attend_here: Attend,
        counts: Counts,
        on_erred: Erred,
        shadow_every: int,
        clock: Callable[[], float] = time.monotonic,
        check_here: Callable[[int, int], None] = lambda _layer, _group: None,
    ) -> None:
        """shadow_every: one remote group in so many is computed here, too, and compared; 0: none.

        check_here: told layer and group before a worker is blamed; raises when it is our pages that are wrong.
        """
        self._check_here = check_here
        self._workers = {worker.number: worker for worker in workers}
        self._attend_here, self._counts, self._on_erred = attend_here, counts, on_erred
        self._shadow_every, self._clock = shadow_every, clock
        self._tickets = itertools.count(1)
        self._n_remote = 0

    def take(self, placed: h.Placed) -> None:
        """A worker holds other groups now."""
        if placed.worker in self._workers:
            self._workers[placed.worker].take(placed)

    def limit(self, n_groups: int) -> None:
        """Groups from n_groups on are void."""
        for worker in self._workers.values():
            worker.limit(n_groups)

    def leave(self) -> None:
        """Leave the bus."""
        for worker in self._workers.values():
            worker.asker.close()

    def n_placed(self, n_groups: int) -> int:
        """How many of the first n_groups some worker holds."""
        return sum(len(run.groups) for run in self._runs(n_groups) if run.worker)

    def ask(self, query: PageQuery, n_groups: int) -> list[_Asked]:
        """Ask every worker for its share; the runs of groups, oldest first."""
        runs = self._runs(n_groups)
        for asked in runs:
            worker = asked.worker
            if worker is None:
                continue
            asked.ticket, asked.started_s = next(self._tickets), self._clock()
            asked.checked = self._due(asked.groups)
            asked.per_group = asked.groups.start != 0 or bool(asked.checked)
            try:
                asked.until_s = asked.started_s + worker.ask(
                    asked.ticket, query, asked.groups, asked.per_group
                )
            except OutriggerError as error:
                self._lose(asked, "down", str(error))
        os.sched_yield()  # where every core computes, the bus's own thread would wait until this one has attended
        return runs

    def parts(self, query: PageQuery, asked: _Asked) -> Iterable[PartialAttention]:
        """The partials of a run: the worker's when they are good, else computed here."""
        worker = asked.worker
        if worker is not None:
            try:
                began_s = self._clock()
                message, frames = worker.answer(asked.ticket, asked.until_s, self._clock)
                waited_s, worker_s = self._clock() - began_s, message.total_ms / 1000
                self._counts.waited_for_pages(query.rows.n_tokens, waited_s, worker_s)
                parts = self._unpacked(query, asked, message, frames)
                worker.timed(query, len(asked.groups), message.round_trip_ms / 1000)
                self._shadow(query, asked, parts, frozen=message.n_keys_frozen > 0)
                self._counts.groups_attended(len(asked.groups), worker.number)
                return parts
            except LinkError as error:
                self._lose(asked, error.cause, str(error), quarantine=error.cause == "shadow")
        self._counts.groups_attended(len(asked.groups), None)
        return self._attend_here(query, asked.groups)

    def _runs(self, n_groups: int) -> list[_Asked]:
        runs, at = [], 0
        for worker in sorted(self._workers.values(), key=lambda worker: worker.placed.start):
            first, end = max(at, worker.placed.start), min(worker.placed.stop, n_groups)
            if first >= end:
                continue
            if first > at:
                runs.append(_Asked(range(at, first)))
            runs.append(_Asked(range(first, end), worker))
            at = end
        return [*runs, _Asked(range(at, n_groups))] if at < n_groups else runs

    def _due(self, groups: range) -> range:
        """Those of the groups whose turn it is to be computed twice."""
        before, self._n_remote = self._n_remote, self._n_remote + len(groups)
        if not self._shadow_every or before // self._shadow_every == self._n_remote // self._shadow_every:
            return range(0)
        first = groups.start + (self._shadow_every - 1 - before) % self._shadow_every
        return range(first, groups.stop, self._shadow_every)

    @staticmethod
    def _unpacked(
        query: PageQuery, asked: _Asked, message: h.Attended, frames: tuple
    ) -> list[PartialAttention]:
        """Raises LinkError for shapes or values that no answer has."""
        n_parts = len(asked.groups) if asked.per_group else 1
        shape = (n_parts, *query.q.shape)
        if (message.n_parts, message.n_head_kv, message.n_rows, message.head_dim) != shape:
            raise LinkError(f"an answer of another shape than {list(shape)}", cause="range")
        if message.epoch != (asked.worker.epoch if asked.worker else 0):
            raise LinkError("an answer of another life of the link", cause="stale_epoch")
        m, l, o = (np.frombuffer(frame, np.float32) for frame in frames)  # noqa: E741
        if not all(np.isfinite(values).all() for values in (m, l, o)) or not (l > 0).all():
            raise LinkError("an answer with values that are not finite", cause="nonfinite")
        m, l, o = m.reshape(shape[:-1]), l.reshape(shape[:-1]), o.reshape(shape)  # noqa: E741
        return [PartialAttention(m[i], l[i], o[i]) for i in range(n_parts)]

    def _shadow(
        self, query: PageQuery, asked: _Asked, parts: list[PartialAttention], *, frozen: bool
    ) -> None:
        """Compute the groups that are due here, too. Raises LinkError where they differ."""
        for group in asked.checked:
            (ours,) = self._attend_here(query, range(group, group + 1))
            theirs = parts[group - asked.groups.start]
            same = _close(ours, theirs) if frozen else _equal(ours, theirs)
            self._counts.shadow_checked("equal" if same else "breach")
            if not same:
                self._check_here(query.layer, group)
                raise LinkError(
                    f"group {group} of layer {query.layer} is not what we compute", cause="shadow"
                )

    def _lose(self, asked: _Asked, cause: str, detail: str, *, quarantine: bool = False) -> None:
        """The worker is not asked again before it is heard of anew."""
        worker, asked.worker = asked.worker, None
        assert worker is not None
        if worker.placed:
            log.warning(
                "held pages: worker failed, the journal answers",
                worker=worker.number,
                cause=cause,
                error=detail,
            )
            self._counts.pages_fell_back(cause)
            self._on_erred(worker.number, worker.epoch, cause, detail, quarantine)
        worker.placed = range(0)


def _equal(ours: PartialAttention, theirs: PartialAttention) -> bool:
    return all(np.array_equal(getattr(ours, name), getattr(theirs, name)) for name in "mlo")


def _close(ours: PartialAttention, theirs: PartialAttention) -> bool:
    (o, lse), (o_theirs, lse_theirs) = ours.normalised(), theirs.normalised()
    largest = float(np.abs(o).max()) or 1.0
    far_o, far_lse = np.abs(o - o_theirs).max() / largest, np.abs(lse - lse_theirs).max()
    return bool(far_o <= FROZEN_WITHIN and far_lse <= FROZEN_WITHIN)
