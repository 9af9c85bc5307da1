"""The merge law: attention over pages equals the fold of attention over each page, however the keys are cut.

Random shapes, query groups, masks and cut points (empty pages among them), scores from equal to overwhelming; compared
with a textbook softmax in float64 that shares no code with the fold. Also: the identity is exact, the order of two
parts changes no bit, a fold interrupted and continued elsewhere changes no bit, exponentials are base e, no NaN ever.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.attention.grouping import group_queries
from common.attention.merge import from_normalised, merge
from common.attention.partial import PartialAttention, fold, fold_all
from common.attention.reference import attend, softmax_attention

# Each fold rounds a few times (one exponential, two products, one sum), relative to the result; with up to 12 pages
# and values of order one this leaves 64 roundings of headroom.
TOLERANCE_F64 = 64 * np.finfo(np.float64).eps
TOLERANCE_F32 = 64 * np.finfo(np.float32).eps
FINITE_F32 = st.floats(-float(np.finfo(np.float32).max), float(np.finfo(np.float32).max), width=32)


@dataclass
class Case:
    """One attention problem, and its keys cut into pages."""

    q: np.ndarray  # f64 [n_head_kv, rows, head_dim]
    k: np.ndarray  # f64 [n_keys, n_head_kv, head_dim]
    v: np.ndarray  # f64 [n_keys, n_head_kv, head_dim_v]
    visible: np.ndarray  # bool [rows, n_keys]
    cuts: list[int]
    scale: float

    def pages(self) -> list[slice]:
        edges = [0, *self.cuts, len(self.k)]
        return [slice(a, b) for a, b in pairwise(edges)]

    def parts(self) -> list[PartialAttention]:
        return [
            attend(self.q, self.k[page], self.v[page], self.scale, self.visible[:, page])
            for page in self.pages()
        ]

    def check(self, got: tuple[np.ndarray, np.ndarray], tolerance: float) -> None:
        """`got` is attention over all keys, within tolerance of the size of the products that make up the scores."""
        o, lse = got
        o_whole, lse_whole = softmax_attention(self.q, self.k, self.v, self.scale, self.visible)
        assert not np.isnan(o).any()
        assert not np.isnan(lse).any()
        empty = np.isneginf(lse_whole)
        assert np.array_equal(np.isneginf(lse), empty)
        assert not o[empty].any()
        products = self.scale * np.einsum("hrd,nhd->hrn", np.abs(self.q), np.abs(self.k))
        size = 1 + (products * self.visible).max(axis=-1, initial=0.0)
        assert (np.abs(lse[~empty] - lse_whole[~empty]) <= (tolerance * size)[~empty]).all()
        # exp turns the absolute error of a score into a relative error of its weight; values are of order one
        assert (np.abs(o - o_whole) <= 4 * (tolerance * size)[..., None]).all()


@st.composite
def cases(draw: st.DrawFn) -> Case:
    n_head_kv, n_group, n_tokens = (draw(st.integers(1, n)) for n in (3, 4, 3))
    head_dim, head_dim_v, n_keys = draw(st.integers(1, 8)), draw(st.integers(1, 8)), draw(st.integers(0, 30))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    spread = draw(st.sampled_from([0.0, 1.0, 30.0]))  # equal scores, ordinary ones, nearly one-hot ones
    q = group_queries(spread * rng.standard_normal((n_tokens, n_head_kv * n_group, head_dim)), n_head_kv)
    k = rng.standard_normal((n_keys, n_head_kv, head_dim))
    if n_keys and draw(st.booleans()):
        k[draw(st.integers(0, n_keys - 1))] *= 1e4  # one overwhelming score
    visible = rng.random((q.shape[1], n_keys)) < draw(st.sampled_from([0.0, 0.3, 1.0]))
    cuts = sorted(draw(st.lists(st.integers(0, n_keys), max_size=11)))
    return Case(q, k, rng.standard_normal((n_keys, n_head_kv, head_dim_v)), visible, cuts, head_dim**-0.5)


def as_f32(part: PartialAttention) -> PartialAttention:
    return PartialAttention(*(array.astype(np.float32) for array in (part.m, part.l, part.o)))


def same_bits(a: PartialAttention, b: PartialAttention) -> bool:
    return all(np.array_equal(x, y) for x, y in ((a.m, b.m), (a.l, b.l), (a.o, b.o)))


@given(cases())
def test_the_fold_of_all_pages_is_attention_over_all_keys(case: Case) -> None:
    case.check(fold_all(case.parts()).normalised(), TOLERANCE_F64)


@given(cases())
def test_the_fold_holds_in_f32_as_it_crosses_the_wire(case: Case) -> None:
    case.check(fold_all(as_f32(part) for part in case.parts()).normalised(), TOLERANCE_F32)


@given(cases())
def test_the_merge_of_normalised_results_is_the_same(case: Case) -> None:
    case.check(merge([part.normalised() for part in case.parts()]), TOLERANCE_F64)


@given(cases(), st.data())
def test_how_folds_are_bracketed_changes_only_rounding(case: Case, data: st.DataObject) -> None:
    parts = case.parts()
    cut = data.draw(st.integers(0, len(parts) - 1))
    bracketed = [fold_all(parts[:cut])] if cut else []
    case.check(fold_all([*bracketed, fold_all(parts[cut:])]).normalised(), TOLERANCE_F64)


@given(cases(), st.data())
def test_a_fold_continued_elsewhere_changes_no_bit(case: Case, data: st.DataObject) -> None:
    parts = [as_f32(part) for part in case.parts()]
    cut = data.draw(st.integers(1, len(parts)))
    assert same_bits(fold_all([fold_all(parts[:cut]), *parts[cut:]]), fold_all(parts))


@given(cases())
def test_the_identity_changes_no_bit_and_two_parts_may_swap(case: Case) -> None:
    for part in (as_f32(part) for part in case.parts()):
        identity = PartialAttention.identity(part.m.shape, part.o.shape[-1])
        assert same_bits(fold(part, identity), part)
        assert same_bits(fold(identity, part), part)
        assert same_bits(fold(identity, identity), identity)
    parts = case.parts()
    assert same_bits(fold(parts[0], parts[-1]), fold(parts[-1], parts[0]))


@given(FINITE_F32, FINITE_F32)
def test_no_pair_of_finite_scores_makes_nan(score_a: float, score_b: float) -> None:
    one = np.ones(1, np.float32)
    a, b = (
        PartialAttention(np.array([score], np.float32), one, np.ones((1, 2), np.float32))
        for score in (score_a, score_b)
    )
    o, lse = fold(a, b).normalised()
    assert np.array_equal(o, np.ones((1, 2), np.float32))  # equal values: any weights give them back
    assert lse[0] == pytest.approx(float(np.logaddexp(np.float64(score_a), np.float64(score_b))), rel=1e-6)


def test_exponentials_are_base_e() -> None:
    one_key = attend(np.full((1, 1, 1), 3.0), np.ones((1, 1, 1)), np.ones((1, 1, 1)), 0.5)
    assert one_key.normalised()[1][0, 0] == 1.5
    assert fold(one_key, one_key).normalised()[1][0, 0] == pytest.approx(1.5 + math.log(2), abs=1e-15)


def test_merging_two_identities_is_the_identity() -> None:
    nothing = (
        np.full((2, 3, 4), 7.0),
        np.full((2, 3), -np.inf),
    )  # a peer's O is ignored where its lse is -inf
    o, lse = merge([nothing, nothing])
    assert not o.any()
    assert np.isneginf(lse).all()
    assert same_bits(from_normalised(*nothing), PartialAttention.identity((2, 3), 4, np.float64))
