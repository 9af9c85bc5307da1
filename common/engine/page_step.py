"""Steps over a sequence with pages: layers that attend to everything write into pages, and attend in two ways.

Many rows (`PageStep`): flash attention, to the bit as without pages; pages of the layer at hand are turned back to rows
first, into memory that all layers share. Attention by pages (`SegmentStep`): the graph is cut where a layer has
its queries; the host then asks whoever holds the pages, and writes the result for the next part to go on with. Other
layers are as in step.py. Made by paged.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from common.ggml.tensor import Tensor
from common.state.pages import PageLayout, n_pages
from common.wire.rows import KIND_K, KIND_V

from .page_inputs import PageInputs
from .step import F16_BYTES, Step


@dataclass(frozen=True)
class Cut:
    """The graph stops before node `n_nodes`, where the queries of `layer` are ready; their scores take `scale`."""

    layer: int
    scale: float
    n_nodes: int


@dataclass(kw_only=True)
class PageStep(Step):
    """A step of many rows."""

    pages: PageInputs
    cuts: list[Cut] = field(default_factory=list)
    gathered: list[tuple[int, tuple[tuple[Tensor, int], ...]]] = field(default_factory=list)
    """(first position of the last page, its tensors and the axis of the keys), once for each layer"""

    @property
    def _layout(self) -> PageLayout:
        assert self.state.pages is not None, "made for sequences with pages only"
        return self.state.pages

    def has_pages(self, layer: int) -> bool:
        """Whether a layer attends to everything."""
        return self.spec.kind(layer) == "attention"

    def keep_rows(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        """As Step, into pages."""
        if not self.has_pages(layer):
            super().keep_rows(layer, q, k, v)
            return
        g, spec, n = self.builder, self.spec, self.n_tokens
        for t in (q, v, k):
            g.run(t)
        tensors = self.state.layers[layer].tensors
        key_ids, value_ids = self.pages.ids_views(g, n)
        g.run(g.set_rows(tensors[KIND_K], g.reshape(k, spec.head_dim, spec.n_head_kv * n), key_ids))
        g.run(g.set_rows(tensors[KIND_V], g.reshape(v, 1, spec.n_embd_kv * n), value_ids))

    def _rows(self, layer: int) -> tuple[Tensor, Tensor]:
        """As Step; copied out of the pages."""
        if not self.has_pages(layer):
            return super()._rows(layer)
        g, tensors = self.builder, self.state.layers[layer].tensors
        d, n_head, row = self.spec.head_dim, self.spec.n_head_kv, self.spec.n_embd_kv
        layout = self._layout
        for page in range(n_pages(self.n_kv, layout.page_tokens)):
            first = page * layout.page_tokens
            n, place = min(layout.n_keys(page), self.n_kv - first), first * row * F16_BYTES
            strides = (d * F16_BYTES, layout.n_keys(page) * d * F16_BYTES)
            keys = g.view(tensors[KIND_K], (d, n, n_head), strides, layout.key_offset(page) * F16_BYTES)
            key_rows = g.view(self.pages.key_rows, (d, n, n_head), (row * F16_BYTES, d * F16_BYTES), place)
            line = (layout.line(page) * F16_BYTES,)
            lines = g.view(tensors[KIND_V], (n, row), line, layout.value_offset(page) * F16_BYTES)
            turned, value_rows = g.transpose(lines), g.view(self.pages.value_rows, (row, n), (), place)
            copies = g.run(g.copy(keys, key_rows)), g.run(g.copy(turned, value_rows))
        follow = (
            (keys, 1),
            (key_rows, 1),
            (lines, 0),
            (turned, 1),
            (value_rows, 1),
            *((c, 1) for c in copies),
        )
        self.gathered.append((first, follow))
        return self.pages.key_rows, self.pages.value_rows

    def aim(self, n_kv: int) -> None:
        """As Step; n_kv ends in the page that it ended in when the graph was built."""
        super().aim(n_kv)
        for first, tensors in self.gathered:
            for tensor, axis in tensors:
                tensor.struct.ne[axis] = n_kv - first


@dataclass(kw_only=True)
class SegmentStep(PageStep):
    """A step that is cut at each layer with pages."""

    def attend(self, layer: int, q: Tensor, scale: float) -> Tensor:
        """As Step; somebody else attends, between two parts of the graph."""
        if not self.has_pages(layer):
            return super().attend(layer, q, scale)
        g, shape = self.builder, (self.spec.head_dim * self.spec.n_head, self.n_tokens)
        g.run(g.copy(q, g.view(self.pages.queries, shape)))
        self.cuts.append(Cut(layer, scale, g.n_nodes))
        return g.view(self.pages.attended, shape)
