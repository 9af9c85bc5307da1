"""The one sequence the engine holds: its token ids, its canonical rows, the points it can go back to.

Undoing a failed read, reusing a prefix and starting anew are the same act here: `restore(point)`. Rows behind the
canonical end (an unfinished ubatch, everything decode wrote) are never reused. Knows spans and token ids, nothing of
the worker except that its mirror must forget what the sequence forgets. Used on the compute thread only.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.wire.rows import RowSection
from services.mac.grid import canonical_end, grid_floor, reuse_limit, reuse_point
from services.mac.mirror import Mirror

SNAPSHOTS_MAX = 4
"""Points with a kept recurrent state; the oldest goes first."""
NO_TOKENS: NDArray[np.int32] = np.empty(0, np.int32)


class HeldSequence:
    """Layer spans of one engine and what they hold. `parts` are the spans a read runs one after the other."""

    def __init__(self, engine: Any, split_layer: int = 0) -> None:
        """split_layer 0: the whole model is one part."""
        self._engine = engine
        self.spec, self.n_ctx = engine.spec, engine.n_ctx
        n_layer = engine.spec.n_layer_full
        self.whole = engine.span(0, n_layer)
        cuts = [0, split_layer, n_layer] if split_layer else [0, n_layer]
        self.parts = [engine.span(a, b) for a, b in itertools.pairwise(cuts)]
        self.has_recurrent = any(engine.spec.kind(layer) == "recurrent" for layer in range(n_layer))
        self.mirror: Mirror | None = None
        self._ids = NO_TOKENS
        self._snapshots: dict[int, dict[int, Any]] = {}
        self._keep: frozenset[int] = frozenset()

    @property
    def n_canonical(self) -> int:
        """Positions [0, n_canonical) hold what a cold read of the same ids would compute."""
        return min(canonical_end(len(self._ids)), grid_floor(self.whole.n_valid)) if len(self._ids) else 0

    def reusable(self, prompt: NDArray[np.int32]) -> int:
        """Where reading `prompt` i32 [n_tokens] would start: the tokens before that need not be read again."""
        restorable = self._restorable() if self.has_recurrent else None
        return reuse_point(self._ids[: self.n_canonical], prompt, restorable)

    def begin(self, prompt: NDArray[np.int32]) -> int:
        """Make ready to read `prompt` i32 [n_tokens]: keep what it shares, forget the rest. Returns where to start."""
        start = self.reusable(prompt)
        self.restore(start)
        self._ids = prompt
        self._keep = frozenset({canonical_end(len(prompt)), reuse_limit(len(prompt))} - {0})
        return start

    def restore(self, point: int) -> None:
        """Go back to `point`: 0, or one that `begin` returned for the sequence at hand."""
        if point and self.has_recurrent:
            for part, snapshot in self._snapshots[point].items():
                self.parts[part].restore(snapshot)
        else:
            self.whole.truncate(point)
        self._snapshots = {at: kept for at, kept in self._snapshots.items() if at <= point}
        if self.mirror is not None:
            self.mirror.limit(point)

    def decode(self, token_id: int, position: int) -> NDArray[np.float32]:
        """Run one generated token at `position`; returns its logits f32 [n_vocab]. Its rows are provisional."""
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
        return self.has_recurrent and position in self._keep

    def note(self, part: int, position: int) -> None:
        """Part `part` (an index of `parts`) now stands at `position`: keep its recurrent state if it is wanted."""
        if self.wants_state(position):
            self._snapshots.setdefault(position, {})[part] = self.parts[part].snapshot()
            for oldest in sorted(self._snapshots)[:-SNAPSHOTS_MAX]:
                del self._snapshots[oldest]

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
        self._ids, self._keep = other._ids, other._keep
        self._snapshots = {at: dict(kept) for at, kept in other._snapshots.items()}

    def forget(self) -> None:
        """Start from nothing, after an error that left the engine in an unknown place."""
        self._ids = NO_TOKENS
        self._snapshots.clear()
        self.restore(0)

    def _restorable(self) -> set[int]:
        return {at for at, kept in self._snapshots.items() if len(kept) == len(self.parts)}
