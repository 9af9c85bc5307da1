"""LocalPages: the pages of a sequence that are in this process, attended by a PageKernel.

Pages are read where the sequence's rows lie; nothing is copied. Used by paged.py.
"""

from __future__ import annotations

from common.attention.partial import PartialAttention
from common.errors import EngineError
from common.state.pages import n_pages
from common.state.sequence import SequenceState
from common.wire.rows import KIND_K, KIND_V

from .kv_source import PageQuery
from .page_graph import PageRef
from .page_kernel import PageKernel

F16_BYTES = 2
RUNS_MAX = 256
"""Runs of pages that are remembered: those of the steps at hand, not of every depth that there ever was."""


class LocalPages:
    """A KvSource over the pages from `first_page` on: all of them, or those that nobody else holds."""

    def __init__(self, state: SequenceState, kernel: PageKernel, group_pages: int) -> None:
        """The state must have pages."""
        assert state.pages is not None, "a sequence without pages has nothing to attend"
        self.first_page = 0
        self.group_pages = group_pages
        self._state, self._kernel, self._layout = state, kernel, state.pages
        self._query: PageQuery | None = None
        self._refs: dict[tuple[int, int], PageRef] = {}
        self._runs: dict[tuple[int, int, int], tuple[PageRef, ...]] = {}

    def twin(self) -> LocalPages:
        """The same pages, for another ubatch that is asked about at the same time."""
        twin = LocalPages(self._state, self._kernel, self.group_pages)
        twin._refs, twin._runs, twin.first_page = self._refs, self._runs, self.first_page
        return twin

    def start_attend(self, query: PageQuery) -> None:
        """Remembers the query: this processor has other things to do until it is awaited."""
        self._query = query

    def wait_attend(self) -> list[PartialAttention]:
        """One partial a group, computed now. Raises EngineError."""
        query, self._query = self._query, None
        if query is None:
            raise EngineError("nothing was asked of these pages")
        return self.attend_pages(query, self.first_page)

    def attend_pages(
        self, query: PageQuery, first_page: int, end_page: int | None = None
    ) -> list[PartialAttention]:
        """One partial for each group of the pages [first_page, end_page), or to the last, of keys the query sees."""
        if first_page * self._layout.page_tokens < self._state.released:
            raise EngineError(
                f"page {first_page} is not in memory; pages before {self._state.released} are released"
            )
        pages = self._pages(query.layer, query.rows.end, first_page, end_page)
        if not pages:
            return []
        attend = self._kernel.attend_groups
        return list(attend(query.q, query.scale, pages, query.rows, first_page, self.group_pages))

    @property
    def kernel(self) -> PageKernel:
        """What attends: also for pages of the same shape that lie elsewhere."""
        return self._kernel

    def reserve(self, layer: int, n_rows: int) -> None:
        """Takes the memory that the deepest query of so many rows needs. See PageKernel.reserve."""
        self._kernel.reserve(self._pages(layer, self._state.n_ctx, 0), n_rows, self.group_pages)

    def _pages(
        self, layer: int, n_keys: int, first_page: int, end_page: int | None = None
    ) -> tuple[PageRef, ...]:
        """The pages of a layer that hold the keys [0, n_keys), of these the pages [first_page, end_page)."""
        end = n_pages(n_keys, self._layout.page_tokens)
        key = (layer, first_page, end if end_page is None else min(end, end_page))
        run = self._runs.get(key)
        if run is None:
            if len(self._runs) >= RUNS_MAX:
                self._runs.clear()
            run = self._runs[key] = tuple(self._ref(layer, page) for page in range(*key[1:]))
        return run

    def _ref(self, layer: int, page: int) -> PageRef:
        if (layer, page) not in self._refs:
            self._refs[layer, page] = self._new_ref(layer, page)
        return self._refs[layer, page]

    def _new_ref(self, layer: int, page: int) -> PageRef:
        layout, tensors = self._layout, self._state.layers[layer].tensors
        head = layout.head_dim * F16_BYTES
        line = layout.line(page) * F16_BYTES
        return PageRef(
            k=tensors[KIND_K],
            k_offset=layout.key_offset(page) * F16_BYTES,
            k_strides=(head, layout.n_keys(page) * head),
            v=tensors[KIND_V],
            v_offset=layout.value_offset(page) * F16_BYTES,
            v_strides=(line, layout.head_dim * line),
            first_position=page * layout.page_tokens,
            n_keys=layout.n_keys(page),
        )
