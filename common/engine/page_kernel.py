"""PageKernel: attends pages in memory, and keeps the graphs that do it.

A few rows always run on ggml's kernels (page_graph.py), in one form here and on a worker, so that who computes changes
no bit. Many rows run on them in blocks, or as NumPy's products (common/attention/products.py): see forms.py. Knows
nothing of sequences; used by local_pages.py.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Literal

import numpy as np

from common.attention.order import fold_groups, groups
from common.attention.partial import PartialAttention, fold_all
from common.attention.products import attend_rows, blas_threads
from common.errors import EngineError, UnsupportedOperationError
from common.ggml.backend import Backend
from common.ggml.graph import ComputeBuffer
from common.ggml.tensor import F16, I32, Arena, Tensor, host_view

from .kv_source import QueryRows
from .page_graph import LASTING_MASKS, PageGraph, PageGraphBuilder, PageRef, PageShape

ROWS_MAX = 384
"""Query rows a head in one graph. More run in blocks: that bounds the memory of scores and costs no time."""
PAGES_MAX = 16
"""Pages in one graph, for the same reason."""
READ_OFF_ROWS_MAX = 16
"""Up to so many rows, a page's scores and weights are read where they lie (on the CPU)."""
GRAPHS_MAX = 24
"""Graphs differ by numbers of pages and rows alone: a ubatch takes about four, a pair of them twice as many."""
TRIALS = 9
CLEARLY = 1.15
"""All threads attend a few rows where they are at least so many times as fast as one."""
F16_BYTES = 2
VISIBLE, HIDDEN = np.float16(0), np.float16(-np.inf)

Form = Literal["kernels", "products"]


