"""KvSource: who holds the keys and values of some pages and attends them; where they are is nobody else's business.

A source is asked first and awaited later, so that one that computes elsewhere does so while the next one computes here
(`attend`). Implemented by local_pages.py (pages in this process); used by paged.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np

from common.attention.partial import PartialAttention, fold_all

if TYPE_CHECKING:
    from .local_pages import LocalPages


@dataclass(frozen=True, eq=False)
class QueryRows:
    """The rows of a query: `n_tokens` tokens from `position` on, each in `n_group` heads. Equal to itself only.

    Row g * n_tokens + t is token t in member g of a group of heads; it sees the keys [0, position + t].
    """

    position: int
    n_tokens: int
    n_group: int

    @property
    def n_rows(self) -> int:
        """Rows for each key/value head."""
        return self.n_group * self.n_tokens

    @property
    def end(self) -> int:
        """Keys that the last token sees."""
        return self.position + self.n_tokens

    @cached_property
    def positions(self) -> np.ndarray:
        """i64 [n_rows]: the position of each row's token."""
        return np.tile(np.arange(self.position, self.end), self.n_group)


@dataclass(frozen=True, eq=False)
class PageQuery:
    """Queries of one layer for all keys up to their own: q f32 [n_head_kv, n_rows, head_dim], unscaled; scores are
    multiplied by `scale`. The array is the asker's: it may change once the answer is there."""

    layer: int
    q: np.ndarray
    scale: float
    rows: QueryRows


class KvSource(Protocol):
    """Some of the pages of a sequence, the same ones in every layer. One query at a time, one thread."""

    def start_attend(self, query: PageQuery) -> None:
        """Begins to attend. Returns at once when somebody else computes. Raises EngineError or LinkError."""
        ...

    def wait_attend(self) -> Iterable[PartialAttention]:
        """The accumulators of what was asked last: oldest pages first, to be folded from left to right.

        They are taken once, before the next query; of many rows each has megabytes, and may be made when it is taken.
        """
        ...


ChooseSources = Callable[["LocalPages"], Sequence[KvSource]]
"""Who attends for a sequence: given the pages in this process, returns the sources of all pages, the oldest first.
Asked anew before each ubatch that attends by pages; may move the pages' `first_page`. Of two ubatches that run
staggered each has its own sources, and both are asked before the first is awaited. Given to set_sources."""


def start_attend(sources: Sequence[KvSource], query: PageQuery) -> None:
    """Asks every source, before the first one is awaited."""
    for source in sources:
        source.start_attend(query)


def wait_attend(sources: Sequence[KvSource]) -> PartialAttention:
    """Attention over the pages of all sources, which hold older pages first; folded in the one order.

    Put whoever computes in this process last: it is awaited first, so that it computes while the others do.
    """
    newest_first = [source.wait_attend() for source in reversed(sources)]
    return fold_all(part for parts in reversed(newest_first) for part in parts)
