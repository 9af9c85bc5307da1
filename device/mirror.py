"""The tail layers and their mirror: everything a host may ask of them, on one sequence.

Each operation either succeeds or raises an OutriggerError with the mirror as before, or emptied where that could not
be kept; `n_valid` says which. Knows the engine and nothing of frames or sockets. Used by device.service on the compute
thread only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from common.errors import EngineError, LinkDownError, ModelError, NonFiniteError, PositionError
from common.limits import MIB, SNAPSHOTS_MAX
from common.wire.messages import ROWS_KV, ROWS_STATE, WANT_LOGITS, WANT_ROWS, WANT_STATE, WANT_TAPS
from common.wire.rows import KIND_V, RowSection

if TYPE_CHECKING:
    from common.engine.engine import Engine
    from common.engine.span import LayerSpan
    from common.state.recurrent import RecurrentSnapshot


SNAPSHOT_BYTES_MAX = 512 * MIB
"""Kept recurrent states, where the settings say nothing."""


@dataclass(frozen=True)
class TailRun:
    """What a chunk left: logits f32 [n_vocab] of its last row if wanted, and the rows and states that were wanted."""

    logits: np.ndarray | None
    sections: list[RowSection]


class TailMirror:
    """The last layers of a model from `first` on, and rows and states of positions [0, n_valid) for them."""

    def __init__(self, engine: Engine, snapshot_bytes: int = SNAPSHOT_BYTES_MAX) -> None:
        """snapshot_bytes: cap of the kept recurrent states; there are SNAPSHOTS_MAX of them at most."""
        self.engine = engine
        self._snapshot_bytes = snapshot_bytes
        self.spec = engine.spec
        self._span: LayerSpan | None = None
        self._snapshots: deque[RecurrentSnapshot] = deque()

    @property
    def span(self) -> LayerSpan:
        if self._span is None:
            raise PositionError("no host said yet which layers it wants")
        return self._span

    @property
    def n_valid(self) -> int:
        """Positions every layer has; 0 while nobody is attached."""
        return self._span.n_valid if self._span else 0

    @property
    def n_embd(self) -> int:
        return self.spec.n_embd

    @property
    def has_recurrent(self) -> bool:
        return any(self.spec.kind(layer) == "recurrent" for layer in range(self.span.first, self.span.last))

    # --- whose layers

    def attach(self, first: int) -> None:
        """Serve layers [first, n_layer_full) from now on, empty. Raises ModelError when the file does not hold them."""
        layers = self.spec.layers
        lowest = max(layers.start, 1)
        if not lowest <= first < layers.stop:
            raise ModelError(
                f"the host asks for the layers from {first} on, and this worker's {self.spec.arch} of "
                f"{self.spec.n_layer_full} layers can be run from any of layers {lowest} to {layers.stop - 1} on; "
                f"start the host with the same model and such a split layer, or the worker with "
                f"a tail file cut at layer {first} (outrigger split MODEL -L {first} TAIL)"
            )
        self.empty()
        self._span = self.engine.span(first, layers.stop)
        self.empty()

    def empty(self) -> None:
        """Forget the sequence and all snapshots."""
        self._snapshots.clear()
        if self._span:
            self._span.truncate(0)

    # --- the operations

    def run(
        self, residual: np.ndarray, position: int, want: int, gone: Callable[[], bool] = lambda: False
    ) -> TailRun:
        """Run the tail over residual f32 [n_tokens, n_embd] at `position`, which must be n_valid.

        gone is asked before each ubatch whether nobody wants it any more; then LinkDownError.
        """
        end = position + len(residual)
        self._check_chunk(residual, position, want)
        before = self.n_valid
        try:
            for begin, stop in _ubatches(position, end, self.engine.n_ubatch):
                if gone():
                    raise LinkDownError(
                        f"nobody waits for this chunk any more; its positions [{begin}, {end}) were not run"
                    )
                piece = residual[begin - position : stop - position]
                wants_logits = bool(want & WANT_LOGITS) and stop == end
                out = self.span.run(piece, begin, logits="last" if wants_logits else "none")
            sections = self.rows(position, end, _wanted_flags(want))
        except BaseException:
            if self.n_valid != before:
                self._undo(before)
            raise
        return TailRun(out[0] if want & WANT_LOGITS else None, sections)

    def rows(self, p0: int, p1: int, flags: int) -> list[RowSection]:
        """K/V rows [p0, p1) and the recurrent states at n_valid, as `flags` ask. Raises PositionError."""
        if flags & ROWS_KV and not 0 <= p0 <= p1 <= self.n_valid:
            raise PositionError(f"rows [{p0}, {p1}) asked; the mirror holds [0, {self.n_valid})")
        if not flags:
            return []
        sections = self.span.export_rows(p0, p1, kv=bool(flags & ROWS_KV), state=bool(flags & ROWS_STATE))
        if flags & ROWS_STATE:
            self._keep_state()
        return sections

    def sync(self, sections: list[RowSection], flags: int, n_valid_after: int) -> None:
        """Take over rows and states the mirror lacks. All or nothing.

        A long push comes in pieces, and recurrent states with its last one only. Until then the attention layers run
        ahead and n_valid stays, so that a push which never ends has changed nothing.
        """
        for section in sections:
            needs = ROWS_KV if section.kind <= KIND_V else ROWS_STATE
            if not flags & needs:
                raise EngineError(f"{section} came, and flags {flags} do not announce it")
        if flags & ROWS_STATE or not self.has_recurrent:
            self.span.import_rows(sections, n_valid_after)
            self._keep_state()
            return
        for layer in sorted({section.layer for section in sections}):
            rows = [section for section in sections if section.layer == layer]
            self.engine.span(layer, layer + 1).import_rows(rows, n_valid_after)

    def snapshot(self, n: int) -> None:
        """Keep the recurrent states at n, which must be n_valid. Raises PositionError."""
        if n != self.n_valid:
            raise PositionError(f"a snapshot at {n} was asked; the mirror stands at {self.n_valid}")
        self._keep_state()

    def rewind(self, n: int) -> int:
        """Go back to the newest point <= n that can be reached, and say which."""
        if n == 0 or not self.n_valid:
            self.empty()
        elif n >= self.n_valid or not self.has_recurrent:
            self.span.truncate(min(n, self.n_valid))
        else:
            while self._snapshots and self._snapshots[-1].n_valid > n:
                self._snapshots.pop()
            if self._snapshots:
                self.span.restore(self._snapshots[-1])
            else:
                self.empty()
        return self.n_valid

    # --- inside

    def _keep_state(self) -> None:
        """Keep the recurrent states at n_valid: the host keeps its own of the same point, and may go back to it.

        The oldest go first; when memory is short all go, which costs a later turn a push and nothing else.
        """
        if not self.has_recurrent or not self.n_valid:
            return
        while self._snapshots and self._snapshots[-1].n_valid >= self.n_valid:
            self._snapshots.pop()
        try:
            self._snapshots.append(self.span.snapshot())
        except MemoryError:
            self._snapshots.clear()
        kept = self._snapshots
        while len(kept) > SNAPSHOTS_MAX or sum(each.n_bytes for each in kept) > self._snapshot_bytes:
            kept.popleft()

    def _check_chunk(self, residual: np.ndarray, position: int, want: int) -> None:
        end, n_ctx = position + len(residual), self.engine.n_ctx
        if position != self.n_valid:
            raise PositionError(f"a chunk at position {position} came; the mirror stands at {self.n_valid}")
        if end > n_ctx:
            raise PositionError(f"positions [{position}, {end}) came; this worker's context holds {n_ctx}")
        if want & WANT_TAPS:
            raise EngineError("tap rows were asked; this worker has none")
        if want & WANT_LOGITS and not self.spec.has_output:
            raise EngineError(
                "logits were asked; this worker's file has no output head (it was split with --no-head)"
            )
        if not np.isfinite(residual).all():
            bad = int((~np.isfinite(residual)).any(axis=1).argmax())
            raise NonFiniteError(f"the residual of position {position + bad} has values that are not finite")

    def _undo(self, n: int) -> None:
        """After a failure in the middle: back to n where that can be kept, else empty."""
        if self.has_recurrent:
            self.empty()
        else:
            self.span.truncate(min(n, self.n_valid))


def _wanted_flags(want: int) -> int:
    return (ROWS_KV if want & WANT_ROWS else 0) | (ROWS_STATE if want & WANT_STATE else 0)


def _ubatches(start: int, end: int, n_ubatch: int) -> Iterator[tuple[int, int]]:
    """Cut [start, end) at multiples of n_ubatch; a lone last row takes one from the ubatch before it (grid law)."""
    cuts = [start, *range(start - start % n_ubatch + n_ubatch, end, n_ubatch), end]
    if len(cuts) > 2 and cuts[-1] - cuts[-2] == 1 and cuts[-2] - cuts[-3] > 1:
        cuts[-2] -= 1
    return pairwise(cuts)
