"""PageLayout: where the pages of a layer lie. A page is `page_tokens` consecutive positions, cut by absolute position.

Page j is [j * page_tokens, (j + 1) * page_tokens), whatever the sequence, the ubatches or the device, so that what is
computed over a page depends on token ids alone. Within a page, keys lie head by head, and values are transposed: one
line of all keys for each element of a row. Both are what attention reads in one go. Pure arithmetic.
Used by rows.py, sequence.py and common/engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from common.errors import EngineError
from common.limits import PAGE_PAD_TOKENS

LINE_PAD = 32
"""Elements left free behind each line of values. Lines whose distance is a power of two fall into the same few cache
sets: with these 64 bytes, turning a page of values back costs 6 ms instead of 11 (4,096 keys of 1,024 elements)."""


def n_pages(n_keys: int, page_tokens: int) -> int:
    """Pages that hold the positions [0, n_keys), the last one perhaps in part."""
    return -(-n_keys // page_tokens)


@dataclass(frozen=True)
class PageLayout:
    """Pages of a context of `n_ctx` positions with rows of `n_head` heads of `head_dim` elements.

    Raises EngineError for odd sizes.
    """

    page_tokens: int
    n_ctx: int
    n_head: int
    head_dim: int

    def __post_init__(self) -> None:
        for name, value in (("page_tokens", self.page_tokens), ("n_ctx", self.n_ctx)):
            if value < PAGE_PAD_TOKENS or value % PAGE_PAD_TOKENS:
                raise EngineError(f"{name} is {value}; it must be a multiple of {PAGE_PAD_TOKENS}")

    @property
    def n_row(self) -> int:
        """Elements of a row."""
        return self.n_head * self.head_dim

    @property
    def n_value_elements(self) -> int:
        """Elements of all values, free ones included."""
        last = n_pages(self.n_ctx, self.page_tokens) - 1
        return self.value_offset(last) + self.line(last) * self.n_row

    def n_keys(self, page: int) -> int:
        """Positions that page `page` has room for: `page_tokens`, or less in the last page of the context."""
        return min(self.page_tokens, self.n_ctx - page * self.page_tokens)

    def key_offset(self, page: int) -> int:
        """Element at which the keys of a page begin; a head's keys follow each other without gaps, then the next's."""
        return page * self.page_tokens * self.n_row

    def value_offset(self, page: int) -> int:
        """Element at which the values of a page begin."""
        return page * (self.page_tokens + LINE_PAD) * self.n_row

    def line(self, page: int) -> int:
        """Elements from one line of values to the next."""
        return self.n_keys(page) + LINE_PAD

    def covering(self, p0: int, p1: int) -> Iterator[tuple[int, int, int]]:
        """(page, first position, end position) of each piece of [p0, p1) that lies in one page."""
        while p0 < p1:
            page = p0 // self.page_tokens
            end = min(p1, (page + 1) * self.page_tokens)
            yield page, p0, end
            p0 = end

    def key_ids(self, p0: int, p1: int) -> np.ndarray:
        """i64 [p1 - p0, n_head]: where each head of the keys [p0, p1) lies, in units of head_dim elements."""
        ids = np.empty((p1 - p0, self.n_head), np.int64)
        for page, start, end in self.covering(p0, p1):
            first = page * self.page_tokens * self.n_head - page * self.page_tokens
            heads = first + np.arange(self.n_head, dtype=np.int64) * self.n_keys(page)
            ids[start - p0 : end - p0] = heads + np.arange(start, end, dtype=np.int64)[:, None]
        return ids

    def value_ids(self, p0: int, p1: int) -> np.ndarray:
        """i64 [p1 - p0, n_row]: the element at which each value of the rows [p0, p1) lies."""
        ids = np.empty((p1 - p0, self.n_row), np.int64)
        for page, start, end in self.covering(p0, p1):
            first = self.value_offset(page) - page * self.page_tokens
            lines = first + np.arange(self.n_row, dtype=np.int64) * self.line(page)
            ids[start - p0 : end - p0] = lines + np.arange(start, end, dtype=np.int64)[:, None]
        return ids
