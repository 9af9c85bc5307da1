"""All workers that may hold pages: whose turn it is to hold which groups. Pure but for the clock that is handed in.

A worker that went away keeps its run for a moment, for it may come back with everything it held; after that its groups
are for the others. While the worker behind it is filled, a worker answers for what it still holds beyond its own run.
Called by broker.py, which does the saying.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence

from services.broker.ledger import Held
from services.broker.pushing import Pushing, Said
from services.broker.sharing import WorkerRoom, plan_shares

AWAY_S = 10.0
"""How long the run of a worker that went away is kept for it."""
MOVE_EVERY_S = 10.0
"""Between two moves of runs: a worker whose run begins elsewhere is filled anew."""


OLD_S = 30.0
"""After so long without a run a worker's pace is forgotten: who holds nothing is asked nothing, so it would be measured
never again, and be left out for good because of one busy moment."""


class Workers:
    """One Pushing a worker, in the order of their numbers."""

    def __init__(self, pushings: Sequence[Pushing], clock: Callable[[], float] = time.monotonic) -> None:
        self.pushings = pushings
        self._clock = clock
        self._up_at: dict[int, float] = {}
        self._ran_at: dict[int, float] = {}
        self._moved_at = float("-inf")

    def share(self, held: Held) -> Iterator[tuple[Pushing, list[Said]]]:
        """Have all work for this conversation, each with its run of groups. What is to be said to whose bridge."""
        for each in self.pushings:
            yield each, each.serve(held)
        there = [each for each in self.pushings if self._counts(each)]
        self._forget_old_paces(there)
        for each in self.pushings:
            if each not in there and each.has_run:
                yield each, each.assign(0, 0)
        n_rows = max((each.n_rows for each in there if each.has_run), default=0) or 1
        rooms = [
            WorkerRoom(
                each.worker,
                each.pace_s * n_rows,
                each.granted_tokens,
                each.group_first if each.has_run else None,
                each.wait_s,
            )
            for each in there
            if each.granted_tokens
        ]
        may_move = self._clock() - self._moved_at >= MOVE_EVERY_S
        by_worker = {each.worker: each for each in there}
        runs = []
        for share in plan_shares(held.groups_kept, rooms, held.form.group_tokens, may_move=may_move):
            each = by_worker[share.worker]
            if share.group_end > share.group_first:
                runs.append(each)
                if each.has_run and each.group_first != share.group_first:
                    self._moved_at = self._clock()
            yield each, each.assign(share.group_first, share.group_end)
        for each in self.pushings:
            each.relief = None
        for each, behind in itertools.pairwise(runs):
            each.relief = behind
        self.settle()

    def _forget_old_paces(self, there: Sequence[Pushing]) -> None:
        now = self._clock()
        for each in there:
            if each.has_run or not each.pace_s:
                self._ran_at[each.worker] = now
            elif now - self._ran_at.setdefault(each.worker, now) >= OLD_S:
                each.forget_pace()

    def settle(self) -> None:
        """Something happened: who answers beyond its run because the one behind it is not filled yet?"""
        for each in self.pushings:
            behind = each.relief
            each.answers_beyond = behind is not None and (
                not behind.epoch or behind.quarantined or (each.answers_beyond and not behind.is_filled)
            )

    def _counts(self, each: Pushing) -> bool:
        now = self._clock()
        if each.is_up:
            self._up_at[each.worker] = now
            return not each.quarantined
        return each.has_run and now - self._up_at.get(each.worker, float("-inf")) < AWAY_S
