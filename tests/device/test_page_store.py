"""Aim: pages that came in pieces are attended as the formula says and as the host would, to the bit, within the budget.

Method: random shapes and random cuts of the images; the answers are compared with a float64 softmax over all keys, and
with LocalPages' own kernel over the same rows written by the host's row store. What does not fit is refused and changes
nothing that is held.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.attention.order import fold_groups
from common.attention.partial import fold_all
from common.attention.reference import softmax_attention
from common.engine.kv_source import QueryRows
from common.engine.page_graph import PageRef, PageShape
from common.engine.page_kernel import PageKernel
from common.errors import (
    EngineError,
    HashMismatchError,
    NonFiniteError,
    OutOfMemoryError,
    PositionError,
    UnsupportedOperationError,
)
from common.ggml.backend import Backend, choose_device
from common.ggml.ffi import DEVICE_GPU
from common.ggml.tensor import F16, Arena
from common.state.pages import PageLayout
from common.state.rows import PagedKeys, PagedValues
from device.held_group import HeldForm
from device.page_store import PageStore

from .page_end import Pages

TOLERANCE = 4e-3
"""f16 weights, as tests/common/engine/test_page_kernel.py reasons."""


@pytest.fixture(scope="module")
def backend():
    backend = Backend(choose_device("cpu"))
    yield backend
    backend.close()


def form_of(pages: Pages, **changes) -> HeldForm:
    fields = dict(
        layers=pages.layers, n_head_kv=pages.n_head_kv, n_group=pages.n_group, head_dim=pages.head_dim,
        page_tokens=pages.page_tokens, group_pages=pages.group_pages,
    )  # fmt: skip
    return HeldForm(**(fields | changes))


def filled(backend: Backend, pages: Pages, n_pages: int | None = None, piece_bytes: int = 1000) -> PageStore:
    store = PageStore(backend, lambda: 1 << 30)
    store.configure(form_of(pages), 1 << 30)
    for page in range(pages.n_pages if n_pages is None else n_pages):
        for layer in pages.layers:
            put(store, pages, layer, page, piece_bytes)
    return store


def put(store: PageStore, pages: Pages, layer: int, page: int, piece_bytes: int = 1000) -> int:
    for piece in pages.appends(layer, page, piece_bytes):
        data = np.frombuffer(piece.piece.joined(), np.uint8)
        n_now = store.put_piece(layer, page, piece.offset, data, piece.image_xxh3)
    return n_now


def host_parts(backend: Backend, pages: Pages, layer: int, q: np.ndarray, n_tokens: int):
    """What the host computes over the same rows in one sequence's memory, a partial a group."""
    n = pages.n_pages * pages.page_tokens
    layout, arena = PageLayout(pages.page_tokens, n, pages.n_head_kv, pages.head_dim), Arena(2)
    k = arena.tensor(F16, pages.head_dim, pages.n_head_kv * n)
    v = arena.tensor(F16, 1, layout.n_value_elements)
    arena.allocate(backend.buffer_type, clear=True)
    for store, rows in zip((PagedKeys(k, layout), PagedValues(v, layout)), pages.rows(layer), strict=True):
        store.write(0, rows.reshape(-1).view(np.uint8))
    head, line = 2 * pages.head_dim, 2 * layout.line(0)
    refs = tuple(
        PageRef(k, 2 * layout.key_offset(page), (head, pages.page_tokens * head), v, 2 * layout.value_offset(page),
                (line, pages.head_dim * line), page * pages.page_tokens, pages.page_tokens)
        for page in range(pages.n_pages)
    )  # fmt: skip
    kernel = PageKernel(backend, PageShape(pages.n_head_kv, pages.head_dim, pages.page_tokens))
    parts = kernel.attend(q, pages.scale, refs, QueryRows(n + 100, n_tokens, pages.n_group))
    kernel.close()
    arena.close()
    return fold_groups(parts, 0, pages.group_pages)


def same_bits(one, other) -> bool:
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in "mlo")


@st.composite
def odd_pages(draw) -> Pages:
    group_pages = draw(st.integers(1, 3))
    return Pages(
        layers=tuple(sorted(draw(st.sets(st.integers(0, 60), min_size=1, max_size=2)))),
        n_head_kv=draw(st.integers(1, 3)),
        n_group=draw(st.integers(1, 7)),
        head_dim=draw(st.sampled_from([32, 64, 96, 256])),
        page_tokens=draw(st.sampled_from([64, 128])),
        group_pages=group_pages,
        n_pages=group_pages * draw(st.integers(1, 3)),
        seed=draw(st.integers(0, 99)),
    )