class PageKernel:
    """For pages of one shape on one backend; one thread at a time."""

    def __init__(self, backend: Backend, shape: PageShape, form: Form = "kernels") -> None:
        """form: of many rows; products are for f16 on the CPU only. Raises OutOfMemoryError."""
        self.shape, self.form = shape, form
        self._backend = backend
        self._buffer = ComputeBuffer(backend)
        self._graphs: OrderedDict[tuple, PageGraph] = OrderedDict()
        self._arrays: dict[str, np.ndarray] = {}
        self._last_mask: tuple[tuple, np.ndarray] = ((), np.empty(0, np.float16))
        self._lasting_at: dict[int, tuple] = {}
        self._few_rows_threads: int | None = None
        """Threads for a few rows when not all: of small heads there is so little work that sharing it costs more."""
        self._arena = Arena(2)
        self._lasting_mask = self._arena.tensor(
            F16, shape.page_tokens * READ_OFF_ROWS_MAX, LASTING_MASKS, name="masks"
        )
        self._key_numbers = self._arena.tensor(I32, shape.page_tokens, name="key numbers")
        self._arena.allocate(backend.buffer_type)
        self._key_numbers.write(np.arange(shape.page_tokens, dtype=np.int32))

    @property
    def n_graphs(self) -> int:
        """Graphs that are kept: of numbers of pages and rows, not of layers and depths."""
        return len(self._graphs)

    @property
    def compute_bytes(self) -> int:
        """Bytes of scores and results."""
        return self._buffer.n_bytes

    def attend(
        self, q: np.ndarray, scale: float, pages: tuple[PageRef, ...], rows: QueryRows
    ) -> list[PartialAttention]:
        """One partial f32 [n_head_kv, n_rows] for each page; a row that sees none of its keys is the identity.

        q f32 [n_head_kv, n_rows, head_dim]; every page must hold a key that some row sees. Raises EngineError.
        """
        self._check(q, rows)
        if self._by_products(rows):
            with blas_threads(self._backend.n_threads):
                return list(self._attend_products(q, scale, pages, rows))
        blocks = [list(self._attend_block(q, scale, pages, rows, block)) for block in _blocks(rows)]
        return blocks[0] if len(blocks) == 1 else [_side_by_side(b) for b in zip(*blocks, strict=True)]

    def attend_groups(
        self,
        q: np.ndarray,
        scale: float,
        pages: tuple[PageRef, ...],
        rows: QueryRows,
        first_page: int,
        group_pages: int,
    ) -> Iterator[PartialAttention]:
        """As attend(), the pages of each group folded, one group after the other. first_page: the first one's number.

        Many rows take megabytes a page: of these, no more than one group's pages are attended before they are folded.
        """
        if rows.n_rows <= READ_OFF_ROWS_MAX:
            yield from fold_groups(self.attend(q, scale, pages, rows), first_page, group_pages)
            return
        self._check(q, rows)
        for group in groups(first_page, first_page + len(pages), group_pages):
            yield self._fold_group(q, scale, pages[group.start - first_page : group.stop - first_page], rows)

    def _fold_group(
        self, q: np.ndarray, scale: float, pages: tuple[PageRef, ...], rows: QueryRows
    ) -> PartialAttention:
        if self._by_products(rows):
            with blas_threads(self._backend.n_threads):
                return fold_all(self._attend_products(q, scale, pages, rows))
        blocks = [fold_all(self._attend_block(q, scale, pages, rows, block)) for block in _blocks(rows)]
        return blocks[0] if len(blocks) == 1 else _side_by_side(blocks)

    def _check(self, q: np.ndarray, rows: QueryRows) -> None:
        expected = (self.shape.n_head_kv, rows.n_rows, self.shape.head_dim)
        if q.shape != expected:
            raise EngineError(f"queries are {list(q.shape)}, expected {list(expected)}")

    def _by_products(self, rows: QueryRows) -> bool:
        return self.form == "products" and rows.n_rows > READ_OFF_ROWS_MAX

    def reserve(self, pages: tuple[PageRef, ...], n_rows: int, group_pages: int) -> None:
        """Takes the memory that attending these pages needs, and finds out how many threads suit so many rows.

        Raises UnsupportedOperationError, OutOfMemoryError.
        """
        some = pages[: PAGES_MAX if n_rows <= READ_OFF_ROWS_MAX else min(PAGES_MAX, group_pages)]
        graph = self._get(some, min(n_rows, ROWS_MAX), 1.0, len(some) - 1)
        # Run once, so that what it needs is in memory from now on.
        graph.queries_port.send(np.zeros_like(graph.queries_port.array))
        self._backend.compute(graph.graph.ptr)
        graph.read()
        if self._backend.n_threads > 1 and n_rows <= READ_OFF_ROWS_MAX:
            graph = self._get(pages[:1], n_rows, 1.0, 0)
            graph.queries_port.send()
            all_threads, one_thread = (
                median(self._seconds(graph, n) for _ in range(TRIALS)) for n in (self._backend.n_threads, 1)
            )
            self._few_rows_threads = 1 if one_thread < CLEARLY * all_threads else None

    def _seconds(self, graph: PageGraph, n_threads: int) -> float:
        started_s = time.perf_counter()
        self._backend.compute(graph.graph.ptr, n_threads)
        return time.perf_counter() - started_s

    def close(self) -> None:
        """Frees graphs and memory. Calling it again does nothing."""
        self._drop_all()
        self._buffer.close()
        self._arena.close()

    # --- one block of rows

    def _attend_block(
        self, q: np.ndarray, scale: float, pages: tuple[PageRef, ...], rows: QueryRows, block: slice
    ) -> Iterator[PartialAttention]:
        for i in range(0, len(pages), PAGES_MAX):
            yield from self._run(q, scale, pages[i : i + PAGES_MAX], rows, block)

    def _run(
        self, q: np.ndarray, scale: float, pages: tuple[PageRef, ...], rows: QueryRows, block: slice
    ) -> Iterator[PartialAttention]:
        """One graph: some rows, some pages. What it found is taken before another graph runs."""
        n_whole = sum(ref.first_position + ref.n_keys <= rows.position + 1 for ref in pages)
        graph = self._get(pages, block.stop - block.start, scale, n_whole)
        graph.queries_port.send(q[:, block])
        for number, (ref, nodes) in enumerate(zip(pages, graph.pages, strict=True)):
            nodes.move(ref, self.shape)
            nodes.aim(ref.n_read(rows.end))
            if nodes.mask is not None:
                slot = number - n_whole
                lasts = graph.results is None and slot < LASTING_MASKS
                self._write_mask(
                    nodes.mask,
                    slot if lasts else None,
                    (ref.first_position, nodes.n_read, rows, block.start),
                    block,
                )
        few = block.stop - block.start <= READ_OFF_ROWS_MAX
        self._backend.compute(graph.graph.ptr, self._few_rows_threads if few else None)
        for ref, (output, score, weight) in zip(pages, graph.read(), strict=True):
            l = np.reciprocal(weight)  # noqa: E741
            m = score * np.float32(scale)
            o = output * l[..., None]
            if ref.first_position > rows.position:
                blind = rows.positions[block] < ref.first_position
                m[:, blind], l[:, blind], o[:, blind] = -np.inf, 0, 0
            yield PartialAttention(m, l, o)

    def _write_mask(
        self, mask: Tensor, slot: int | None, what: tuple[int, int, QueryRows, int], block: slice
    ) -> None:
        """Which keys of a page each row sees; `what` is (first position, keys read, rows, first row).

        Every layer asks for the same: what was made last is kept, and what lies in a lasting mask's slot is left there.
        """
        if slot is not None and self._lasting_at.get(slot) == what:
            return
        if self._last_mask[0] != what:
            self._last_mask = (what, causal_mask(*what[:2], what[2].positions[block]))
        mask.write(self._last_mask[1])
        if slot is not None:
            self._lasting_at[slot] = what

    def _attend_products(
        self, q: np.ndarray, scale: float, pages: tuple[PageRef, ...], rows: QueryRows
    ) -> Iterator[PartialAttention]:
        for ref in pages:
            yield self._page_products(q, scale, ref, rows)

    def _page_products(self, q: np.ndarray, scale: float, ref: PageRef, rows: QueryRows) -> PartialAttention:
        n_keys = min(ref.n_keys, rows.end - ref.first_position)
        n_head, d = self.shape.n_head_kv, self.shape.head_dim
        k = _strided(ref.k, ref.k_offset, (n_head, n_keys, d), ref.k_strides)
        v_lines = _strided(ref.v, ref.v_offset, (n_head, d, n_keys), ref.v_strides)
        keys, visible = ref.first_position + np.arange(n_keys), None
        if ref.first_position + n_keys > rows.position + 1:
            visible = keys <= rows.positions[:, None]
        return attend_rows(q, k, v_lines, scale, visible)

    # --- graphs

    def _get(self, pages: tuple[PageRef, ...], n_rows: int, scale: float, n_whole: int) -> PageGraph:
        key = (tuple(ref.n_keys for ref in pages), n_rows, scale, n_whole)
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
            return graph
        if len(self._graphs) >= GRAPHS_MAX:
            self._graphs.popitem(last=False)[1].close()
        reads_off = self._backend.device.is_cpu and n_rows <= READ_OFF_ROWS_MAX
        lasting_mask = self._lasting_mask if reads_off else None
        builder = PageGraphBuilder(self.shape, self._key_numbers, n_rows, scale, lasting_mask)
        graph = builder.build(pages, n_whole)
        if missing := graph.graph.unsupported(self._backend):
            graph.close()
            raise UnsupportedOperationError(f"{self._backend.name} cannot run {', '.join(missing)}")
        if self._buffer.place(graph.graph):
            self._drop_all()
        graph.connect(self._scratch)
        self._graphs[key] = graph
        return graph

    def _scratch(self, use: str, n: int) -> np.ndarray:
        """f32 [n], the first elements of one array for each use; `reserve` makes them as long as they ever get."""
        if use not in self._arrays or len(self._arrays[use]) < n:
            self._arrays[use] = np.empty(n, np.float32)
        return self._arrays[use][:n]

    def _drop_all(self) -> None:
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()


