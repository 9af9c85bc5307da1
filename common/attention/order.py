"""The one order in which partial results become the whole: pages into groups, groups from the oldest to the newest.

    group g = fold of its pages, left to right        attention = ((g0 + g1) + g2) + ...

Rounding depends on the order, so every process folds in this one, and where a page was computed changes no bit. Whoever
holds the oldest groups may fold them and hand on the accumulators; the rest goes on from there. Pure.
Used by common/engine and by the worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from common.attention.partial import PartialAttention, fold_all


def groups(first_page: int, end_page: int, group_pages: int) -> Iterator[range]:
    """The pages [first_page, end_page) by group, oldest first; a group is `group_pages` pages from a multiple of it."""
    while first_page < end_page:
        end = min(end_page, (first_page // group_pages + 1) * group_pages)
        yield range(first_page, end)
        first_page = end


def fold_groups(
    pages: Sequence[PartialAttention], first_page: int, group_pages: int
) -> list[PartialAttention]:
    """One partial for each group of consecutive pages from `first_page` on. Whole groups need all their pages here."""
    end_page = first_page + len(pages)
    return [
        fold_all(pages[page - first_page] for page in group)
        for group in groups(first_page, end_page, group_pages)
    ]
