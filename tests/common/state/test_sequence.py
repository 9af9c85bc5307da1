"""Rows and states leave and enter a SequenceState unchanged, or not at all.

The state of a small hybrid is filled with random bytes through import_rows and read back through export_rows; then
every kind of misfit is offered, and nothing may have changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import EngineError
from common.ggml.backend import Backend, choose_device
from common.model.geometry import Geometry
from common.model.spec import ModelSpec
from common.model.split import write_tail
from common.model.synthetic import write_synthetic
from common.state.sequence import SequenceState
from common.wire.rows import KIND_CONV, KIND_K, KIND_RECURRENT, KIND_V, RowSection, decode_rows, encode_rows

N_CTX = 512
FIRST, LAST = 2, 8
LAYERS = range(FIRST, LAST)  # 2 recurrent, 3 attention, 4 to 6 recurrent, 7 attention
HYBRID = Geometry(
    n_layer=LAST, n_embd=64, n_ff=64, n_head=4, n_head_kv=2, head_dim=32, state_dim=16, n_vocab=64
)


@pytest.fixture
def state(tmp_path: Path) -> Iterator[SequenceState]:
    """State of the layers [2, 8) of a hybrid, as a worker with a tail file has it."""
    write_synthetic(HYBRID, tmp_path / "model.gguf", storage="q8_0")
    write_tail(tmp_path / "model.gguf", FIRST, tmp_path / "tail.gguf")
    backend = Backend(choose_device("cpu"))
    state = SequenceState(ModelSpec.read(tmp_path / "tail.gguf"), N_CTX, backend.buffer_type)
    yield state
    state.close(), backend.close()


def random_sections(state: SequenceState, p0: int, p1: int, seed: int = 0) -> list[RowSection]:
    """K/V rows [p0, p1) and states at p1 of every layer."""
    rng = np.random.default_rng(seed)
    sections = []
    for layer in LAYERS:
        for kind, tensor in state.layers[layer].tensors.items():
            if kind in (KIND_K, KIND_V):
                data = rng.integers(0, 256, (p1 - p0) * tensor.nb[1], dtype=np.uint8)
                sections.append(RowSection(layer, kind, tensor.type, p0, p1, tensor.nb[1], data))
            else:
                data = rng.standard_normal(tensor.n_elements, np.float32).view(np.uint8)
                sections.append(RowSection(layer, kind, tensor.type, p1, p1, tensor.n_bytes, data))
    return sections


def contents(sections: list[RowSection]) -> dict[tuple[int, int], bytes]:
    return {(s.layer, s.kind): bytes(s.data) for s in sections}


def everything(state: SequenceState) -> tuple:
    """All a state holds: counts and bytes."""
    counts = {layer: state.layers[layer].n_valid for layer in LAYERS}
    n = state.n_valid(LAYERS)
    return counts, contents(state.export_rows(LAYERS, 0, n, kv=True, state=True))


def test_rows_come_back_as_they_went_in_over_the_wire_form(state: SequenceState) -> None:
    sections = random_sections(state, 0, 300)
    state.import_rows(LAYERS, sections, 300)
    assert state.n_valid(LAYERS) == 300
    exported = state.export_rows(LAYERS, 0, 300, kv=True, state=True)
    assert contents(exported) == contents(sections)
    blob = encode_rows(exported).joined()
    state.truncate(LAYERS, 0)
    state.import_rows(LAYERS, decode_rows(blob), 300)
    assert everything(state)[1] == contents(sections)


@given(edges=st.lists(st.integers(1, N_CTX), min_size=1, max_size=5, unique=True))
def test_rows_join_piece_by_piece(tmp_path_factory: pytest.TempPathFactory, edges: list[int]) -> None:
    folder = tmp_path_factory.mktemp("pieces")
    write_synthetic(HYBRID, folder / "model.gguf", storage="q8_0")
    write_tail(folder / "model.gguf", FIRST, folder / "tail.gguf")
    backend = Backend(choose_device("cpu"))
    state = SequenceState(ModelSpec.read(folder / "tail.gguf"), N_CTX, backend.buffer_type)
    wanted, last = {}, 0
    for end in sorted(edges):
        piece = random_sections(state, last, end, seed=end)
        state.import_rows(LAYERS, piece, end)
        for key, data in contents(piece).items():
            wanted[key] = data if key[1] > KIND_V else wanted.get(key, b"") + data
        last = end
    assert everything(state)[1] == wanted
    state.close(), backend.close()


def misfits(state: SequenceState) -> dict[str, tuple[list[RowSection], int]]:
    """Sections that must be refused when layers [2, 8) are at 100: by what is wrong with them."""
    good = random_sections(state, 100, 120, seed=1)
    at = {(s.layer, s.kind): i for i, s in enumerate(good)}

    def change(of_layer: int, of_kind: int, **fields: object) -> list[RowSection]:
        i = at[of_layer, of_kind]
        return [*good[:i], replace(good[i], **fields), *good[i + 1 :]]

    k, nan = good[at[3, KIND_K]], np.frombuffer(bytes(good[at[2, KIND_RECURRENT]].data), np.float32).copy()
    nan[-1] = np.nan
    return {
        "do not belong": (change(3, KIND_K, layer=1), 120),
        "do not belong to layers": (change(3, KIND_K, kind=KIND_CONV), 120),
        "here a row is": (change(3, KIND_K, ggml_type=0), 120),
        "a row is": (change(3, KIND_K, row_bytes=k.row_bytes * 2), 120),
        "bytes came": (change(3, KIND_K, data=bytes(k.data)[:-1]), 120),
        "do not join": (change(3, KIND_K, p0=101, p1=121), 120),
        "join": (change(3, KIND_K, p0=90, p1=130, data=bytes(40 * k.row_bytes)), 120),
        "would reach 100 positions, not 120": (good[: at[7, KIND_V]], 120),
        "not the one state at position 120": (change(2, KIND_CONV, p0=119, p1=119), 120),
        "is not the one state": ([*good, good[at[2, KIND_CONV]]], 120),
        "not finite": (change(2, KIND_RECURRENT, data=nan.view(np.uint8)), 120),
        "the context holds 512": (good, N_CTX + 1),
    }


def test_what_does_not_fit_changes_nothing(state: SequenceState) -> None:
    state.import_rows(LAYERS, random_sections(state, 0, 100), 100)
    before = everything(state)
    for said, (sections, n_valid_after) in misfits(state).items():
        with pytest.raises(EngineError, match=said):
            state.import_rows(LAYERS, sections, n_valid_after)
        assert everything(state) == before, said


def test_rows_may_replace_those_of_the_same_positions(state: SequenceState) -> None:
    """Rows that decoding wrote are replaced by those of a canonical read."""
    state.import_rows(LAYERS, random_sections(state, 0, 100), 100)
    fresh = random_sections(state, 40, 100, seed=2)
    state.import_rows(LAYERS, fresh, 100)
    kept = contents(state.export_rows(LAYERS, 40, 100, kv=True, state=True))
    assert kept == contents(fresh)


def test_layers_are_counted_one_by_one(state: SequenceState) -> None:
    sections = random_sections(state, 0, 50)
    state.import_rows(range(2, 4), [s for s in sections if s.layer < 4], 50)
    assert state.n_valid(range(2, 4)) == 50 and state.n_valid(LAYERS) == 0
    with pytest.raises(EngineError, match="layer 4 has rows for 0 positions, not 50"):
        state.require_at(LAYERS, 50)
    with pytest.raises(EngineError, match=r"layer 7 has rows for 0 positions, asked for \[0, 50\)"):
        state.export_rows(LAYERS, 0, 50, kv=True, state=False)


def test_recurrent_layers_go_back_to_snapshots_only(state: SequenceState) -> None:
    state.import_rows(LAYERS, random_sections(state, 0, 60), 60)
    snapshot, before = state.snapshot(LAYERS), everything(state)
    assert snapshot.n_bytes == sum(s.row_bytes for s in random_sections(state, 0, 1) if s.kind > KIND_V)
    state.import_rows(LAYERS, random_sections(state, 60, 90, seed=3), 90)
    with pytest.raises(EngineError, match=r"layer 2 \(recurrent\) has seen 90 positions and cannot go to 60"):
        state.truncate(LAYERS, 60)
    state.restore(LAYERS, snapshot)
    assert everything(state) == before
    with pytest.raises(EngineError, match=r"snapshot is of layers \[2, 8\), not \[2, 4\)"):
        state.restore(range(2, 4), snapshot)
    state.truncate(LAYERS, 0)
    with pytest.raises(EngineError, match="layer 3 has rows for 0 positions, the snapshot needs 60"):
        state.restore(LAYERS, snapshot)
    assert not any(a.any() for a in state.snapshot(LAYERS).state.values()), "an emptied state is zero"


def test_attention_layers_are_cut_anywhere(state: SequenceState) -> None:
    state.import_rows(LAYERS, random_sections(state, 0, 60), 60)
    only = range(3, 4)
    state.truncate(only, 17)
    assert state.n_valid(only) == 17 and state.layers[2].n_valid == 60
    for n in (18, -1):
        with pytest.raises(EngineError):
            state.truncate(only, n)


def test_a_failed_run_voids_what_it_may_have_touched(state: SequenceState) -> None:
    state.import_rows(LAYERS, random_sections(state, 0, 60), 60)
    state.lose(LAYERS, 60)
    assert [state.layers[layer].n_valid for layer in LAYERS] == [0, 60, 0, 0, 0, 60]
