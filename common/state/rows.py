"""RowStore: the K or V rows of one layer, whichever way they lie in memory; rows go in and out token-major.

`TokenRows` is one row after the other, as flash attention reads them. `PagedKeys` and `PagedValues` are for attention
by pages (pages.py): keys of a page head by head, values of a page transposed. Used by sequence.py.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from common.ggml.tensor import Tensor

from .pages import PageLayout

F16_BYTES = 2


class RowStore(Protocol):
    """Rows of `row_bytes` bytes of one layer and kind."""

    tensor: Tensor
    row_bytes: int

    def read(self, p0: int, p1: int) -> np.ndarray:
        """A copy of the rows [p0, p1), u8 [(p1 - p0) * row_bytes]."""
        ...

    def write(self, p0: int, rows: np.ndarray) -> None:
        """Writes whole rows, u8, from position p0 on."""
        ...


class TokenRows:
    """Row p at byte p * row_bytes."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.row_bytes = tensor, tensor.nb[1]

    def read(self, p0: int, p1: int) -> np.ndarray:
        """See RowStore."""
        return self.tensor.read(np.empty((p1 - p0) * self.row_bytes, np.uint8), p0 * self.row_bytes)

    def write(self, p0: int, rows: np.ndarray) -> None:
        """See RowStore."""
        self.tensor.write(rows, p0 * self.row_bytes)


class PagedKeys:
    """f16 keys, head by head within a page."""

    def __init__(self, tensor: Tensor, layout: PageLayout) -> None:
        self.tensor, self.layout = tensor, layout
        self.row_bytes = layout.n_row * F16_BYTES

    def read(self, p0: int, p1: int) -> np.ndarray:
        """See RowStore."""
        rows = np.empty((p1 - p0, self.layout.n_head, self.layout.head_dim), np.uint16)
        for page, start, end in self.layout.covering(p0, p1):
            heads = np.empty((self.layout.n_head, (end - start) * self.layout.head_dim), np.uint16)
            self.tensor.read_strips(heads, *self._place(page, start))
            rows[start - p0 : end - p0] = heads.reshape(self.layout.n_head, end - start, -1).swapaxes(0, 1)
        return rows.reshape(-1).view(np.uint8)

    def write(self, p0: int, rows: np.ndarray) -> None:
        """See RowStore."""
        keys = rows.view(np.uint16).reshape(-1, self.layout.n_head, self.layout.head_dim)
        for page, start, end in self.layout.covering(p0, p0 + len(keys)):
            heads = np.ascontiguousarray(keys[start - p0 : end - p0].swapaxes(0, 1))
            self.tensor.write_strips(heads.reshape(self.layout.n_head, -1), *self._place(page, start))

    def _place(self, page: int, position: int) -> tuple[int, int]:
        """(byte of the first head's key at `position`, bytes from there to the next head's)"""
        layout = self.layout
        first = layout.key_offset(page) + (position - page * layout.page_tokens) * layout.head_dim
        return first * F16_BYTES, layout.n_keys(page) * layout.head_dim * F16_BYTES


class PagedValues:
    """f16 values, transposed within a page."""

    def __init__(self, tensor: Tensor, layout: PageLayout) -> None:
        self.tensor, self.layout = tensor, layout
        self.row_bytes = layout.n_row * F16_BYTES

    def read(self, p0: int, p1: int) -> np.ndarray:
        """See RowStore."""
        rows = np.empty((p1 - p0, self.layout.n_row), np.uint16)
        for page, start, end in self.layout.covering(p0, p1):
            lines = np.empty((self.layout.n_row, end - start), np.uint16)
            self.tensor.read_strips(lines, *self._place(page, start))
            rows[start - p0 : end - p0] = lines.T
        return rows.reshape(-1).view(np.uint8)

    def write(self, p0: int, rows: np.ndarray) -> None:
        """See RowStore."""
        values = rows.view(np.uint16).reshape(-1, self.layout.n_row)
        for page, start, end in self.layout.covering(p0, p0 + len(values)):
            lines = np.ascontiguousarray(values[start - p0 : end - p0].T)
            self.tensor.write_strips(lines, *self._place(page, start))

    def _place(self, page: int, position: int) -> tuple[int, int]:
        """(byte of the first value at `position`, bytes from there to the next value of the same row)"""
        first = self.layout.value_offset(page) + position - page * self.layout.page_tokens
        return first * F16_BYTES, self.layout.line(page) * F16_BYTES
