"""The graph of attention over some pages: scores, softmax, weighted values, and what the fold needs of each page.

The softmax of a page is normalised, so its sum and maximum are read off where it is largest: at j = argmax p,

    m = scale * score[j]        l = 1 / p[j]        O = l * (p · V)

which needs no second pass and cannot overflow. A few rows are read off where they lie, on the CPU: an operation less
is a meeting of all threads less. Many rows, and other devices, do it in the graph.

f16 pages keep keys head by head and values transposed, and run on matrix kernels only. Pages of other types (q8_0) keep
their rows as they came; these are widened to f32, which is exact, and summed by outer products: slower. A graph is
moved from pages to pages, so that all layers and depths share a few. Knows nothing of who asks; run by page_kernel.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from common.ggml.builder import GraphBuilder
from common.ggml.graph import Graph
from common.ggml.tensor import F16, F32, Port, Tensor, host_view
from common.ggml.window import Window, WindowPlace
from common.limits import PAGE_PAD_TOKENS

NODES_PER_PAGE_MAX, NODES_PER_PAGE_READ_OFF = 32, 16
LASTING_MASKS = 2
"""A few tokens straddle no more pages. The last few rows of many can have more that are masked, of small pages."""
F32_BYTES = 4
Extents = tuple[int, int, int]


@dataclass(frozen=True)
class PageShape:
    """What the pages of a model have in common: `n_head_kv` heads of `head_dim` elements side by side in a row."""

    n_head_kv: int
    head_dim: int
    page_tokens: int
    ggml_type: int = F16

    def windows(self, n_keys: int) -> tuple[Extents, Extents]:
        """How much of keys and values is looked at, innermost axis first."""
        d, n_head = self.head_dim, self.n_head_kv
        if self.ggml_type == F16:
            return (d, n_keys, n_head), (n_keys, d, n_head)
        return (d * n_head, n_keys, 1), (d * n_head, n_keys, 1)


@dataclass(eq=False)
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
    _places: tuple[WindowPlace, WindowPlace] | None = field(default=None, init=False, repr=False)

    def places(self, shape: PageShape) -> tuple[WindowPlace, WindowPlace]:
        """Where keys and values are looked at. Raises EngineError when their tensors do not reach that far."""
        if self._places is None:
            k, v = shape.windows(self.n_keys)
            k_place = WindowPlace(self.k, k, self.k_strides, self.k_offset)
            self._places = k_place, WindowPlace(self.v, v, self.v_strides, self.v_offset)
        return self._places

    def n_read(self, end: int) -> int:
        """Keys that are read when nobody sees positions from `end` on: a few more than are seen."""
        seen = min(self.n_keys, end - self.first_position)
        return -(-seen // PAGE_PAD_TOKENS) * PAGE_PAD_TOKENS


@dataclass
class PageNodes:
    """The nodes of one page: its results, and what changes with the page and with the number of keys read."""

    ref: PageRef
    """The page that is looked at now"""
    keys: Window
    values: Window
    mask: Tensor | None
    n_read: int
    output: Tensor
    scores: Tensor
    weights: Tensor
    windows: list[tuple[Tensor, int]] = field(default_factory=list)
    """(tensor, axis of the keys) of views on memory that stays as it is"""
    packed: list[tuple[Tensor, int]] = field(default_factory=list)
    """(tensor, axis of the keys) of what lies without gaps: the strides of later axes follow"""
    turned: Tensor | None = None
    """The weights with their first two axes swapped"""
    lying: Lying | None = None
    """Where results are read off in memory"""

    def move(self, ref: PageRef, shape: PageShape) -> None:
        """Looks at another page with room for as many keys."""
        if ref is not self.ref:
            self.ref, (keys, values) = ref, ref.places(shape)
            self.keys.move(keys)
            self.values.move(values)

    def aim(self, n_read: int) -> None:
        """Reads the first `n_read` keys of the page."""
        if n_read == self.n_read:
            return
        self.n_read, self.lying = n_read, None
        for tensor, axis in self.windows:
            tensor.struct.ne[axis] = n_read
        for tensor, axis in self.packed:
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


Found = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Of one page: p · V f32 [n_head_kv, n_rows, head_dim], score and p [n_head_kv, n_rows] at the largest p"""


