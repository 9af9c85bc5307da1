"""The same rows twice: token-major for flash attention, and as pages. For `bench attend`.

One page of random rows, repeated in memory as often as there are pages, so that every byte has a place of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from common.engine.kv_source import QueryRows
from common.engine.page_graph import PageRef, PageShape
from common.engine.page_kernel import Form, PageKernel
from common.ggml.backend import Backend
from common.ggml.builder import GraphBuilder
from common.ggml.graph import ComputeBuffer
from common.ggml.quantize import quantize_rows, storage_type
from common.ggml.tensor import F16, F32, Arena, Port, Tensor
from common.limits import PAGE_TOKENS
from common.state.pages import PageLayout
from common.state.rows import PagedKeys, PagedValues

F16_BYTES = 2


@dataclass(frozen=True)
class Geometry:
    """Heads of one layer, and how many pages of it there are."""

    n_head_kv: int
    n_group: int
    head_dim: int
    n_pages: int

    @property
    def n_row(self) -> int:
        """Elements of a row."""
        return self.n_head_kv * self.head_dim

    @property
    def n_keys(self) -> int:
        """Keys of all pages."""
        return self.n_pages * PAGE_TOKENS


@dataclass(frozen=True)
class RandomPage:
    """Rows of one page: `stored` u8 [PAGE_TOKENS, row bytes] of a type, and `wide` f32, what they say exactly."""

    kind: str
    stored: np.ndarray
    wide: np.ndarray


def random_page(kind: str, n_row: int, seed: int) -> RandomPage:
    """Normal numbers as f16 or q8_0."""
    rows = np.random.default_rng(seed).standard_normal((PAGE_TOKENS, n_row), np.float32)
    stored = quantize_rows(rows, kind)
    if kind == "f16":
        return RandomPage(kind, stored, stored.view(np.float16).astype(np.float32))
    blocks = stored.reshape(-1, 34)  # a step in f16, then 32 counts
    step = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
    return RandomPage(kind, stored, (step * blocks[:, 2:].view(np.int8)).reshape(rows.shape))


class FlashRows:
    """Keys and values row after row, and flash attention over them as stock llama.cpp calls it."""

    def __init__(self, backend: Backend, geometry: Geometry, keys: RandomPage, values: RandomPage) -> None:
        self._backend, self._geometry = backend, geometry
        self._arena, self._buffers = Arena(2), [ComputeBuffer(backend)]
        kind = storage_type(keys.kind)
        self._k, self._v = (self._arena.tensor(kind, geometry.n_row, geometry.n_keys) for _ in range(2))
        self._arena.allocate(backend.buffer_type)
        for tensor, page in ((self._k, keys), (self._v, values)):
            for number in range(geometry.n_pages):
                tensor.write(page.stored, number * page.stored.nbytes)

    def attention(self, q: np.ndarray, scale: float, rows: QueryRows) -> Callable[[], np.ndarray]:
        """A call that attends the keys [0, rows.end), q as in PageKernel.attend -> f32 [n_tokens, n_head, head_dim]."""
        at, g = self._geometry, GraphBuilder(16)
        n_head = at.n_head_kv * at.n_group
        queries = g.input(F32, at.head_dim, rows.n_tokens, n_head)
        mask = g.input(F16, rows.end, rows.n_tokens)
        k, v = (self._heads(g, tensor, rows.end) for tensor in (self._k, self._v))
        out = g.output(g.flash_attention(queries, k, v, mask, scale))
        graph = g.finish()
        self._buffers.append(ComputeBuffer(self._backend))
        self._buffers[-1].place(graph)
        seen = np.arange(rows.end) <= np.arange(rows.position, rows.end)[:, None]
        masks = Port(mask, np.where(seen, np.float16(0), np.float16(-np.inf)))
        queries_port = Port(queries, q.reshape(n_head, rows.n_tokens, at.head_dim).copy())
        out_port = Port(out, np.empty((rows.n_tokens, n_head, at.head_dim), np.float32))

        def attend() -> np.ndarray:
            queries_port.send()
            masks.send()
            self._backend.compute(graph.ptr)
            return out_port.fetch()

        return attend

    def _heads(self, g: GraphBuilder, tensor: Tensor, n_keys: int) -> Tensor:
        at = self._geometry
        head = tensor.nb[1] // at.n_head_kv
        return g.view(tensor, (at.head_dim, n_keys, at.n_head_kv), (tensor.nb[1], head))

    def close(self) -> None:
        """Frees the memory."""
        for buffer in self._buffers:
            buffer.close()
        self._arena.close()


class PageRows:
    """Keys and values as pages, and the product's kernel over them."""

    def __init__(
        self,
        backend: Backend,
        geometry: Geometry,
        keys: RandomPage,
        values: RandomPage,
        form: Form = "kernels",
    ) -> None:
        """form: of many rows."""
        self._arena = Arena(2)
        fill = self._fill_f16 if keys.kind == "f16" else self._fill_rows
        self.refs = fill(backend, geometry, keys, values)
        shape = PageShape(geometry.n_head_kv, geometry.head_dim, PAGE_TOKENS, storage_type(keys.kind))
        self.kernel = PageKernel(backend, shape, form=form)

    def _fill_f16(
        self, backend: Backend, at: Geometry, keys: RandomPage, values: RandomPage
    ) -> tuple[PageRef, ...]:
        layout = PageLayout(PAGE_TOKENS, at.n_keys, at.n_head_kv, at.head_dim)
        k = self._arena.tensor(F16, at.head_dim, at.n_head_kv * at.n_keys)
        v = self._arena.tensor(F16, 1, layout.n_value_elements)
        self._arena.allocate(backend.buffer_type)
        key_store, value_store = PagedKeys(k, layout), PagedValues(v, layout)
        for page in range(at.n_pages):
            key_store.write(page * PAGE_TOKENS, keys.stored.reshape(-1))
            value_store.write(page * PAGE_TOKENS, values.stored.reshape(-1))
        head, line = at.head_dim * F16_BYTES, layout.line(0) * F16_BYTES
        strides = (head, PAGE_TOKENS * head), (line, at.head_dim * line)
        return tuple(
            PageRef(
                k, layout.key_offset(page) * F16_BYTES, strides[0],
                v, layout.value_offset(page) * F16_BYTES, strides[1],
                page * PAGE_TOKENS, PAGE_TOKENS,
            )
            for page in range(at.n_pages)
        )  # fmt: skip

    def _fill_rows(
        self, backend: Backend, at: Geometry, keys: RandomPage, values: RandomPage
    ) -> tuple[PageRef, ...]:
        kind = storage_type(keys.kind)
        k, v = (self._arena.tensor(kind, at.n_row, at.n_keys) for _ in range(2))
        self._arena.allocate(backend.buffer_type)
        n_bytes, refs = keys.stored.nbytes, []
        for page in range(at.n_pages):
            k.write(keys.stored, page * n_bytes)
            v.write(values.stored, page * n_bytes)
            place = page * n_bytes, (k.nb[1], 0)
            refs.append(PageRef(k, *place, v, *place, page * PAGE_TOKENS, PAGE_TOKENS))
        return tuple(refs)

    def close(self) -> None:
        """Frees the memory."""
        self.kernel.close()
        self._arena.close()
