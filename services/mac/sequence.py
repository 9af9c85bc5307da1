"""A sequence the engine holds: its token ids, its canonical rows, the points it can go back to.

Undoing a failed read, reusing a prefix and starting anew are the same act here: `restore(point)`. Rows behind the
canonical end (an unfinished ubatch, everything decode wrote) are never reused; `answered` and `advance_canonical` run
an answer's tokens again as a read would, after which its rows are canonical, too. Knows spans and token ids, nothing
of the worker except that its mirror must forget what the sequence forgets. Used on the compute thread only.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.limits import MIB, UBATCH_TOKENS
from common.log import get_log
from common.model.spec import ModelSpec
from common.wire.rows import RowSection
from services.mac.divergence import Divergence, find_divergence
from services.mac.grid import Ubatch, canonical_end, common_prefix, grid_floor, reuse_limit, reuse_point
from services.mac.holding import Holding, PagesLostError
from services.mac.landmarks import points_worth_keeping, turn_borders
from services.mac.mirror import Mirror
from services.mac.schedule import Offer
from services.mac.snapshots import Snapshots

SNAPSHOT_BYTES_MAX = 1024 * MIB
"""Kept recurrent states of a sequence, where the settings say nothing."""
READ_AGAIN_TOKENS_MAX = 8 * UBATCH_TOKENS
"""An answer is not made canonical when more than so many tokens of its prompt would have to be read again for it."""
log = get_log()
NO_TOKENS: NDArray[np.int32] = np.empty(0, np.int32)


class HeldSequence:
    """Layer spans of one engine and what they hold. `parts` are the spans a read runs one after the other."""

    def __init__(
        self, engine: Any, split_layer: int = 0, *, snapshot_bytes: int = SNAPSHOT_BYTES_MAX
    ) -> None:
        """split_layer 0, or behind the engine's last layer: its layers are one part.

        snapshot_bytes: cap of the kept recurrent states.
        """
        self._engine = engine
        self.spec, self.n_ctx = engine.spec, engine.n_ctx
        n_layer = engine.spec.layers.stop
        self.whole = engine.span(0, n_layer)
        self.parts = self._cut(split_layer)
        self.has_recurrent = any(engine.spec.kind(layer) == "recurrent" for layer in range(n_layer))
        self.mirror: Mirror | None = None
        self.snapshots = Snapshots(len(self.parts), state_bytes(engine.spec), snapshot_bytes)
        self.holding: Holding | None = None
        """Where its old pages go; None: all stay in memory."""
        self.diverged: Divergence | None = None
        """How the newest prompt parted from what was held before it."""
        self._ids = NO_TOKENS
        self._n_grid = 0
        """Tokens [0, _n_grid) of _ids are those a read has run, or is running, on the grid."""
        self._answer_end = 0
        """Where the canonical rows are to end once the answer has been run again; 0: there is none to run."""
        self._borders: frozenset[int] = frozenset()

    # --- what is at hand

    @property
    def n_canonical(self) -> int:
        """Positions [0, n_canonical) hold what a cold read of the same ids would compute."""
        return min(canonical_end(self._n_grid), grid_floor(self.whole.n_valid))

    @property
    def n_provisional(self) -> int:
        """Tokens, in whole ubatches of an answer, that are to be run again before their rows can be reused."""
        return max(0, self._answer_end - self.n_canonical)

    def reusable(self, prompt: NDArray[np.int32]) -> int:
        """Where reading `prompt` i32 [n_tokens] would start: the tokens before that need not be read again."""
        restorable = self._restorable() if self.has_recurrent else None
        return reuse_point(self._ids[: self.n_canonical], prompt, restorable)

    def offer(self, prompt: NDArray[np.int32]) -> Offer:
        """What reading `prompt` i32 [n_tokens] here would reuse, and what it would lose."""
        reused = self.reusable(prompt)
        return Offer(reused, self.n_canonical + self.n_provisional - reused)

    def _restorable(self) -> set[int]:
        """Grid points recurrent layers can go back to; where they stand is one, if it is canonical."""
        here = {part.n_valid for part in self.parts}
        return self.snapshots.points | (here & {self.n_canonical} if len(here) == 1 else set())

    @property
    def split_end(self) -> int | None:
        """Ubatches that end behind it are read by the host alone, and staggered; None: none are."""
        return self.holding.limit if self.holding is not None else self._engine_reads_by_pages_from()

    def _engine_reads_by_pages_from(self) -> int | None:
        decoding = getattr(self._engine, "decoding", None)
        return decoding.many_rows_from if decoding else None

    def runs_pair(self, first: Ubatch, second: Ubatch) -> bool:
        """Whether two ubatches may run staggered, so that nothing can be done between them."""
        if self.split_end is None or first.position < self.split_end or self.wants_state(first.end):
            return False
        if self.holding is not None and self.holding.pauses_at(first.end):
            return False
        return (
            first.n_tokens == UBATCH_TOKENS and second.n_tokens > 1 and self.whole.runs_pairs(first.position)
        )

    # --- reading

    def begin(self, prompt: NDArray[np.int32], turn_end_ids: Collection[int] = ()) -> int:
        """Make ready to read `prompt` i32 [n_tokens]: keep what it shares, forget the rest. Returns where to start.

        turn_end_ids: tokens that end a turn, so that states are kept where later prompts are likely to part.
        """
        start = self.reusable(prompt)
        held, n_rows = self._ids, self.n_canonical
        self.diverged = find_divergence(held, prompt, turn_end_ids, n_rows=n_rows, start=start)
        shared = common_prefix(held, prompt)
        borders = {border for border in self._borders if border <= shared}
        try:
            self.restore(start)
        except PagesLostError as error:
            log.warning("pages of the sequence are lost, it is read anew", error=str(error))
            self.forget()
            start, borders = 0, set()
        self._read(prompt, len(prompt), borders | {*turn_borders(prompt, turn_end_ids), len(prompt)})
        self._answer_end = 0
        return start

    def restore(self, point: int) -> None:
        """Go back to `point`: 0, or one that `begin` returned for the sequence at hand."""
        if self.holding is not None:
            self.holding.rewinds(point)
        if point and point in self.snapshots.points:
            for part, snapshot in self.snapshots.at(point).items():
                self.parts[part].restore(snapshot)
        else:
            self.whole.truncate(point)
        self.snapshots.limit(point)
        if self.mirror is not None:
            self.mirror.limit(point)

    def retreat(self, limit: int) -> int:
        """In the middle of a read, go back to the newest point <= limit that can be reached; returns it.

        From there the tokens at hand are going to be run on the grid again.
        """
        points = [point for point in self._restorable() if point <= limit]
        point = max(points, default=0) if self.has_recurrent else min(self.n_canonical, grid_floor(limit))
        self.restore(point)
        self._read(self._ids, self._n_grid, self._borders)
        return point

    def decode(self, token_id: int, position: int) -> NDArray[np.float32]:
        """Run one generated token at `position`; returns its logits f32 [n_vocab]. Its rows are provisional."""
        if self.holding is not None:
            self.holding.decoded(token_id, position)
        return self.whole.run(np.array([token_id], np.int32), position, logits="last")[-1]

    def take_tail_rows(self, sections: Sequence[RowSection], end: int, *, has_state: bool) -> None:
        """Take over the rows up to `end` that somebody else computed for the last part.

        Recurrent state comes with some of the answers only. Until it does, attention layers run ahead on their own,
        and the part as a whole stays where its recurrent layers are. Raises EngineError when rows do not fit.
        """
        tail = self.parts[-1]
        if has_state or not self.has_recurrent:
            tail.import_rows(list(sections), end)
            return
        by_layer: dict[int, list[RowSection]] = {}
        for section in sections:
            by_layer.setdefault(section.layer, []).append(section)
        for layer, rows in by_layer.items():
            self._engine.span(layer, layer + 1).import_rows(rows, end)

    def wants_state(self, position: int) -> bool:
        """Whether the recurrent state at `position` is one to keep."""
        return self.has_recurrent and position in self.snapshots.wanted

    def note(self, part: int, position: int) -> None:
        """Part `part` (an index of `parts`) now stands at `position`: keep its recurrent state if it is wanted."""
        if self.wants_state(position):
            self.snapshots.put(position, part, self.parts[part].snapshot)

    def resume(self, prompt: NDArray[np.int32]) -> None:
        """Where the journal has more of `prompt` i32 [n_tokens] than is at hand, go on from there."""
        holding = self.holding
        if holding is None or len(prompt) < holding.limit or self.reusable(prompt) >= holding.limit // 2:
            return
        n = holding.look_up(prompt, reuse_limit(len(prompt)))
        if n <= self.reusable(prompt):
            return
        self.whole.truncate(0)
        self.snapshots.clear()
        if self.mirror is not None:
            self.mirror.limit(0)
        try:
            holding.resume(prompt, n)
        except PagesLostError as error:
            log.warning("conversation is read anew", error=str(error))
            self.forget()
            return
        self._ids, self._n_grid, self._answer_end, self._borders = prompt[:n].copy(), n, 0, frozenset()

    # --- an answer

    def answered(self, generated: Iterable[int]) -> None:
        """The prompt that was read is followed by this answer, whose rows are to be made canonical in idle time."""
        answer = np.fromiter(generated, np.int32)
        if len(self._ids) != self._n_grid or not answer.size:
            return
        self._ids = np.concatenate([self._ids, answer])
        self._borders |= {len(self._ids)}
        self._answer_end = grid_floor(len(self._ids))

    def advance_canonical(self) -> None:
        """Run one ubatch of the answer again, as part of a read; call while n_provisional is not 0."""
        if self._n_grid != self._answer_end:
            self._begin_canonical()
        if not self.n_provisional:
            return
        position = self.whole.n_valid
        end = position + UBATCH_TOKENS
        self.whole.run(self._ids[position:end], position, logits="none")
        for part in range(len(self.parts)):
            self.note(part, end)

    def _begin_canonical(self) -> None:
        """Go back to where the canonical rows end, giving up what decode wrote."""
        n_canonical = self.n_canonical
        points = [point for point in self._restorable() if point <= n_canonical]
        start = max(points, default=0) if self.has_recurrent else n_canonical
        if n_canonical - start > READ_AGAIN_TOKENS_MAX:
            self._answer_end = 0  # its states were dropped: reading so much again is for whoever asks for it
            return
        self.restore(start)
        self._read(self._ids, self._answer_end, self._borders)

    # --- other sequences

    def adopt(self, other: HeldSequence) -> None:
        """Become what `other` (of the same engine) is now: rows and states are copied, snapshots shared."""
        self.forget()
        try:
            self.whole.import_rows(
                other.whole.export_rows(0, other.whole.n_valid, kv=True, state=True), other.whole.n_valid
            )
        except BaseException:
            self.forget()
            raise
        self._ids, self._n_grid, self._answer_end = other._ids, other._n_grid, other._answer_end
        self._borders = other._borders
        if self.holding is not None:
            self.holding.reads(self._ids)
        self.snapshots.share(other.snapshots)

    def recut(self, split_layer: int) -> None:
        """Cut the layers elsewhere from now on; rows and states stay. Between reads only."""
        self.parts = self._cut(split_layer)
        self.snapshots.recut([(part.first, part.last) for part in self.parts])
        self.mirror = None

    def forget(self) -> None:
        """Start from nothing, after an error that left the engine in an unknown place."""
        self._ids, self._n_grid, self._answer_end = NO_TOKENS, 0, 0
        self._borders = frozenset()
        self.snapshots.clear()
        self.restore(0)

    # --- inside

    def _cut(self, split_layer: int) -> list[Any]:
        n_layer = self.spec.layers.stop
        cuts = [0, split_layer, n_layer] if 0 < split_layer < n_layer else [0, n_layer]
        return [self._engine.span(a, b) for a, b in itertools.pairwise(cuts)]

    def _read(self, ids: NDArray[np.int32], n_grid: int, borders: Collection[int]) -> None:
        """From where the layers stand now, tokens up to n_grid are going to be run on the grid."""
        self._ids, self._n_grid, self._borders = ids, n_grid, frozenset(borders)
        if self.holding is not None:
            self.holding.reads(ids)
        if not self.has_recurrent:
            return
        start = self.whole.n_valid
        needed = {canonical_end(n_grid), reuse_limit(n_grid), start}
        # Points before the end of the prompt whose answer is run again stay wanted: it may be regenerated.
        needed |= {reuse_limit(border) for border in sorted(self._borders)[-2:] if border <= len(ids)}
        end = canonical_end(n_grid)
        capacity, pairs_from = self.snapshots.capacity, self.split_end
        if pairs_from is not None and not self.whole.runs_pairs(pairs_from):
            pairs_from = None
        wanted = points_worth_keeping(end, needed, self._borders, capacity, pairs_from)
        self.snapshots.want(wanted, start)
        if start and start not in self.snapshots.points:
            for part in range(len(self.parts)):
                self.snapshots.put(start, part, self.parts[part].snapshot)


def state_bytes(spec: ModelSpec) -> int:
    """Bytes of the recurrent states of all layers at one position; 0 without recurrent layers."""
    sizes = spec.recurrent
    if sizes is None:
        return 0
    n_layer = sum(kind == "recurrent" for kind in spec.kinds)
    conv = (sizes.d_conv - 1) * sizes.n_channels
    return 4 * n_layer * (conv + sizes.d_state * sizes.d_state * sizes.n_head_v)
