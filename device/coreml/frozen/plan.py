"""Which page to build, ask and drop: pure decisions of frozen pages.

Pages are built page-major: the oldest page of every layer before the second of any, because a token needs all layers.
The share of keys that frozen pages serve is a constant per query size, as published; it is not learnt while running: an
idle engine clocks down, so probing it lies.
Knows no device, no files, no threads. Called by FrozenPages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from common.errors import SettingError

SHARES = ((1, 0.22), (8, 0.43))
"""(tokens of a query from, share of its keys that frozen pages serve); published for an A18 beside its GPU."""


REBUILD_ROOM_PAGES = 4


@dataclass(frozen=True, order=True)
class PageId:
    """One page of one layer; the order of ids is the order of building."""

    page: int
    layer: int


class PageState(StrEnum):
    QUEUED = "queued"
    BUILDING = "building"
    READY = "ready"
    DROPPED = "dropped"
    FAILED = "failed"


def check_shares(shares: Sequence[tuple[int, float]]) -> None:
    """Raises SettingError unless shares are in order, start at one token, and lie in 0..1."""
    tokens = [n for n, _ in shares]
    if (
        not shares
        or tokens[0] != 1
        or sorted(set(tokens)) != tokens
        or not all(0 <= s <= 1 for _, s in shares)
    ):
        raise SettingError(
            f"frozen shares {list(shares)}: pairs of (tokens from, share 0..1), tokens rising from 1"
        )


def share_of(n_tokens: int, shares: Sequence[tuple[int, float]] = SHARES) -> float:
    """The share for a query of `n_tokens` tokens: that of the largest size not above it."""
    return next(share for size, share in reversed(shares) if size <= max(n_tokens, 1))


def pages_of_share(n_keys: int, share: float, page_tokens: int) -> int:
    """How many whole pages come nearest to a share of the keys."""
    return math.floor(share * n_keys / page_tokens + 0.5)


def budget_pages(budget_bytes: int, page_bytes: int, n_layers: int) -> int:
    """Pages each layer may have: the budget is split evenly, because the slowest layer sets the pace."""
    return budget_bytes // page_bytes // n_layers if n_layers else 0


def pages_wanted(
    n_keys: int, page_tokens: int, per_layer: int, shares: Sequence[tuple[int, float]] = SHARES
) -> int:
    """How many of a layer's oldest pages are worth having: complete, within budget, within the largest share."""
    largest = max(share for _, share in shares)
    return min(n_keys // page_tokens, per_layer, pages_of_share(n_keys, largest, page_tokens))


def pages_to_ask(
    ready: Iterable[int],
    n_keys: int,
    n_tokens: int,
    page_tokens: int,
    shares: Sequence[tuple[int, float]] = SHARES,
    first_page: int = 0,
) -> tuple[int, ...]:
    """The ready pages that serve a query over the keys from page `first_page` on, up to `n_keys`; oldest first.

    All other keys go to ordinary kernels at the same time.
    """
    asked = n_keys - first_page * page_tokens
    most = pages_of_share(asked, share_of(n_tokens, shares), page_tokens)
    complete = sorted(page for page in ready if page >= first_page and (page + 1) * page_tokens <= n_keys)
    return tuple(complete[:most])


def drop_order(ready: Iterable[PageId]) -> list[PageId]:
    """Which pages to give up first when memory is short: the highest, over all layers."""
    return sorted(ready, reverse=True)


def may_rebuild(memory_free_bytes: int, margin_bytes: int, page_bytes: int) -> bool:
    """Whether a dropped page may come back. Four pages of room beyond the margin, so that it is not dropped at once."""
    return memory_free_bytes >= margin_bytes + REBUILD_ROOM_PAGES * page_bytes


def truncated(ids: Iterable[PageId], n_keys: int, page_tokens: int) -> list[PageId]:
    """Pages that hold a key at or above `n_keys`: their constants are no longer the layer's keys."""
    return [i for i in ids if (i.page + 1) * page_tokens > n_keys]
