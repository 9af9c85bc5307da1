"""Masks: which cells of the cache each row of a ubatch sees, as the tensors that attention reads.

A row sees the cells up to its own; in sliding layers only the last `window` of them. A mask is written once for a
ubatch and serves every layer of its kind and every span run at that position; for a single token only the cells are
written that come into sight or leave it. Knows nothing of layers; used by inputs.py.
"""

from __future__ import annotations

import numpy as np

from common.ggml.builder import GraphBuilder
from common.ggml.tensor import F16, Arena, Tensor

HIDDEN = np.float16(-np.inf)
VISIBLE = np.float16(0)
TENSORS_PER_MASK = 2


class CausalMask:
    """Room for ubatches of up to `n_ubatch` rows over a cache of `n_ctx` cells; window None shows all before."""

    def __init__(self, arena: Arena, n_ctx: int, n_ubatch: int, window: int | None = None) -> None:
        """Declares its tensors in the arena; `clear` must follow once they have memory."""
        self._many = arena.tensor(F16, n_ctx * n_ubatch, name="mask of a ubatch")
        self._one = arena.tensor(F16, n_ctx, name="mask of one token")
        self._window = min(window or n_ctx, n_ctx)
        self._before = self._window - 1 if window else 0
        """Columns of the band that lie before a ubatch's first cell."""
        # band[i, c]: whether row i sees cell c - before, counted from the ubatch's first cell
        sight = np.arange(n_ubatch + self._before) - self._before - np.arange(n_ubatch)[:, None]
        self._band = np.where((sight <= 0) & (sight > -self._window), VISIBLE, HIDDEN).astype(np.float16)
        self._far = HIDDEN if window else VISIBLE
        """What all rows see of the cells before the band."""
        self._visible_cells = np.zeros(n_ctx, np.float16)
        self._hidden_cells = np.full(n_ctx, HIDDEN)
        self._rows = np.empty(0, np.float16)
        self._many_at: tuple[int, int, int] | None = None
        self._one_shows = range(0)

    def clear(self) -> None:
        """Hides every cell from a single token."""
        self._one.write(self._hidden_cells)

    def view(self, g: GraphBuilder, n_kv: int, n_tokens: int) -> Tensor:
        """f16 [n_kv, n_tokens]"""
        return g.view(self._one if n_tokens == 1 else self._many, (n_kv, n_tokens))

    def write(self, position: int, n_tokens: int, n_kv: int) -> None:
        """For the rows [position, position + n_tokens) over the cells [0, n_kv); only what has changed."""
        if n_tokens == 1:
            self._show(range(max(0, position + 1 - self._window), position + 1))
        elif self._many_at != (position, n_tokens, n_kv):
            self._many_at = (position, n_tokens, n_kv)
            self._write_many(position, n_tokens, n_kv)

    def _show(self, cells: range) -> None:
        """Makes the single token's mask show exactly these cells: usually one more than before, and one less."""
        known, self._one_shows = self._one_shows, cells
        if cells.start > known.stop or cells.stop < known.start:
            self._set(known, self._hidden_cells)
            known = range(cells.start, cells.start)
        self._set(range(known.start, cells.start), self._hidden_cells)
        self._set(range(cells.stop, known.stop), self._hidden_cells)
        self._set(range(cells.start, known.start), self._visible_cells)
        self._set(range(known.stop, cells.stop), self._visible_cells)

    def _set(self, cells: range, values: np.ndarray) -> None:
        if cells:
            self._one.write(values[: len(cells)], cells.start * VISIBLE.nbytes)

    def _write_many(self, position: int, n_tokens: int, n_kv: int) -> None:
        if self._rows.size < n_tokens * n_kv:
            self._rows = np.empty(n_tokens * n_kv, np.float16)
        mask = self._rows[: n_tokens * n_kv].reshape(n_tokens, n_kv)
        first, end = position - self._before, position + n_tokens
        mask[:, : max(0, first)] = self._far
        mask[:, max(0, first) : end] = self._band[:n_tokens, max(0, -first) : self._before + n_tokens]
        mask[:, end:] = HIDDEN
        self._many.write(mask)
