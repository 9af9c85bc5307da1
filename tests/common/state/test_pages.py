"""Pages hold each element once, at a place that depends on absolute positions alone, and rows come back from them.

Layouts are compared with their definition element by element; row stores and whole states with and without pages are
written and read in random pieces and must agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import EngineError
from common.ggml.backend import Backend, choose_device
from common.ggml.tensor import F16, Arena
from common.model.geometry import Geometry
from common.model.spec import ModelSpec
from common.model.synthetic import write_synthetic
from common.state.pages import PageLayout, n_pages
from common.state.rows import PagedKeys, PagedValues
from common.state.sequence import SequenceState
from common.wire.rows import KIND_K, KIND_V, RowSection

LAYOUTS = st.builds(
    PageLayout,
    page_tokens=st.sampled_from([64, 128, 192, 256]),
    n_ctx=st.sampled_from([64, 256, 320, 512]),
    n_head=st.integers(1, 3),
    head_dim=st.sampled_from([8, 16]),
)


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    backend = Backend(choose_device("cpu"))
    yield backend
    backend.close()


@given(LAYOUTS)
def test_every_element_has_one_place(layout: PageLayout) -> None:
    keys, values = layout.key_ids(0, layout.n_ctx), layout.value_ids(0, layout.n_ctx)
    assert sorted(keys.ravel()) == list(range(layout.n_ctx * layout.n_head))
    assert len(np.unique(values)) == values.size and values.min() == 0
    assert values.max() < layout.n_value_elements
    for page in range(n_pages(layout.n_ctx, layout.page_tokens)):
        first, n = page * layout.page_tokens, layout.n_keys(page)
        assert keys[first, 0] * layout.head_dim == layout.key_offset(page)
        assert np.array_equal(keys[first : first + n], keys[first] + np.arange(n)[:, None])
        assert values[first, 0] == layout.value_offset(page)
        assert np.array_equal(values[first : first + n], values[first] + np.arange(n)[:, None])
        assert np.array_equal(np.diff(values[first]), np.full(layout.n_row - 1, layout.line(page)))


@given(LAYOUTS, st.data())
def test_places_of_a_range_are_those_of_the_whole(layout: PageLayout, data: st.DataObject) -> None:
    p0 = data.draw(st.integers(0, layout.n_ctx - 1))
    p1 = data.draw(st.integers(p0 + 1, layout.n_ctx))
    assert np.array_equal(layout.key_ids(p0, p1), layout.key_ids(0, layout.n_ctx)[p0:p1])
    assert np.array_equal(layout.value_ids(p0, p1), layout.value_ids(0, layout.n_ctx)[p0:p1])
    pieces = list(layout.covering(p0, p1))
    assert [start for _, start, _ in pieces] == [p0, *(end for *_, end in pieces)][:-1] and pieces[-1][
        2
    ] == p1
    assert all(
        start // layout.page_tokens == (end - 1) // layout.page_tokens == page for page, start, end in pieces
    )


@pytest.mark.parametrize(("page_tokens", "n_ctx"), [(0, 256), (32, 256), (100, 256), (64, 100)])
def test_odd_sizes_are_refused(page_tokens: int, n_ctx: int) -> None:
    with pytest.raises(EngineError, match="must be a multiple of 64"):
        PageLayout(page_tokens, n_ctx, 1, 8)


@given(layout=LAYOUTS, data=st.data())
def test_rows_come_back_and_lie_where_the_ids_say(
    backend: Backend, layout: PageLayout, data: st.DataObject
) -> None:
    arena = Arena(2)
    keys = PagedKeys(arena.tensor(F16, layout.head_dim, layout.n_head * layout.n_ctx), layout)
    values = PagedValues(arena.tensor(F16, 1, layout.n_value_elements), layout)
    arena.allocate(backend.buffer_type, clear=True)
    rows = np.random.default_rng(0).integers(1, 1 << 16, (layout.n_ctx, layout.n_row)).astype(np.uint16)
    cuts = data.draw(st.lists(st.integers(1, layout.n_ctx - 1), max_size=3, unique=True).map(sorted))
    p0 = data.draw(st.integers(0, layout.n_ctx - 1))
    p1 = data.draw(st.integers(p0 + 1, layout.n_ctx))
    for store in (keys, values):
        for a, b in zip([0, *cuts], [*cuts, layout.n_ctx], strict=True):
            store.write(a, rows[a:b].reshape(-1).view(np.uint8))
        assert np.array_equal(store.read(p0, p1).view(np.uint16).reshape(-1, layout.n_row), rows[p0:p1])
    lying = keys.tensor.read(np.empty((layout.n_ctx * layout.n_head, layout.head_dim), np.uint16))
    heads = rows.reshape(layout.n_ctx, layout.n_head, layout.head_dim)
    assert np.array_equal(lying[layout.key_ids(0, layout.n_ctx)], heads)
    lying = values.tensor.read(np.empty(layout.n_value_elements, np.uint16))
    assert np.array_equal(lying[layout.value_ids(0, layout.n_ctx)], rows)
    arena.close()


def test_a_state_with_pages_gives_the_rows_of_one_without(backend: Backend, tmp_path: Path) -> None:
    geometry = Geometry(
        arch="gemma3",
        n_layer=6,
        n_embd=32,
        n_ff=32,
        n_head=2,
        n_head_kv=2,
        head_dim=16,
        interval=3,
        n_vocab=50,
    )
    write_synthetic(geometry, tmp_path / "m.gguf", storage="f16")
    spec = ModelSpec.read(tmp_path / "m.gguf")
    plain, paged = (SequenceState(spec, 512, backend.buffer_type, pages) for pages in (None, 128))
    layers, rng = spec.layers, np.random.default_rng(1)
    for p0, p1 in ((0, 100), (100, 300), (250, 301)):
        sections = [
            RowSection(layer, kind, F16, p0, p1, 64, rng.integers(0, 256, (p1 - p0) * 64, np.uint8))
            for layer in layers
            for kind in (KIND_K, KIND_V)
        ]
        for state in (plain, paged):
            state.import_rows(layers, sections, p1)
    ours = [state.export_rows(layers, 77, 299, kv=True, state=True) for state in (plain, paged)]
    assert [bytes(a.data) for a in ours[0]] == [bytes(b.data) for b in ours[1]]
    for state in (plain, paged):
        state.close()


def test_rows_behind_the_newest_are_cleaned_once_and_again_after_going_back(
    backend: Backend, tmp_path: Path
) -> None:
    write_synthetic(
        Geometry(arch="llama", n_layer=1, n_embd=32, n_ff=32, n_head=1, n_head_kv=1, head_dim=16, n_vocab=50),
        tmp_path / "m.gguf",
        storage="f16",
    )
    state = SequenceState(ModelSpec.read(tmp_path / "m.gguf"), 256, backend.buffer_type, 64)
    layers, held = range(1), state.layers[0]

    def fill(p0: int, p1: int) -> None:
        ones = np.full((p1 - p0) * 32, 0xFF, np.uint8)  # not a number, in f16
        state.import_rows(
            layers, [RowSection(0, kind, F16, p0, p1, 32, ones) for kind in (KIND_K, KIND_V)], p1
        )

    def behind(end: int) -> set[int]:
        return {byte for store in held.stores.values() for byte in store.read(held.n_valid, end).tolist()}

    fill(0, 200)
    state.truncate(layers, 70)
    assert behind(128) == {0xFF}
    state.clean(layers, 128)
    assert behind(128) == {0} and {0xFF} == set(held.stores[KIND_V].read(0, 70).tolist())
    held.stores[KIND_K].write(100, np.full(32, 7, np.uint8))
    state.clean(layers, 128)
    assert 7 in behind(128)  # known to be clean: not looked at again
    fill(70, 128)
    state.truncate(layers, 90)
    state.clean(layers, 128)
    assert behind(128) == {0}
    state.close()
