"""PagedGraphs: the graphs of an engine whose sequences have pages; one row takes the paged path, more rows flash.

The paged path runs a span in parts, cut at the layers that attend to everything. At a cut the sources that hold the
layer's pages attend (kv_source.py), and the next part goes on with what comes of it. Decode thus has one kernel at all
depths, wherever the pages are. Used by span.py, through the engine.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from common.ggml.backend import Backend
from common.ggml.builder import GraphBuilder
from common.state.pages import n_pages
from common.state.sequence import SequenceState
from common.wire.rows import KIND_K

from .arch import SELECTS_EARLY
from .graphs import NODES_OUTSIDE_LAYERS_MAX, NODES_PER_LAYER_MAX, GraphCache, Key, PlacedGraph, Shape
from .inputs import Inputs
from .kv_source import ChooseSources, KvSource, PageQuery, QueryRows, attend
from .local_pages import LocalPages
from .page_graph import PageShape
from .page_inputs import PageInputs
from .page_kernel import PageKernel
from .page_step import PageStep, SegmentStep
from .weights import Weights

NODES_PER_GATHERED_PAGE = 7


class PagedGraphs(GraphCache):
    """As GraphCache, for states with pages."""

    def __init__(
        self,
        backend: Backend,
        weights: Weights,
        state: SequenceState,
        inputs: Inputs,
        pages: PageInputs,
        group_pages: int,
    ) -> None:
        """state: the engine's own; no other sequence is longer."""
        super().__init__(backend, weights, state, inputs)
        assert state.pages is not None, "made for sequences with pages only"
        self._pages, self._group_pages = pages, group_pages
        self._page_tokens = state.pages.page_tokens
        self._n_group = self._spec.n_head // self._spec.n_head_kv
        self._paged_layers = [n for n in self._spec.layers if self._spec.kind(n) == "attention"]
        shape = PageShape(self._spec.n_head_kv, self._spec.head_dim, self._page_tokens)
        self._kernel = PageKernel(backend, shape, max(1, len(self._paged_layers)))
        self._local: dict[SequenceState, LocalPages] = {}
        self._chosen: dict[SequenceState, ChooseSources] = {}

    @property
    def compute_bytes(self) -> int:
        """Bytes of intermediate results and of what the paged path hands over."""
        return super().compute_bytes + self._kernel.compute_bytes + self._pages.n_bytes

    def reserve(self, n_tokens: int) -> None:
        """As GraphCache; also for one row over all pages."""
        super().reserve(n_tokens)
        if self._paged_layers:
            self._local_pages(self._state).reserve(self._paged_layers[0], self._n_group)

    def run(
        self, shape: Shape, rows: np.ndarray, position: int, n_kv: int, state: SequenceState
    ) -> np.ndarray:
        """As GraphCache."""
        n_tokens = shape[2]
        assert state.pages is not None
        self._pages.write_place(state.pages, position, n_tokens)
        if n_tokens > 1:
            return super().run(shape, rows, position, n_kv, state)
        placed = self._ready(shape, rows, position, n_kv, state)
        self._run_parts(placed, self._sources(state), QueryRows(position, n_tokens, self._n_group))
        return placed.read()

    def set_sources(self, state: SequenceState, choose: ChooseSources | None) -> None:
        """Who attends for a sequence from now on; None: its own pages do. See EngineSequence.set_sources."""
        self._local_pages(state).first_page = 0
        self._chosen.pop(state, None)
        if choose:
            self._chosen[state] = choose

    def forget(self, state: SequenceState) -> None:
        """As GraphCache."""
        super().forget(state)
        self._chosen.pop(state, None)
        self._local.pop(state, None)
        self._kernel.forget([state.layers[layer].tensors[KIND_K] for layer in self._paged_layers])

    def close(self) -> None:
        """Frees everything. Calling it again does nothing."""
        super().close()
        self._kernel.close()
        self._pages.close()

    # --- the paged path

    def _run_parts(self, placed: PlacedGraph, sources: Sequence[KvSource], rows: QueryRows) -> None:
        """Runs the parts of a graph, and between them whoever holds the pages."""
        assert isinstance(placed.step, SegmentStep)
        if placed.parts is None:
            placed.parts = placed.graph.parts([cut.n_nodes for cut in placed.step.cuts])
        first, *others = placed.parts.ptrs
        self._backend.compute(first)
        for part, cut in zip(others, placed.step.cuts, strict=True):
            q = self._pages.read_queries(rows.n_tokens)
            attended = attend(sources, PageQuery(cut.layer, q, cut.scale, rows))
            self._pages.write_attended(attended.output(), rows.n_tokens)
            self._backend.compute(part)

    def _sources(self, state: SequenceState) -> Sequence[KvSource]:
        local = self._local_pages(state)
        return self._chosen[state](local) if state in self._chosen else [local]

    def _local_pages(self, state: SequenceState) -> LocalPages:
        if state not in self._local:
            self._local[state] = LocalPages(state, self._kernel, self._group_pages)
        return self._local[state]

    # --- building

    def _key(self, shape: Shape, n_kv: int, state: SequenceState) -> Key:
        """A graph of many rows names the pages it turns back."""
        return *super()._key(shape, n_kv, state), n_pages(n_kv, self._page_tokens) if shape[2] > 1 else 0

    def _step(self, shape: Shape, n_kv: int, state: SequenceState) -> PageStep:
        first, last, n_tokens, n_out = shape
        per_layer = NODES_PER_LAYER_MAX + NODES_PER_GATHERED_PAGE * n_pages(n_kv, self._page_tokens)
        g = GraphBuilder((last - first) * per_layer + NODES_OUTSIDE_LAYERS_MAX)
        early = SELECTS_EARLY[self._spec.arch]
        kind = PageStep if n_tokens > 1 else SegmentStep
        arguments = (g, self._weights, state, self._inputs, first, last, n_tokens, n_out, n_kv, early)
        return kind(*arguments, pages=self._pages)
