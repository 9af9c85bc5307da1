"""Inputs: the tensors a step reads, which outlive graphs, and the few bytes that must be written before each run.

The causal mask is written once for a ubatch and serves every layer and every span run at that position; for a single
token only the newly visible cells are written. Knows nothing of layers; used by step.py and graphs.py.
"""

from __future__ import annotations

import numpy as np

from common.ggml.graph import GraphBuilder
from common.ggml.tensor import F16, F32, I32, I64, Arena, Tensor

HIDDEN = np.float16(-np.inf)
VISIBLE = np.float16(0)
SECTIONS = 4


class Inputs:
    """Room for ubatches of up to `n_ubatch` rows over a cache of `n_ctx` cells."""

    def __init__(self, n_embd: int, n_ctx: int, n_ubatch: int, sections: bool, buffer_type: int) -> None:
        self._sections, self._n_ubatch = sections, n_ubatch
        self._arena = Arena(7)
        tensor = self._arena.tensor
        self.tokens = tensor(I32, n_ubatch, name="tokens")
        self.residual = tensor(F32, n_embd, n_ubatch, name="residual")
        self.positions = tensor(I32, n_ubatch * (SECTIONS if sections else 1), name="positions")
        self.cells = tensor(I64, n_ubatch, name="cells")
        self.out_ids = tensor(I32, n_ubatch, name="out ids")
        self.mask_many = tensor(F16, n_ctx * n_ubatch, name="mask of a ubatch")
        self.mask_one = tensor(F16, n_ctx, name="mask of one token")
        self.n_bytes = self._arena.allocate(buffer_type)

        self._position_numbers = np.arange(n_ctx, dtype=np.int32)
        self._cell_numbers = np.arange(n_ctx, dtype=np.int64)
        self._triangle = np.where(np.tri(n_ubatch, dtype=bool), VISIBLE, HIDDEN).astype(np.float16)
        self._visible_cells = np.zeros(n_ctx, np.float16)
        self._hidden_cells = np.full(n_ctx, HIDDEN)
        self._mask_rows = np.empty(0, np.float16)
        self._at: tuple[int, int] | None = None  # position and rows the positions and cells are written for
        self._mask_many_at: tuple[int, int, int] | None = None
        self._mask_one_visible = 0
        self.mask_one.write(self._hidden_cells)

    # --- views for a graph under construction

    def positions_view(self, g: GraphBuilder, n_tokens: int) -> Tensor:
        """i32 [n_tokens], or [4 * n_tokens] with sections."""
        return g.view(self.positions, (n_tokens * (SECTIONS if self._sections else 1),))

    def cells_view(self, g: GraphBuilder, n_tokens: int) -> Tensor:
        """i64 [n_tokens]: where rows go in the cache."""
        return g.view(self.cells, (n_tokens,))

    def out_ids_view(self, g: GraphBuilder, n_out: int) -> Tensor:
        """i32 [n_out]: rows whose logits are wanted."""
        return g.view(self.out_ids, (n_out,))

    def mask_view(self, g: GraphBuilder, n_kv: int, n_tokens: int) -> Tensor:
        """f16 [n_kv, n_tokens]"""
        return g.view(self.mask_one if n_tokens == 1 else self.mask_many, (n_kv, n_tokens))

    # --- writing before a run

    def write_rows(self, rows: np.ndarray) -> None:
        """Token ids i32 [n_tokens] or residual f32 [n_tokens, n_embd]."""
        (self.tokens if rows.ndim == 1 else self.residual).write(rows)

    def write_place(self, position: int, n_tokens: int, n_kv: int) -> None:
        """Positions, cells and mask of a ubatch of `n_tokens` rows from `position`; only what has changed."""
        if self._at != (position, n_tokens):
            self._at = (position, n_tokens)
            self._write_positions(position, n_tokens)
        if n_tokens == 1:
            self._show_cells(position + 1)
        elif self._mask_many_at != (position, n_tokens, n_kv):
            self._mask_many_at = (position, n_tokens, n_kv)
            self._write_mask(position, n_tokens, n_kv)

    def write_out_ids(self, n_tokens: int, n_out: int) -> None:
        """The last `n_out` of `n_tokens` rows."""
        self.out_ids.write(self._position_numbers[n_tokens - n_out : n_tokens])

    def _write_positions(self, position: int, n_tokens: int) -> None:
        numbers = self._position_numbers[position : position + n_tokens]
        self.cells.write(self._cell_numbers[position : position + n_tokens])
        if self._sections:  # text has the same position in the first three sections and none in the fourth
            numbers = np.concatenate([numbers, numbers, numbers, np.zeros_like(numbers)])
        self.positions.write(numbers)

    def _show_cells(self, n_visible: int) -> None:
        """Makes the single token's mask show cells [0, n_visible): usually one cell more than before."""
        known = self._mask_one_visible
        if n_visible > known:
            self.mask_one.write(self._visible_cells[known:n_visible], known * VISIBLE.nbytes)
        elif n_visible < known:
            self.mask_one.write(self._hidden_cells[n_visible:known], n_visible * HIDDEN.nbytes)
        self._mask_one_visible = n_visible

    def _write_mask(self, position: int, n_tokens: int, n_kv: int) -> None:
        if self._mask_rows.size < n_tokens * n_kv:
            self._mask_rows = np.empty(n_tokens * n_kv, np.float16)
        mask = self._mask_rows[: n_tokens * n_kv].reshape(n_tokens, n_kv)
        end = position + n_tokens
        mask[:, :position] = VISIBLE
        mask[:, position:end] = self._triangle[:n_tokens, :n_tokens]
        mask[:, end:] = HIDDEN
        self.mask_many.write(mask)

    def close(self) -> None:
        """Frees the memory. Calling it again does nothing."""
        self._arena.close()