@settings(max_examples=25, deadline=None)
@given(
    pages=odd_pages(),
    piece_bytes=st.integers(700, 50_000),
    n_tokens=st.sampled_from([1, 2, 5]),
    data=st.data(),
)
def test_the_answer_is_the_formulas_and_the_hosts_to_the_bit(backend, pages, piece_bytes, n_tokens, data):
    store = filled(backend, pages, piece_bytes=piece_bytes)
    layer, q = data.draw(st.sampled_from(pages.layers)), pages.queries(n_tokens)
    n_groups = pages.n_pages // pages.group_pages
    answer = store.attend(layer, q, pages.scale, n_tokens, range(n_groups), per_group=True)
    expected = host_parts(backend, pages, layer, q, n_tokens)
    assert len(answer.parts) == n_groups == len(expected)
    assert all(same_bits(*pair) for pair in zip(answer.parts, expected, strict=True))
    whole = store.attend(layer, q, pages.scale, n_tokens, range(n_groups), per_group=False)
    assert len(whole.parts) == 1 and same_bits(whole.parts[0], fold_all(expected))
    assert whole.n_keys == pages.n_pages * pages.page_tokens
    first = data.draw(st.integers(0, n_groups - 1))
    some = store.attend(layer, q, pages.scale, n_tokens, range(first, n_groups), per_group=True)
    assert all(same_bits(*pair) for pair in zip(some.parts, expected[first:], strict=True))
    o, lse = whole.parts[0].normalised()
    o_right, lse_right = softmax_attention(q, *pages.rows(layer), pages.scale)
    assert np.abs(o - o_right).max() < TOLERANCE * max(1.0, np.abs(o_right).max())
    assert np.abs(lse - lse_right).max() < TOLERANCE
    store.drop()


def test_images_come_back_as_they_came(backend):
    pages = Pages()
    store = filled(backend, pages)
    for layer in pages.layers:
        for page in range(pages.n_pages):
            assert store.image(layer, page).tobytes() == pages.image(layer, page)
    with pytest.raises(PositionError):
        store.image(pages.layers[0], pages.n_pages)
    store.drop()


def test_a_damaged_page_is_not_held_and_may_come_again(backend):
    pages = Pages()
    store = filled(backend, pages, n_pages=2)
    layer = pages.layers[0]
    (piece,) = pages.appends(layer, 2)
    data = np.frombuffer(piece.piece.joined(), np.uint8).copy()
    data[77] ^= 4
    with pytest.raises(HashMismatchError):
        store.put_piece(layer, 2, 0, data, piece.image_xxh3)
    assert store.n_held_by(layer) == 2 * pages.page_tokens
    assert put(store, pages, layer, 2) == 3 * pages.page_tokens
    store.drop()


def test_pieces_must_follow_each_other(backend):
    pages = Pages()
    store = filled(backend, pages, n_pages=1)
    layer = pages.layers[0]
    pieces = [np.frombuffer(p.piece.joined(), np.uint8) for p in pages.appends(layer, 1, 1000)]
    with pytest.raises(PositionError):
        store.put_piece(layer, 1, 1000, pieces[1], 0)
    with pytest.raises(PositionError):
        store.put_piece(layer, 2, 0, pieces[0], 0)  # a gap
    store.put_piece(layer, 1, 0, pieces[0], 0)
    with pytest.raises(PositionError):
        store.put_piece(layer, 1, 2000, pieces[2], 0)
    assert store.n_held_by(layer) == pages.page_tokens
    store.drop()


def test_a_page_that_comes_again_drops_those_behind_it(backend):
    pages = Pages()
    store = filled(backend, pages)
    layer, other = pages.layers
    assert put(store, pages, layer, 1) == 2 * pages.page_tokens
    assert store.n_held_by(other) == pages.n_pages * pages.page_tokens
    with pytest.raises(PositionError):
        store.attend(layer, pages.queries(1), 1.0, 1, range(2), per_group=False)
    store.drop()


def test_truncate_keeps_whole_pages_and_answers_go_on(backend):
    pages = Pages()
    store = filled(backend, pages)
    layer, q = pages.layers[0], pages.queries(1)
    before = store.attend(layer, q, pages.scale, 1, range(2), per_group=True)
    assert store.truncate(4 * pages.page_tokens + 5) == 4 * pages.page_tokens
    with pytest.raises(PositionError):
        store.attend(layer, q, pages.scale, 1, range(3), per_group=True)
    after = store.attend(layer, q, pages.scale, 1, range(2), per_group=True)
    assert all(same_bits(*pair) for pair in zip(before.parts, after.parts, strict=True))
    for each in pages.layers:  # others take the place of those that went
        for page in (4, 5):
            put(store, pages, each, page)
    again = store.attend(layer, q, pages.scale, 1, range(3), per_group=True)
    assert same_bits(again.parts[2], host_parts(backend, pages, layer, q, 1)[2])
    store.drop()


