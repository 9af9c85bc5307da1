"""Groups begin at multiples of their size and are folded page by page; a fold taken up elsewhere changes no bit."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from common.attention.order import fold_groups, groups
from common.attention.partial import PartialAttention, fold, fold_all


def parts(n: int) -> list[PartialAttention]:
    rng = np.random.default_rng(n)
    return [
        PartialAttention(
            rng.normal(0, 5, (2, 3)).astype(np.float32),
            rng.uniform(1, 9, (2, 3)).astype(np.float32),
            rng.normal(0, 1, (2, 3, 4)).astype(np.float32),
        )
        for _ in range(n)
    ]


@given(st.integers(0, 30), st.integers(0, 30), st.integers(1, 5))
def test_groups_are_cut_at_multiples(first: int, n: int, size: int) -> None:
    found = list(groups(first, first + n, size))
    assert [page for group in found for page in group] == list(range(first, first + n))
    assert all(len({page // size for page in group}) == 1 for group in found)
    assert len(found) == len({page // size for page in range(first, first + n)})


@given(st.integers(1, 12), st.integers(1, 4), st.data())
def test_whole_groups_folded_elsewhere_change_no_bit(n: int, size: int, data: st.DataObject) -> None:
    pages = parts(n)
    here = fold_all(fold_groups(pages, 0, size))
    n_elsewhere = data.draw(st.integers(0, n // size)) * size
    elsewhere = fold_groups(pages[:n_elsewhere], 0, size)
    prefix = [fold_all(elsewhere)] if elsewhere else []  # what a worker hands on: one accumulator
    rest = fold_groups(pages[n_elsewhere:], n_elsewhere, size)
    both = fold_all([*prefix, *rest])
    assert all(np.array_equal(getattr(here, name), getattr(both, name)) for name in "mlo")


def test_the_order_is_pages_into_groups_then_groups() -> None:
    a, b, c, d, e = parts(5)
    whole = fold(fold(fold(a, b), fold(c, d)), e)
    found = fold_all(fold_groups([a, b, c, d, e], 0, 2))
    assert all(np.array_equal(getattr(found, name), getattr(whole, name)) for name in "mlo")
