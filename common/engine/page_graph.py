"""The graph of attention over some pages: scores, softmax, weighted values, and what the fold needs of each page.

The softmax of a page is normalised, so its sum and maximum are read off where it is largest: at j = argmax p,

    m = scale * score[j]        l = 1 / p[j]        O = l * (p · V)

which needs no second pass and cannot overflow. f16 pages keep keys head by head and values transposed, and run on
matrix kernels only. Pages of other types (q8_0) keep their rows as they came; these are widened to f32, which is exact,
and summed by outer products: slower. Knows nothing of who asks; run by page_kernel.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from common.ggml.builder import GraphBuilder
from common.ggml.graph import Graph
from common.ggml.tensor import F16, F32, Port, Tensor
from common.limits import PAGE_PAD_TOKENS

NODES_PER_PAGE_MAX = 32
F32_BYTES = 4


@dataclass(frozen=True)
class PageShape:
    """What the pages of a model have in common: `n_head_kv` heads of `head_dim` elements side by side in a row."""

    n_head_kv: int
    head_dim: int
    page_tokens: int
    ggml_type: int = F16


@dataclass(frozen=True, eq=False)
class PageRef:
    """One page in memory, from byte `k_offset` of `k` and byte `v_offset` of `v` on. Equal to itself only.

    f16: `k_strides` are the bytes from key to key and from head to head, `v_strides` those from one line of values (all
    keys of one element) to the next and from head to head. Other types: bytes from row to row, the second unused.
    `n_keys` is the page's room; how many of them are seen is said with each run.
    """

    k: Tensor
    k_offset: int
    k_strides: tuple[int, int]
    v: Tensor
    v_offset: int
    v_strides: tuple[int, int]
    first_position: int
    n_keys: int

    def n_read(self, end: int) -> int:
        """Keys that are read when nobody sees positions from `end` on: a few more than are seen."""
        seen = min(self.n_keys, end - self.first_position)
        return -(-seen // PAGE_PAD_TOKENS) * PAGE_PAD_TOKENS


@dataclass
class PageNodes:
    """The nodes of one page that change with the number of keys read."""

    mask: Tensor | None
    n_read: int
    windows: list[tuple[Tensor, int]] = field(default_factory=list)
    """(tensor, axis of the keys) of views on memory that stays as it is"""
    results: list[tuple[Tensor, int]] = field(default_factory=list)
    """(tensor, axis of the keys) of what lies without gaps: the strides of later axes follow"""
    turned: Tensor | None = None
    """The weights with their first two axes swapped"""

    def aim(self, n_read: int) -> None:
        """Reads the first `n_read` keys of the page."""
        if n_read == self.n_read:
            return
        self.n_read = n_read
        for tensor, axis in self.windows:
            tensor.struct.ne[axis] = n_read
        for tensor, axis in self.results:
            struct = tensor.struct
            struct.ne[axis] = n_read
            for behind in range(axis + 1, 4):
                struct.nb[behind] = struct.nb[behind - 1] * struct.ne[behind - 1]
        if self.turned is not None:
            struct = self.turned.struct
            n_rows, n_head = struct.ne[0], struct.ne[2]
            struct.ne[1] = n_read
            sizes = (n_read, 1, n_read * n_rows, n_read * n_rows * n_head)
            struct.nb[:] = [F32_BYTES * size for size in sizes]


@dataclass
class PageGraph:
    """A finished graph over pages, its inputs and results. Ports work once the graph has memory (`connect`)."""

    graph: Graph
    shape: PageShape
    n_rows: int
    pages: list[PageNodes]
    queries: Tensor
    results: Tensor
    """f32, for each page: O of unit weight [n_head_kv, n_rows, head_dim], score and weight [n_head_kv, n_rows]"""

    def connect(self) -> None:
        """Ties the tensors to the arrays below."""
        shape = (self.shape.n_head_kv, self.n_rows)
        self.queries_port = Port(self.queries, np.empty((*shape, self.shape.head_dim), np.float32))
        values = np.empty((len(self.pages), self.results.ne[0]), np.float32)
        self.results_port = Port(self.results, values)
        n = shape[0] * shape[1]
        self.o = values[:, : -2 * n].reshape(-1, *shape, self.shape.head_dim)
        self.score = values[:, -2 * n : -n].reshape(-1, *shape)
        self.weight = values[:, -n:].reshape(-1, *shape)

    def close(self) -> None:
        """Frees the graph. Calling it again does nothing."""
        self.graph.close()


class PageGraphBuilder:
    """Makes one graph of `n_rows` query rows over pages."""

    def __init__(self, shape: PageShape, key_numbers: Tensor, n_rows: int, scale: float) -> None:
        """key_numbers: i32 [page_tokens], counting from 0."""
        self._shape, self._key_numbers, self._n_rows, self._scale = shape, key_numbers, n_rows, scale

    def build(self, pages: Sequence[PageRef], n_whole: int) -> PageGraph:
        """All pages but the first `n_whole` get a mask. Raises EngineError.

        The graph reads every page whole until it is aimed, so that it gets memory for that.
        """
        shape, n_rows = self._shape, self._n_rows
        self._g = g = GraphBuilder(len(pages) * NODES_PER_PAGE_MAX + 2)
        add = self._add_f16 if shape.ggml_type == F16 else self._add_widened
        try:
            self._queries = g.input(F32, shape.head_dim, n_rows, shape.n_head_kv)
            results = g.input(F32, (shape.head_dim + 2) * n_rows * shape.n_head_kv, len(pages))
            nodes = []
            for number, ref in enumerate(pages):
                mask = g.input(F16, ref.n_keys, n_rows) if number >= n_whole else None
                place = g.view(results, results.ne[:1], (), number * results.nb[1])
                nodes.append(add(ref, mask, place))
        except BaseException:
            g.drop()
            raise
        return PageGraph(g.finish(), shape, n_rows, nodes, self._queries, results)

    def _add_f16(self, ref: PageRef, mask: Tensor | None, place: Tensor) -> PageNodes:
        g, d, n_head, n = self._g, self._shape.head_dim, self._shape.n_head_kv, ref.n_keys
        k = g.view(ref.k, (d, n, n_head), ref.k_strides, ref.k_offset)
        v = g.view(ref.v, (n, d, n_head), ref.v_strides, ref.v_offset)
        scores = g.precise(g.matmul(k, self._queries))  # [n, n_rows, n_head_kv]
        weights = g.soft_max(scores, mask, self._scale)
        nodes = self._finish(g.matmul(v, weights), scores, weights, mask, place)
        nodes.windows += [(k, 1), (v, 0)]
        return nodes

    def _add_widened(self, ref: PageRef, mask: Tensor | None, place: Tensor) -> PageNodes:
        g, d, n_head, n = self._g, self._shape.head_dim, self._shape.n_head_kv, ref.n_keys
        numbers = g.view(self._key_numbers, (n,))
        rows = [
            g.view(ref.k, (d * n_head, n), ref.k_strides[:1], ref.k_offset),
            g.view(ref.v, (d * n_head, n), ref.v_strides[:1], ref.v_offset),
        ]
        wide = [g.get_rows(each, numbers) for each in rows]
        k, v = (g.view(each, (d, n, n_head), (each.nb[1], d * F32_BYTES)) for each in wide)
        scores = g.precise(g.matmul(k, self._queries))
        weights = g.soft_max(scores, mask, self._scale)
        turned = g.permute(weights, 1, 0, 2, 3)  # [n_rows, n, n_head_kv]
        nodes = self._finish(g.outer_product(v, turned), scores, weights, mask, place)
        nodes.windows += [(numbers, 0), *((each, 1) for each in (*rows, *wide, k, v))]
        nodes.turned = turned
        return nodes

    def _finish(
        self, output: Tensor, scores: Tensor, weights: Tensor, mask: Tensor | None, place: Tensor
    ) -> PageNodes:
        """Copies the output to its place, and score and weight as they are at the largest weight of each row."""
        g, (n, n_rows, n_head, _) = self._g, weights.ne
        n_all = n_rows * n_head
        flat = g.reshape(weights, n, n_all)
        largest = g.reshape(g.argmax(flat), 1, n_all)
        columns = [g.reshape(t, 1, n, n_all) for t in (scores, weights)]
        offset = 0
        for found in (output, *(g.get_rows(column, largest) for column in columns)):
            g.run(g.copy(found, g.view(place, (found.n_elements,), (), offset * F32_BYTES)))
            offset += found.n_elements
        nodes = PageNodes(mask, n)
        nodes.results += [(t, 0) for t in (scores, weights, flat, *([mask] if mask else []))]
        nodes.results += [(column, 1) for column in columns]
        return nodes