def test_grants_what_fits_and_refuses_the_rest(backend):
    pages = Pages()
    form = form_of(pages)
    store = PageStore(backend, lambda: 2 * form.group_bytes + 5)
    granted = store.configure(form, 1 << 40)
    assert (granted.n_bytes, granted.tokens_max) == (2 * form.group_bytes, 2 * form.group_tokens)
    for page in range(4):
        for layer in pages.layers:
            put(store, pages, layer, page)
    with pytest.raises(OutOfMemoryError, match=f"out of memory at {granted.tokens_max} keys"):
        put(store, pages, pages.layers[0], 4)
    assert store.n_keys == granted.tokens_max
    answer = store.attend(pages.layers[0], pages.queries(1), pages.scale, 1, range(2), per_group=False)
    assert answer.n_keys == granted.tokens_max
    assert store.configure(form, form.group_bytes).tokens_max == form.group_tokens
    store.drop()


def test_a_session_keeps_its_pages_and_no_other(backend):
    pages = Pages()
    store = PageStore(backend, lambda: 1 << 30)
    store.configure(form_of(pages), 1 << 30, session=5, keep=True)
    for layer in pages.layers:
        put(store, pages, layer, 0)
    assert store.configure(form_of(pages), 1 << 30, session=5, keep=True).n_keys == pages.page_tokens
    assert store.configure(form_of(pages), 1 << 30, session=6, keep=True).n_keys == 0
    for layer in pages.layers:
        put(store, pages, layer, 0)
    other_form = form_of(pages, n_group=pages.n_group + 1)
    assert store.configure(other_form, 1 << 30, session=6, keep=True).n_keys == 0
    store.drop()


def test_products_are_refused_by_name_where_pages_are_not_in_the_processors_memory():
    """The device calls itself a GPU; nothing else of it is asked before the form is refused."""
    backend = Backend(choose_device("cpu"))
    backend.device = replace(backend.device, kind=DEVICE_GPU)
    pages = Pages(n_pages=2)
    store = filled(backend, pages)
    with pytest.raises(UnsupportedOperationError, match=r"'products'.*'kernels' only"):
        store.configure(form_of(pages, many_rows="products"), 1 << 30)
    assert store.n_keys == 2 * pages.page_tokens, "what is held stays"
    store.drop()
    backend.close()


def test_what_is_no_number_is_refused(backend):
    pages = Pages()
    store = filled(backend, pages, n_pages=2)
    q = pages.queries(1)
    q[0, 0, 0] = np.inf
    with pytest.raises(NonFiniteError):
        store.attend(pages.layers[0], q, 1.0, 1, range(1), per_group=False)
    with pytest.raises(EngineError):
        store.attend(99, pages.queries(1), 1.0, 1, range(1), per_group=False)
    store.drop()
    with pytest.raises(EngineError):
        store.attend(pages.layers[0], pages.queries(1), 1.0, 1, range(1), per_group=False)


def test_pages_become_programs_and_cut_ones_are_forgotten(backend, tmp_path):
    """With page programs (NumPy's) in front, answers stay within their bound, and a truncated group is nobody's."""
    from device.frozen_groups import FrozenShape, open_frozen

    pages = Pages(page_tokens=256, group_pages=2, n_pages=4, layers=(3,))

    def opened(form: HeldForm, rows):
        shape = FrozenShape(form.layers, form.n_head_kv, form.head_dim, form.n_group, form.group_tokens)
        return open_frozen("kernels", shape, rows, tmp_path, 1 << 30, shares=((1, 1.0),))

    store = PageStore(backend, lambda: 1 << 30, opened)
    store.configure(form_of(pages), 1 << 30)
    for page in range(4):
        put(store, pages, 3, page, 100_000)
    store.frozen.build_all()
    q = pages.queries(1)
    answer = store.attend(3, q, pages.scale, 1, range(2), per_group=True)
    assert answer.n_keys_frozen > 0
    for part, right in zip(answer.parts, host_parts(backend, pages, 3, q, 1), strict=True):
        (o, lse), (o_right, lse_right) = part.normalised(), right.normalised()
        assert np.abs(o - o_right).max() <= 1e-2 * np.abs(o_right).max() + 1e-3
        assert np.abs(lse - lse_right).max() <= 1e-2
    store.truncate(512)
    with pytest.raises(PositionError):
        store.attend(3, q, pages.scale, 1, range(2), per_group=True)
    assert len(store.attend(3, q, pages.scale, 1, range(1), per_group=True).parts) == 1
    store.drop()
