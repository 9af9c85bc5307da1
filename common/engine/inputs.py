"""Inputs: the tensors a step reads, which outlive graphs, and the few bytes that must be written before each run.

There is a mask for each kind of layer that attends (masks.py). Knows nothing of layers; used by step.py and graphs.py.
"""

from __future__ import annotations

import numpy as np

from common.ggml.builder import GraphBuilder
from common.ggml.tensor import F32, I32, I64, Arena, Tensor

from .masks import TENSORS_PER_MASK, CausalMask

SECTIONS = 4


class Inputs:
    """Room for ubatches of up to `n_ubatch` rows over a cache of `n_ctx` cells."""

    def __init__(
        self,
        n_embd: int,
        n_ctx: int,
        n_ubatch: int,
        sections: bool,
        window: int | None,
        buffer_type: int,
        n_flash: int | None = None,
    ) -> None:
        """sections: whether positions come four times (mRoPE). window: of the sliding layers, None without any.

        n_flash: cells that layers which attend to everything see by flash attention; None for all.
        """
        self._sections, self._n_ubatch = sections, n_ubatch
        self._arena = Arena(5 + 2 * TENSORS_PER_MASK)
        tensor = self._arena.tensor
        self.tokens = tensor(I32, n_ubatch, name="tokens")
        self.residual = tensor(F32, n_embd, n_ubatch, name="residual")
        self.positions = tensor(I32, n_ubatch * (SECTIONS if sections else 1), name="positions")
        self.cells = tensor(I64, n_ubatch, name="cells")
        self.out_ids = tensor(I32, n_ubatch, name="out ids")
        self._masks = {"attention": CausalMask(self._arena, n_flash or n_ctx, n_ubatch)}
        if window is not None:
            self._masks["sliding"] = CausalMask(self._arena, n_ctx, n_ubatch, window)
        self.n_bytes = self._arena.allocate(buffer_type)

        self._position_numbers = np.arange(n_ctx, dtype=np.int32)
        self._cell_numbers = np.arange(n_ctx, dtype=np.int64)
        self._at: tuple[int, int] | None = None  # position and rows the positions and cells are written for
        for mask in self._masks.values():
            mask.clear()

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

    def mask_view(self, g: GraphBuilder, kind: str, n_kv: int, n_tokens: int) -> Tensor:
        """f16 [n_kv, n_tokens] for layers of a kind that attends."""
        return self._masks[kind].view(g, n_kv, n_tokens)

    # --- writing before a run

    def write_rows(self, rows: np.ndarray) -> None:
        """Token ids i32 [n_tokens] or residual f32 [n_tokens, n_embd]."""
        (self.tokens if rows.ndim == 1 else self.residual).write(rows)

    def write_place(self, position: int, n_tokens: int, n_kv: int, *, by_pages: bool = False) -> None:
        """Positions, cells and masks of a ubatch of `n_tokens` rows from `position`; only what has changed.

        by_pages: layers that attend to everything read no mask.
        """
        if self._at != (position, n_tokens):
            self._at = (position, n_tokens)
            self._write_positions(position, n_tokens)
        for kind, mask in self._masks.items():
            if kind != "attention" or not by_pages:
                mask.write(position, n_tokens, n_kv)

    def write_out_ids(self, n_tokens: int, n_out: int) -> None:
        """The last `n_out` of `n_tokens` rows."""
        self.out_ids.write(self._position_numbers[n_tokens - n_out : n_tokens])

    def _write_positions(self, position: int, n_tokens: int) -> None:
        numbers = self._position_numbers[position : position + n_tokens]
        self.cells.write(self._cell_numbers[position : position + n_tokens])
        if self._sections:  # text has the same position in the first three sections and none in the fourth
            numbers = np.concatenate([numbers, numbers, numbers, np.zeros_like(numbers)])
        self.positions.write(numbers)

    def close(self) -> None:
        """Frees the memory. Calling it again does nothing."""
        self._arena.close()
