"""LayerSpan: a contiguous range of layers as one function, rows in and rows or logits out.

All spans of a sequence are views: they share weights, K/V rows and recurrent states, and a layer counts its positions
whichever span ran it. One thread at a time. Used by services/mac (head and whole model) and device/worker (tail).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from common.errors import EngineError
from common.limits import KV_PAD_TOKENS
from common.state.recurrent import RecurrentSnapshot
from common.state.sequence import SequenceState
from common.wire.rows import RowSection

from .paged import PagedGraphs

if TYPE_CHECKING:
    from .engine import Engine

WantedLogits = Literal["none", "last", "all"]


class LayerSpan:
    """Layers [first, last) of an engine."""

    def __init__(self, engine: Engine, first: int, last: int, state: SequenceState) -> None:
        self.engine, self.first, self.last = engine, first, last
        self._layers = range(first, last)
        self._spec, self._state = engine.spec, state
        self._ends_model = last == self._spec.n_layer_full

    def __repr__(self) -> str:
        return f"LayerSpan [{self.first}, {self.last}) at {self.n_valid}"

    @property
    def n_valid(self) -> int:
        """Positions [0, n_valid) hold rows in every layer of the span."""
        return self._state.n_valid(self._layers)

    def run(self, rows: np.ndarray, position: int, logits: WantedLogits = "none") -> np.ndarray:
        """Runs one ubatch and keeps its rows and states.

        rows: token ids i32 [n_tokens] when the span begins the model, else residual f32 [n_tokens, n_embd].
        position: of the first row; must be n_valid of every layer of the span.
        Returns the residual f32 [n_tokens, n_embd]; for a span that ends the model, logits f32 [n_out, n_vocab] of no,
        the last or all rows (an empty array for none). Raises EngineError before anything is computed; if the backend
        itself fails, rows of this ubatch and all recurrent states of the span are void.
        """
        rows = self._checked_rows(rows)
        n_tokens, n_out = len(rows), self._n_out(logits, len(rows))
        end = position + n_tokens
        if position < 0 or end > self._state.n_ctx:
            raise EngineError(f"positions [{position}, {end}) do not fit a context of {self._state.n_ctx}")
        self._state.require_at(self._layers, position)
        n_kv = -(-end // KV_PAD_TOKENS) * KV_PAD_TOKENS
        try:
            shape = (self.first, self.last, n_tokens, n_out)
            result = self.engine.graphs.run(shape, rows, position, n_kv, self._state)
        except BaseException:
            self._state.lose(self._layers, position)
            raise
        self._state.advance(self._layers, end)
        return result

    def runs_pairs(self, position: int) -> bool:
        """Whether `run_pair` is for ubatches from `position` on."""
        graphs = self.engine.graphs
        return isinstance(graphs, PagedGraphs) and graphs.runs_pairs(position)

    def run_pair(self, rows: np.ndarray, position: int, logits: WantedLogits = "none") -> np.ndarray:
        """As run(), for two ubatches at once: n_ubatch rows and those behind them, staggered; the same bits.

        Returns the residual of all rows, or logits of the second ubatch. Raises EngineError, also where runs_pairs()
        says no. No snapshot can be taken between the two.
        """
        n_first = self.engine.n_ubatch
        first, second = self._checked_rows(rows[:n_first]), self._checked_rows(rows[n_first:])
        end, middle = position + len(rows), position + n_first
        graphs = self.engine.graphs
        if not isinstance(graphs, PagedGraphs) or not graphs.runs_pairs(position) or end > self._state.n_ctx:
            raise EngineError(f"positions [{position}, {end}) do not run as a pair of ubatches here")
        self._state.require_at(self._layers, position)
        n_kv = (-(-middle // KV_PAD_TOKENS) * KV_PAD_TOKENS, -(-end // KV_PAD_TOKENS) * KV_PAD_TOKENS)
        shapes = (
            (self.first, self.last, len(first), 0),
            (self.first, self.last, len(second), self._n_out(logits, len(second))),
        )
        try:
            results = graphs.run_pair(shapes, np.concatenate((first, second)), position, n_kv, self._state)
        except BaseException:
            self._state.lose(self._layers, position)
            raise
        self._state.advance(self._layers, end)
        return results[1] if self._ends_model else np.concatenate(results)

    def _checked_rows(self, rows: np.ndarray) -> np.ndarray:
        spec, n_ubatch = self._spec, self.engine.n_ubatch
        if self.first == 0:
            if rows.ndim != 1 or rows.dtype.kind not in "iu":
                raise EngineError(f"token ids are i32 [n_tokens], not {rows.dtype} {list(rows.shape)}")
            if rows.size and not (rows.min() >= 0 and rows.max() < spec.n_vocab):
                raise EngineError(
                    f"token ids {rows.min()} to {rows.max()}; the vocabulary has 0 to {spec.n_vocab - 1}"
                )
            rows = np.ascontiguousarray(rows, np.int32)
        else:
            if rows.ndim != 2 or rows.dtype != np.float32 or rows.shape[1] != spec.n_embd:
                raise EngineError(
                    f"residual is f32 [n_tokens, {spec.n_embd}], not {rows.dtype} {list(rows.shape)}"
                )
            rows = np.ascontiguousarray(rows)
        if not 1 <= len(rows) <= n_ubatch:
            raise EngineError(f"a ubatch has 1 to {n_ubatch} rows, not {len(rows)}")
        return rows

    def _n_out(self, logits: WantedLogits, n_tokens: int) -> int:
        if logits not in ("none", "last", "all"):
            raise EngineError(f"logits is {logits!r}; allowed are none, last and all")
        if logits != "none" and not (self._ends_model and self._spec.has_output):
            why = "the file has no output head" if self._ends_model else "it does not end the model"
            raise EngineError(f"layers [{self.first}, {self.last}) yield no logits: {why}")
        return {"none": 0, "last": 1, "all": n_tokens}[logits]

    def truncate(self, n: int) -> None:
        """Forgets positions from n on; recurrent layers can only go to 0 or stay (restore a snapshot instead)."""
        self._state.truncate(self._layers, n)

    def snapshot(self) -> RecurrentSnapshot:
        """A copy of the recurrent states of the span at n_valid."""
        return self._state.snapshot(self._layers)

    def restore(self, snapshot: RecurrentSnapshot) -> None:
        """Goes back to a snapshot of this span; K/V rows beyond it are forgotten."""
        self._state.restore(self._layers, snapshot)

    def export_rows(self, p0: int, p1: int, kv: bool = True, state: bool = True) -> list[RowSection]:
        """Copies of K/V rows [p0, p1) of the attention layers and of the recurrent layers' present states."""
        return self._state.export_rows(self._layers, p0, p1, kv=kv, state=state)

    def import_rows(self, sections: list[RowSection], n_valid_after: int) -> None:
        """Takes over rows and states another engine computed; everything is checked before the first is written."""
        self._state.import_rows(self._layers, sections, n_valid_after)