@dataclass
class PageGraph:
    """A finished graph over pages, which are others with each run. Queries and results are exchanged once it has memory
    (`connect`)."""

    graph: Graph
    pages: list[PageNodes]
    queries: Tensor
    results: Tensor | None
    """f32, a line for each page: output, scores and weights of `Found`. None where they are read off in memory"""

    def connect(self, scratch: Callable[[str, int], np.ndarray]) -> None:
        """Ties queries and results to arrays: scratch(use, n) gives f32 [n], which other graphs have for the same use.

        They are of megabytes, and only one graph runs at a time.
        """
        head_dim, n_rows, n_head, _ = self.queries.ne
        queries = scratch("queries", n_head * n_rows * head_dim).reshape(n_head, n_rows, head_dim)
        self.queries_port = Port(self.queries, queries)
        if self.results:
            n_values = self.results.ne[0]
            values = scratch("results", len(self.pages) * n_values).reshape(len(self.pages), n_values)
            self._results_port, n = Port(self.results, values), n_rows * n_head
            o = values[:, : -2 * n].reshape(-1, n_head, n_rows, head_dim)
            score, weight = (v.reshape(-1, n_head, n_rows) for v in (values[:, -2 * n : -n], values[:, -n:]))
            self._found = list(zip(o, score, weight, strict=True))

    def read(self) -> list[Found]:
        """What the last run found on each page; the next run changes it."""
        if self.results:
            self._results_port.fetch()
            return self._found
        return [_read_off(page) for page in self.pages]

    def close(self) -> None:
        """Frees the graph. Calling it again does nothing."""
        self.graph.close()


class Lying:
    """One page's results as arrays over the graph's memory."""

    def __init__(self, page: PageNodes) -> None:
        self.output, scores, weights = (host_view(t)[0] for t in (page.output, page.scores, page.weights))
        self._rows, n_keys = weights.shape[:2], weights.shape[2]
        self._scores, self._flat = scores.reshape(-1), weights.reshape(-1)
        self._weights = weights.reshape(-1, n_keys)
        self._starts = np.arange(len(self._weights)) * n_keys

    def read(self) -> Found:
        """At the largest weight of each row."""
        at = self._weights.argmax(axis=1)
        at += self._starts
        return self.output, self._scores.take(at).reshape(self._rows), self._flat.take(at).reshape(self._rows)


def _read_off(page: PageNodes) -> Found:
    if page.lying is None:
        page.lying = Lying(page)
    return page.lying.read()


