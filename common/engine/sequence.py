"""EngineSequence: a further sequence of an engine: rows and states of its own over the same weights, graphs and inputs.

An engine is one sequence itself; more of them, often shorter, let another conversation keep its rows or another request
compute in between. All belong to the engine's thread: one ubatch of one of them runs at a time. Rows move from one to
another by export_rows and import_rows. Made by Engine.sequence; used by services/mac.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.state.sequence import SequenceState

from .span import LayerSpan

if TYPE_CHECKING:
    from .engine import Engine


class EngineSequence:
    """`n_ctx` positions of `spec`. Where only `spec`, `n_ctx` and `span` are used, as good as an engine."""

    def __init__(self, engine: Engine, state: SequenceState) -> None:
        self.spec, self.n_ctx, self.state = engine.spec, state.n_ctx, state
        self._engine = engine
        self._spans: dict[tuple[int, int], LayerSpan] = {}

    def span(self, first: int, last: int) -> LayerSpan:
        """Layers [first, last) of this sequence. Raises EngineError when the file does not hold them."""
        self._engine.require_layers(first, last)
        if (first, last) not in self._spans:
            self._spans[first, last] = LayerSpan(self._engine, first, last, self.state)
        return self._spans[first, last]

    def close(self) -> None:
        """Free the rows and states; its spans are dead afterwards. The engine does it too. Twice does nothing."""
        self._engine.drop(self)
