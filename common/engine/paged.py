"""PagedGraphs: the graphs of an engine whose sequences have pages; who attends by pages, and who by flash attention.

The paged path runs a span in parts, cut at the layers that attend to everything. At a cut the sources that hold the
layer's pages attend (kv_source.py), and the next part goes on with what comes of it. Single rows always take it, so
that decode has one kernel at all depths; ubatches of many rows do from a position on (`many_rows_from`), whoever holds
the pages. Two such ubatches can run staggered: while one waits for pages that are elsewhere, the other one computes.
Used by span.py, through the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter

import numpy as np

from common.errors import EngineError
from common.ggml.backend import Backend
from common.ggml.builder import GraphBuilder
from common.state.pages import n_pages
from common.state.sequence import SequenceState

from .arch import SELECTS_EARLY
from .graphs import NODES_OUTSIDE_LAYERS_MAX, NODES_PER_LAYER_MAX, GraphCache, Key, PlacedGraph, Shape
from .inputs import Inputs
from .kv_source import ChooseSources, KvSource, PageQuery, QueryRows, start_attend, wait_attend
from .local_pages import LocalPages
from .page_graph import PageShape
from .page_inputs import PageInputs
from .page_kernel import Form, PageKernel
from .page_step import PageStep, SegmentStep
from .weights import Weights

NODES_PER_GATHERED_PAGE = 7
OnAttended = Callable[[int, float], None]
"""Told of each attention by pages: tokens of the query, seconds of this thread in it (asking, waiting, folding)."""


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
        *,
        many_rows_from: int | None = None,
        many_rows: Form = "kernels",
        lead: PagedGraphs | None = None,
    ) -> None:
        """state: the engine's own; no other sequence is longer.

        many_rows_from: ubatches of many rows that start there or later attend by pages; None: no ubatch does.
        lead: whose second half this is, for ubatches that run staggered: it shares kernel, pages and sources.
        """
        super().__init__(backend, weights, state, inputs)
        assert state.pages is not None, "made for sequences with pages only"
        self._pages, self._group_pages = pages, group_pages
        self._page_tokens = state.pages.page_tokens
        self._n_group = self._spec.n_head // self._spec.n_head_kv
        self._paged_layers = [n for n in self._spec.layers if self._spec.kind(n) == "attention"]
        self._many_rows_from, self._lead = many_rows_from, lead
        shape = PageShape(self._spec.n_head_kv, self._spec.head_dim, self._page_tokens)
        self.kernel: PageKernel = lead.kernel if lead else PageKernel(backend, shape, many_rows)
        self._local: dict[SequenceState, LocalPages] = {}
        self._chosen: dict[SequenceState, ChooseSources] = {}
        self._second: PagedGraphs | None = None
        self.on_attended: OnAttended = lambda _n_tokens, _seconds: None
        self._in_parts = False
        """The graph at hand is one that is cut."""

    def by_pages(self, position: int, n_tokens: int) -> bool:
        """Whether a ubatch attends by pages. By positions alone: wherever the pages are."""
        return n_tokens == 1 or (self._many_rows_from is not None and position >= self._many_rows_from)

    def runs_pairs(self, position: int) -> bool:
        """Whether `run_pair` is for ubatches from `position` on."""
        return self._second is not None and self.by_pages(position, 2)

    @property
    def compute_bytes(self) -> int:
        """Bytes of intermediate results and of what the paged path hands over."""
        own = super().compute_bytes + self._pages.n_bytes
        return own if self._lead else own + self.kernel.compute_bytes

    def add_second(self, second: PagedGraphs) -> None:
        """Have a second half, for ubatches that run staggered; it is closed with this one."""
        self._second = second

    def reserve(self, n_tokens: int) -> None:
        """As GraphCache; also for one row over all pages, and for many where these attend by pages."""
        deepest, beyond = self._state.n_ctx, self._many_rows_from
        if beyond is None or beyond >= deepest:
            self._reserve(n_tokens, deepest)
        else:
            self._in_parts = True
            placed = self._reserve(n_tokens, deepest)
            self._in_parts = False
            if not self._lead:
                placed = self._reserve(n_tokens, min(deepest, beyond))
            self._buffer.make_resident(
                placed.graph
            )  # what the limit is for: memory that does not grow behind it
            if self._second:
                self._second.reserve(n_tokens)
            if self._paged_layers and not self._lead:
                self._local_pages(self._state).reserve(self._paged_layers[0], self._n_group * n_tokens)
        if self._paged_layers and not self._lead:
            self._local_pages(self._state).reserve(self._paged_layers[0], self._n_group)

    def run(
        self, shape: Shape, rows: np.ndarray, position: int, n_kv: int, state: SequenceState
    ) -> np.ndarray:
        """As GraphCache."""
        self._in_parts = self.by_pages(position, shape[2])
        if not self._in_parts:
            if state.released:
                raise EngineError(
                    f"a ubatch at {position} needs all pages in memory; those before {state.released} are released"
                )
            return super().run(shape, rows, position, n_kv, state)
        placed = self._ready(shape, rows, position, n_kv, state)
        for _ in self._run_parts(placed, self._sources(state), QueryRows(position, shape[2], self._n_group)):
            pass
        return placed.read()

    def run_pair(
        self,
        shapes: tuple[Shape, Shape],
        rows: np.ndarray,
        position: int,
        n_kv: tuple[int, int],
        state: SequenceState,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Runs two consecutive ubatches that attend by pages, part i of the second after part i of the first.

        Bits are those of one after the other. n_kv: cells up to the end of each.
        """
        assert self._second is not None, "the engine makes one where ubatches run staggered"
        halves, n_first = (self, self._second), shapes[0][2]
        state.clean(range(*shapes[0][:2]), n_kv[1])
        starts, its_rows = (position, position + n_first), (rows[:n_first], rows[n_first:])
        placed, running = [], []
        for number, (half, shape, start) in enumerate(zip(halves, shapes, starts, strict=True)):
            half._in_parts = True
            placed.append(half._ready(shape, its_rows[number], start, n_kv[number], state))
            sources = half._sources(state)
            running.append(half._run_parts(placed[-1], sources, QueryRows(start, shape[2], self._n_group)))
        while running:
            running = [parts for parts in running if next(parts, running) is None]
        return placed[0].read(), placed[1].read()

    def set_sources(self, state: SequenceState, choose: ChooseSources | None) -> None:
        """Who attends for a sequence from now on; None: its own pages do. See EngineSequence.set_sources."""
        for half in (self, self._second):
            if half:
                half._local_pages(state).first_page = 0
        self._chosen.pop(state, None)
        if choose:
            self._chosen[state] = choose

    def forget(self, state: SequenceState) -> None:
        """As GraphCache."""
        super().forget(state)
        self._chosen.pop(state, None)
        self._local.pop(state, None)
        if self._second:
            self._second.forget(state)

    def close(self) -> None:
        """Frees everything. Calling it again does nothing."""
        super().close()
        if self._second:
            self._second.close()
        self._pages.close()
        if self._lead:
            self._inputs.close()
        else:
            self.kernel.close()

    # --- the paged path

    def _run_parts(self, placed: PlacedGraph, sources: Sequence[KvSource], rows: QueryRows) -> Iterator[None]:
        """Runs the parts of a graph, and between them whoever holds the pages; stops whenever they have been asked."""
        assert isinstance(placed.step, SegmentStep)
        if placed.parts is None:
            placed.parts = placed.graph.parts([cut.n_nodes for cut in placed.step.cuts])
        first, *others = placed.parts.ptrs
        self._backend.compute(first)
        told = (self._lead or self).on_attended
        for part, cut in zip(others, placed.step.cuts, strict=True):
            began_s = perf_counter()
            q = self._pages.read_queries(rows.n_tokens)
            start_attend(sources, PageQuery(cut.layer, q, cut.scale, rows))
            asking_s = perf_counter() - began_s
            yield
            began_s = perf_counter()
            self._pages.write_attended(wait_attend(sources).output(), rows.n_tokens)
            told(rows.n_tokens, asking_s + perf_counter() - began_s)
            self._backend.compute(part)

    def _write_place(self, position: int, n_tokens: int, n_kv: int) -> None:
        if self._in_parts:
            self._inputs.write_place(position, n_tokens, n_kv, by_pages=True)
        else:
            super()._write_place(position, n_tokens, n_kv)

    def _sources(self, state: SequenceState) -> Sequence[KvSource]:
        local = self._local_pages(state)
        chosen = (self._lead or self)._chosen
        return chosen[state](local) if state in chosen else [local]

    def _local_pages(self, state: SequenceState) -> LocalPages:
        if state not in self._local:
            if self._lead:
                self._local[state] = self._lead._local_pages(state).twin()
            else:
                self._local[state] = LocalPages(state, self.kernel, self._group_pages)
        return self._local[state]

    # --- building

    def _ready(
        self, shape: Shape, rows: np.ndarray, position: int, n_kv: int, state: SequenceState
    ) -> PlacedGraph:
        assert state.pages is not None
        self._pages.write_place(state.pages, position, shape[2])
        return super()._ready(shape, rows, position, n_kv, state)

    def _key(self, shape: Shape, n_kv: int, state: SequenceState) -> Key:
        """A graph that is not cut names the pages it turns back."""
        n_turned = -1 if self._in_parts else n_pages(n_kv, self._page_tokens)
        return *super()._key(shape, n_kv, state), n_turned

    def _step(self, shape: Shape, n_kv: int, state: SequenceState) -> PageStep:
        first, last, n_tokens, n_out = shape
        per_layer = NODES_PER_LAYER_MAX + NODES_PER_GATHERED_PAGE * n_pages(n_kv, self._page_tokens)
        g = GraphBuilder((last - first) * per_layer + NODES_OUTSIDE_LAYERS_MAX)
        early = SELECTS_EARLY[self._spec.arch]
        kind = SegmentStep if self._in_parts else PageStep
        arguments = (g, self._weights, state, self._inputs, first, last, n_tokens, n_out, n_kv, early)
        return kind(*arguments, pages=self._pages)
