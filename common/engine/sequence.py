"""EngineSequence: a further sequence of an engine: rows and states of its own over the same weights, graphs and inputs.

An engine is one sequence itself; more of them, often shorter, let another conversation keep its rows or another request
compute in between. All belong to the engine's thread: one ubatch of one of them runs at a time. Rows move from one to
another by export_rows and import_rows. Made by Engine.sequence; used by services/mac.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from common.errors import EngineError
from common.state.sequence import SequenceState

from .kv_source import ChooseSources
from .mapped_pages import MappedPages, Place
from .paged import PagedGraphs
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

    def set_sources(self, choose: ChooseSources | None) -> None:
        """Who attends where one row attends by pages: the sources that `choose` returns; None: its own pages alone.

        The rows of all pages stay the sequence's own and are written here whoever attends. Raises EngineError when the
        engine does not decode by pages.
        """
        if not isinstance(self._engine.graphs, PagedGraphs):
            raise EngineError("other sources attend pages only; load the engine with Decoding('paged')")
        self._engine.graphs.set_sources(self.state, choose)

    def pages_elsewhere(self, places: Callable[[int, int], Place]) -> MappedPages:
        """This sequence's full pages as they lie in files, at places(layer, page). Raises EngineError."""
        graphs = self._engine.graphs
        if not isinstance(graphs, PagedGraphs) or self.state.pages is None:
            raise EngineError("this sequence has no pages; load the engine with Decoding('paged')")
        decoding = self._engine.decoding
        return MappedPages(
            self._engine.backend, graphs.kernel, self.state.pages, decoding.group_pages, places
        )

    def close(self) -> None:
        """Free the rows and states; its spans are dead afterwards. The engine does it too. Twice does nothing."""
        self._engine.drop(self)
