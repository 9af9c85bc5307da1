"""Attention over pages in memory equals the formula in float64, for any shape, depth and score, and is never NaN.

Random pages of both types, groups of heads, ubatches that straddle pages, rows that see nothing of a page; the fold of
the pages' partials is compared with a textbook softmax over all keys at once. Then: what else is in a graph, how far
it reads, whose pages it read before and which rows stand beside a row change no bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.attention.order import fold_groups
from common.attention.partial import PartialAttention, fold_all
from common.attention.reference import softmax_attention
from common.engine.kv_source import QueryRows
from common.engine.page_graph import PageRef, PageShape
from common.engine.page_kernel import READ_OFF_ROWS_MAX, ROWS_MAX, Form, PageKernel
from common.errors import EngineError
from common.ggml.backend import Backend, choose_device
from common.ggml.tensor import F16, Arena
from common.state.pages import PageLayout, n_pages
from common.state.rows import PagedKeys, PagedValues

Q8_0, BLOCK = 8, 32


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    backend = Backend(choose_device("cpu"))
    yield backend
    backend.close()


@dataclass
class Case:
    """Keys and values of one layer, in pages, and queries at the end of them."""

    backend: Backend
    n_head: int
    n_group: int
    head_dim: int
    page_tokens: int
    n_pages: int
    ggml_type: int = F16
    form: Form = "kernels"
    seed: int = 0
    spread: float = 1.0
    k: np.ndarray = field(init=False)
    v: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        rng, n = np.random.default_rng(self.seed), self.page_tokens * self.n_pages
        self.scale = self.head_dim**-0.5
        self.layout = PageLayout(self.page_tokens, n, self.n_head, self.head_dim)
        self.rng, self.arena = rng, Arena(2)
        rows = rng.standard_normal((2, n, self.layout.n_row), np.float32)
        if self.ggml_type == F16:
            self.k, self.v = rows.astype(np.float16).astype(np.float32)
            k = self.arena.tensor(F16, self.head_dim, self.n_head * n)
            v = self.arena.tensor(F16, 1, self.layout.n_value_elements)
            self.arena.allocate(self.backend.buffer_type, clear=True)
            PagedKeys(k, self.layout).write(0, self.k.astype(np.float16).reshape(-1).view(np.uint8))
            PagedValues(v, self.layout).write(0, self.v.astype(np.float16).reshape(-1).view(np.uint8))
        else:
            k, v = (self.arena.tensor(Q8_0, self.layout.n_row, n) for _ in range(2))
            self.arena.allocate(self.backend.buffer_type)
            self.k, self.v = (self._write_q8_0(t, r) for t, r in ((k, rows[0]), (v, rows[1])))
        self.refs = tuple(self._ref(k, v, page) for page in range(self.n_pages))
        shape = PageShape(self.n_head, self.head_dim, self.page_tokens, self.ggml_type)
        self.kernel = PageKernel(self.backend, shape, form=self.form)

    @staticmethod
    def _write_q8_0(tensor, rows: np.ndarray) -> np.ndarray:
        """Stores rows as blocks of 32 (an f16 step, 32 i8 counts); returns what these say, exactly, in f32."""
        blocks = rows.reshape(-1, BLOCK)
        step = (np.abs(blocks).max(axis=1, keepdims=True) / 127).astype(np.float16)
        counts = np.rint(blocks / step.astype(np.float32)).clip(-127, 127).astype(np.int8)
        tensor.write(np.concatenate([step.view(np.uint8), counts.view(np.uint8)], axis=1))
        return (step.astype(np.float32) * counts).reshape(rows.shape)

    def _ref(self, k, v, page: int) -> PageRef:
        first, layout, d = page * self.page_tokens, self.layout, self.head_dim
        if self.ggml_type == F16:
            line = 2 * layout.line(page)
            strides = (2 * d, 2 * d * self.page_tokens), (line, d * line)
            offsets = 2 * layout.key_offset(page), 2 * layout.value_offset(page)
        else:
            strides = (k.nb[1], 0), (v.nb[1], 0)
            offsets = first * k.nb[1], first * v.nb[1]
        return PageRef(k, offsets[0], strides[0], v, offsets[1], strides[1], first, self.page_tokens)

    def queries(self, rows: QueryRows) -> np.ndarray:
        q = self.rng.standard_normal((self.n_head, rows.n_rows, self.head_dim), np.float32) * self.spread
        return q.astype(np.float16).astype(
            np.float32
        )  # the f16 form rounds them; the oracle should not differ by that

    def attend(self, q: np.ndarray, rows: QueryRows) -> list[PartialAttention]:
        refs = self.refs[: n_pages(rows.end, self.page_tokens)]
        return self.kernel.attend(q, self.scale, refs, rows)

    def oracle(self, q: np.ndarray, rows: QueryRows) -> tuple[np.ndarray, np.ndarray]:
        n = rows.end
        k, v = (a[:n].reshape(n, self.n_head, self.head_dim) for a in (self.k, self.v))
        return softmax_attention(q, k, v, self.scale, np.arange(n) <= rows.positions[:, None])

    def close(self) -> None:
        self.kernel.close()
        self.arena.close()


def check(case: Case, q: np.ndarray, rows: QueryRows, tolerance: float) -> None:
    parts = case.attend(q, rows)
    o, lse = fold_all(parts).normalised()
    o_whole, lse_whole = case.oracle(q, rows)
    for part in parts:
        assert not any(np.isnan(a).any() for a in (part.m, part.l, part.o))
    size = 1 + np.abs(lse_whole).max()
    np.testing.assert_allclose(lse, lse_whole, atol=tolerance * size, rtol=0)
    np.testing.assert_allclose(o, o_whole, atol=tolerance * size * np.abs(case.v).max(), rtol=0)


# f16: the kernel rounds weights to f16 (11 bits) before it sums values. Others: f32 throughout, sums of a few hundred.
TOLERANCE = {F16: 2e-3, Q8_0: 2e-5, "products": 2e-5}
SHAPES = st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 3, 6]), st.sampled_from([32, 64, 96, 128]))


@settings(max_examples=60)
@given(
    shape=SHAPES,
    ggml_type=st.sampled_from([F16, Q8_0]),
    page_tokens=st.sampled_from([64, 128]),
    spread=st.sampled_from([0.0, 0.1, 1.0, 30.0]),
    data=st.data(),
)
def test_the_fold_of_all_pages_is_attention(
    backend: Backend, shape: tuple[int, int, int], ggml_type: int, page_tokens: int, spread: float, data
) -> None:
    n_head, n_group, head_dim = shape
    form = data.draw(st.sampled_from(["kernels", "products"])) if ggml_type == F16 else "kernels"
    case = Case(backend, n_head, n_group, head_dim, page_tokens, 3, ggml_type, form, spread=spread)
    end = data.draw(st.integers(1, 3 * page_tokens))
    n_tokens = data.draw(st.integers(1, min(end, 150)))
    rows = QueryRows(end - n_tokens, n_tokens, n_group)
    exact = form == "products" and rows.n_rows > READ_OFF_ROWS_MAX
    check(case, case.queries(rows), rows, TOLERANCE["products" if exact else ggml_type])
    case.close()


@pytest.mark.parametrize("ggml_type", [F16, Q8_0])
def test_one_huge_score_and_equal_scores(backend: Backend, ggml_type: int) -> None:
    case = Case(backend, 2, 3, 64, 64, 3, ggml_type)
    rows = QueryRows(150, 1, 3)
    equal = np.zeros((2, 3, 64), np.float32)
    parts = case.attend(equal, rows)
    assert all((part.m == 0).all() for part in parts)
    np.testing.assert_allclose([part.l[0, 0] for part in parts], [64, 64, 23], rtol=1e-6)
    huge = np.zeros((2, 3, 64), np.float32)
    huge[:] = 500 * np.sign(case.k[70].reshape(2, 1, 64))  # key 70 outweighs all others by far
    o, _ = fold_all(case.attend(huge, rows)).normalised()
    np.testing.assert_allclose(o, np.broadcast_to(case.v[70].reshape(2, 1, 64), o.shape), rtol=1e-3)
    case.close()


def test_rows_that_see_nothing_of_a_page_are_the_identity(backend: Backend) -> None:
    case = Case(backend, 1, 2, 32, 64, 2)
    rows = QueryRows(60, 8, 2)  # tokens 60 to 63 see the first page only
    first, second = case.attend(case.queries(rows), rows)
    blind = rows.positions < 64
    assert blind.sum() == 8 and np.isfinite(first.m).all()
    assert np.isneginf(second.m[:, blind]).all() and np.isfinite(second.m[:, ~blind]).all()
    assert not second.l[:, blind].any() and not second.o[:, blind].any()
    case.close()


@pytest.mark.parametrize("ggml_type", [F16, Q8_0])
def test_more_rows_than_a_graph_takes_are_the_same_rows(backend: Backend, ggml_type: int) -> None:
    case = Case(backend, 1, 6, 32, 64, 4, ggml_type)
    rows = QueryRows(30, 150, 6)
    assert rows.n_rows > 2 * ROWS_MAX
    q = case.queries(rows)
    check(case, q, rows, TOLERANCE[ggml_type])
    many = case.attend(q, rows)
    for token in (0, 63, 149):  # of a token alone: its own bits, whatever stands beside it
        mine = rows.positions == 30 + token
        alone = case.attend(q[:, mine], QueryRows(30 + token, 1, 6))
        for a, b in zip(many, alone, strict=False):
            assert all(np.array_equal(getattr(a, name)[:, mine], getattr(b, name)) for name in "mlo")
    case.close()


@pytest.mark.parametrize("n_tokens", [193, 196, 200, 201])
def test_the_last_few_rows_of_many_beside_more_pages_than_they_straddle(
    backend: Backend, n_tokens: int
) -> None:
    """Small pages: the pages behind the first row need masks, and more of them than a few tokens ever straddle."""
    case = Case(backend, 2, 2, 32, 64, 8)
    rows = QueryRows(260, n_tokens, 2)
    assert (rows.n_rows - 1) % ROWS_MAX < READ_OFF_ROWS_MAX + 2 and rows.n_rows > ROWS_MAX
    for _ in range(2):  # masks that last must not be another ubatch's
        q = case.queries(rows)
        check(case, q, rows, TOLERANCE[F16])
        check(case, case.queries(QueryRows(300, 1, 2)), QueryRows(300, 1, 2), TOLERANCE[F16])
    case.close()


def test_what_else_is_attended_changes_no_bit(backend: Backend) -> None:
    """A page alone, among others, and after the graph was aimed further: the same accumulators."""
    case = Case(backend, 2, 3, 64, 128, 3)
    rows = QueryRows(300, 1, 3)
    q = case.queries(rows)
    together = case.attend(q, rows)
    for end in (259, 383, 300):
        case.attend(q, QueryRows(end, 1, 3))
    again = case.attend(q, rows)
    alone = [case.kernel.attend(q, case.scale, (ref,), rows)[0] for ref in case.refs]
    for a, b, c in zip(together, again, alone, strict=True):
        assert all(np.array_equal(getattr(a, n), getattr(b, n)) for n in "mlo")
        assert all(np.array_equal(getattr(a, n), getattr(c, n)) for n in "mlo")
    case.close()


@pytest.mark.parametrize("ggml_type", [F16, Q8_0])
def test_pages_of_other_layers_and_depths_share_graphs_and_memory(backend: Backend, ggml_type: int) -> None:
    """The second layer's pages by the first's kernel: no graph and no byte more, and the bits of its own kernel."""
    first, second = (Case(backend, 2, 3, 64, 64, 8, ggml_type, seed=seed) for seed in (0, 1))
    for rows in (QueryRows(8 * 64 - 1, 1, 3), QueryRows(8 * 64 - 40, 40, 3)):
        q = first.queries(rows)
        for begin in (0, 2, 4):
            refs = first.refs[begin : begin + 2]
            first.kernel.attend(q, first.scale, refs, QueryRows(8 * 64, rows.n_tokens, 3))
        n_graphs, n_bytes = first.kernel.n_graphs, first.kernel.compute_bytes
        for begin in (4, 0, 2):
            refs, deep = second.refs[begin : begin + 2], QueryRows(8 * 64, rows.n_tokens, 3)
            shared = first.kernel.attend(q, first.scale, refs, deep)
            own = second.kernel.attend(q, first.scale, refs, deep)
            for a, b in zip(shared, own, strict=True):
                assert all(np.array_equal(getattr(a, n), getattr(b, n)) for n in "mlo")
        assert (first.kernel.n_graphs, first.kernel.compute_bytes) == (n_graphs, n_bytes)
    assert first.kernel.n_graphs <= 2
    first.close()
    second.close()


@pytest.mark.parametrize("form", ["kernels", "products"])
@pytest.mark.parametrize("n_tokens", [1, 40, 200])
def test_groups_are_the_folds_of_their_pages(backend: Backend, form: Form, n_tokens: int) -> None:
    """Also of more rows than a graph takes, and from a page within a group on."""
    case = Case(backend, 1, 3, 32, 64, 7, form=form)
    rows = QueryRows(7 * 64 - n_tokens, n_tokens, 3)
    q = case.queries(rows)
    pages = case.kernel.attend(q, case.scale, case.refs[1:], rows)
    folded = case.kernel.attend_groups(q, case.scale, case.refs[1:], rows, 1, 2)
    for a, b in zip(fold_groups(pages, 1, 2), folded, strict=True):
        assert all(np.array_equal(getattr(a, n), getattr(b, n)) for n in "mlo")
    case.close()


def test_a_page_outside_its_tensor_is_refused(backend: Backend) -> None:
    case = Case(backend, 1, 1, 32, 64, 2)
    case.attend(case.queries(rows := QueryRows(127, 1, 1)), rows)
    beyond = replace(case.refs[1], k_offset=2 * case.refs[1].k_offset)
    with pytest.raises(EngineError, match=r"a window .* is not in"):
        case.kernel.attend(case.queries(rows), case.scale, (case.refs[0], beyond), rows)
    case.close()


def test_queries_of_another_shape_are_refused(backend: Backend) -> None:
    case = Case(backend, 2, 3, 64, 64, 1)
    with pytest.raises(EngineError, match=r"queries are \[2, 4, 64\], expected \[2, 3, 64\]"):
        case.attend(np.zeros((2, 4, 64), np.float32), QueryRows(5, 1, 3))
    case.close()
