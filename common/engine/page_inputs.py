"""PageInputs: tensors that outlive graphs, for attention by pages: what is handed between host and segments.

`queries` and `attended` carry one layer's queries out and its result in; `key_rows` and `value_rows` hold one layer's
rows side by side while flash attention reads them; the ids say where new rows go. Used by page_step.py and paged.py.
"""

from __future__ import annotations

import numpy as np

from common.attention.grouping import group_queries, ungroup_rows
from common.ggml.builder import GraphBuilder
from common.ggml.tensor import F16, F32, I64, Arena, Port, Tensor
from common.model.spec import ModelSpec
from common.state.pages import PageLayout


class PageInputs:
    """Room for ubatches of up to `n_ubatch` rows."""

    def __init__(self, spec: ModelSpec, n_flash: int, n_ubatch: int, buffer_type: int) -> None:
        """n_flash: positions whose rows flash attention reads, at most."""
        self._spec = spec
        self._arena = Arena(6)
        tensor, n_query = self._arena.tensor, spec.head_dim * spec.n_head
        self.queries = tensor(F32, n_query, n_ubatch, name="queries")
        self.attended = tensor(F32, n_query, n_ubatch, name="attended")
        self.key_rows = tensor(F16, spec.n_embd_kv, n_flash, name="keys as rows")
        self.value_rows = tensor(F16, spec.n_embd_kv, n_flash, name="values as rows")
        self.key_ids = tensor(I64, spec.n_head_kv * n_ubatch, name="key ids")
        self.value_ids = tensor(I64, spec.n_embd_kv * n_ubatch, name="value ids")
        self.n_bytes = self._arena.allocate(buffer_type, clear=True)
        one = (spec.n_head_kv, spec.n_head // spec.n_head_kv, spec.head_dim)
        self._one_query = Port(self.queries, np.empty(one, np.float32))
        self._one_attended = Port(self.attended, np.empty(one, np.float32))
        self._at: tuple[PageLayout, int, int] | None = None

    def ids_views(self, g: GraphBuilder, n_tokens: int) -> tuple[Tensor, Tensor]:
        """i64 [n_head_kv * n_tokens] and [n_embd_kv * n_tokens]: where keys and values go."""
        spec = self._spec
        keys = g.view(self.key_ids, (spec.n_head_kv * n_tokens,))
        return keys, g.view(self.value_ids, (spec.n_embd_kv * n_tokens,))

    def write_place(self, layout: PageLayout, position: int, n_tokens: int) -> None:
        """Where the rows [position, position + n_tokens) go; only when it has changed."""
        if self._at != (layout, position, n_tokens):
            self._at = (layout, position, n_tokens)
            self.key_ids.write(layout.key_ids(position, position + n_tokens))
            self.value_ids.write(layout.value_ids(position, position + n_tokens))

    def read_queries(self, n_tokens: int) -> np.ndarray:
        """f32 [n_head_kv, n_group * n_tokens, head_dim] of the layer at hand; the next reading may change it."""
        if n_tokens == 1:
            return self._one_query.fetch()
        shape = (n_tokens, self._spec.n_head, self._spec.head_dim)
        return group_queries(self.queries.read(np.empty(shape, np.float32)), self._spec.n_head_kv)

    def write_attended(self, rows: np.ndarray, n_tokens: int) -> None:
        """The attention output of the layer at hand, f32 in the order of read_queries."""
        if n_tokens == 1:
            self._one_attended.send(rows)
        else:
            self.attended.write(np.ascontiguousarray(ungroup_rows(rows, n_tokens)))

    def close(self) -> None:
        """Frees the memory. Calling it again does nothing."""
        self._arena.close()