def causal_mask(first_position: int, n_read: int, positions: np.ndarray) -> np.ndarray:
    """f16 [n_rows, n_read]: which keys of a page, from `first_position` on, rows at `positions` see.

    A row that sees none is shown the first, so that its softmax is a number; what it yields is thrown away.
    """
    last = np.maximum(positions, first_position)[:, None]
    return np.where(first_position + np.arange(n_read) <= last, VISIBLE, HIDDEN)


def _blocks(rows: QueryRows) -> list[slice]:
    """Rows that run together."""
    return [slice(first, min(first + ROWS_MAX, rows.n_rows)) for first in range(0, rows.n_rows, ROWS_MAX)]


def _strided(
    tensor: Tensor, offset: int, shape: tuple[int, int, int], strides: tuple[int, int]
) -> np.ndarray:
    """f16 elements of a tensor in memory, from a byte offset; strides in bytes of the last but one and first axis."""
    elements = host_view(tensor).reshape(-1)[offset // F16_BYTES :]
    return np.lib.stride_tricks.as_strided(
        elements, shape, (strides[1], strides[0], F16_BYTES), writeable=False
    )


def _side_by_side(blocks: Sequence[PartialAttention]) -> PartialAttention:
    """The rows of several partials over the same keys as one."""
    return PartialAttention(*(np.concatenate([getattr(b, name) for b in blocks], axis=1) for name in "mlo"))