class PageGraphBuilder:
    """Makes one graph of `n_rows` query rows over pages."""

    def __init__(
        self, shape: PageShape, key_numbers: Tensor, n_rows: int, scale: float, lasting_mask: Tensor | None
    ) -> None:
        """key_numbers: i32 [page_tokens], counting from 0.

        lasting_mask: room for masks of LASTING_MASKS pages, for graphs whose results are read off in memory; None for
        others.
        """
        self._shape, self._key_numbers, self._n_rows, self._scale = shape, key_numbers, n_rows, scale
        self._lasting_mask, self._reads_off = lasting_mask, lasting_mask is not None

    def build(self, pages: Sequence[PageRef], n_whole: int) -> PageGraph:
        """All pages but the first `n_whole` get a mask. Raises EngineError.

        The graph reads every page whole until it is aimed, so that it gets memory for that.
        """
        shape, n_rows = self._shape, self._n_rows
        per_page = NODES_PER_PAGE_READ_OFF if self._reads_off else NODES_PER_PAGE_MAX
        self._g = g = GraphBuilder(len(pages) * per_page + 2)
        add = self._add_f16 if shape.ggml_type == F16 else self._add_widened
        try:
            self._queries = g.input(F32, shape.head_dim, n_rows, shape.n_head_kv)
            nodes, results = [], None
            if not self._reads_off:
                results = g.input(F32, (shape.head_dim + 2) * n_rows * shape.n_head_kv, len(pages))
            for number, ref in enumerate(pages):
                nodes.append(add(ref, self._mask(ref, number - n_whole) if number >= n_whole else None))
                if results:  # now, so that the next page's scores may lie where this one's do
                    self._pick(nodes[-1], g.view(results, results.ne[:1], (), number * results.nb[1]))
        except BaseException:
            g.drop()
            raise
        return PageGraph(g.finish(), nodes, self._queries, results)

    def _mask(self, ref: PageRef, number: int) -> Tensor:
        shape = ref.n_keys, self._n_rows
        if self._lasting_mask is None or number >= LASTING_MASKS:
            return self._g.input(F16, *shape)
        return self._g.view(self._lasting_mask, shape, (), number * self._lasting_mask.nb[1])

    def _add_f16(self, ref: PageRef, mask: Tensor | None) -> PageNodes:
        g = self._g
        k, v = self._windows(ref)
        scores = g.precise(g.matmul(k, self._queries))  # [n, n_rows, n_head_kv]
        weights = g.soft_max(scores, mask, self._scale)
        nodes = self._page(ref, (k, v), mask, g.matmul(v, weights), scores, weights)
        nodes.windows += [(k, 1), (v, 0)]
        return nodes

    def _add_widened(self, ref: PageRef, mask: Tensor | None) -> PageNodes:
        g, d, n_head, n = self._g, self._shape.head_dim, self._shape.n_head_kv, ref.n_keys
        numbers = g.view(self._key_numbers, (n,))
        rows = self._windows(ref)
        wide = [g.get_rows(each, numbers) for each in rows]
        k, v = (g.view(each, (d, n, n_head), (each.nb[1], d * F32_BYTES)) for each in wide)
        scores = g.precise(g.matmul(k, self._queries))
        weights = g.soft_max(scores, mask, self._scale)
        turned = g.permute(weights, 1, 0, 2, 3)  # [n_rows, n, n_head_kv]
        nodes = self._page(ref, rows, mask, g.outer_product(v, turned), scores, weights)
        nodes.windows += [(numbers, 0), *((each, 1) for each in (*rows, *wide, k, v))]
        nodes.turned = turned
        return nodes

    def _windows(self, ref: PageRef) -> tuple[Tensor, Tensor]:
        k, v = self._shape.windows(ref.n_keys)
        n_strides = 2 if self._shape.ggml_type == F16 else 1
        return (
            self._g.view(ref.k, k, ref.k_strides[:n_strides], ref.k_offset),
            self._g.view(ref.v, v, ref.v_strides[:n_strides], ref.v_offset),
        )

    def _page(
        self,
        ref: PageRef,
        windows: tuple[Tensor, Tensor],
        mask: Tensor | None,
        output: Tensor,
        scores: Tensor,
        weights: Tensor,
    ) -> PageNodes:
        self._g.run(output)
        if self._reads_off:
            for tensor in (output, scores, weights):
                self._g.output(tensor)
        keys, values = map(Window, windows)
        nodes = PageNodes(ref, keys, values, mask, weights.ne[0], output, scores, weights)
        nodes.packed += [(t, 0) for t in (scores, weights, *([mask] if mask else []))]
        return nodes

    def _pick(self, page: PageNodes, place: Tensor) -> None:
        """Copies a page's output to its place, and score and weight as they are at the largest weight of each row."""
        g, (n, n_rows, n_head, _) = self._g, page.weights.ne
        n_all = n_rows * n_head
        flat = g.reshape(page.weights, n, n_all)
        largest = g.reshape(g.argmax(flat), 1, n_all)
        columns = [g.reshape(t, 1, n, n_all) for t in (page.scores, page.weights)]
        offset = 0
        for found in (page.output, *(g.get_rows(column, largest) for column in columns)):
            g.run(g.copy(found, g.view(place, (found.n_elements,), (), offset * F32_BYTES)))
            offset += found.n_elements
        page.packed += [(flat, 0), *((column, 1) for column in columns)]
