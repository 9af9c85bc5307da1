"""Decode by pages is attention, depends on token ids alone, and leaves everything else to the bit as it was.

One tiny model of each architecture, pages of 64 keys: reads equal those of the fused engine bit for bit, decoded
logits those of the float64 reference closely; cuts, sequences, rows from elsewhere and a dirty past change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from common.attention.partial import PartialAttention
from common.engine.engine import Decoding, Engine
from common.engine.kv_source import KvSource, PageQuery
from common.engine.local_pages import LocalPages
from common.engine.reference import ReferenceEngine
from common.errors import EngineError
from common.ggml.tensor import F16
from common.model.geometry import Geometry
from common.model.synthetic import write_synthetic
from common.wire.rows import KIND_K, KIND_V, RowSection

N_VOCAB, N_CTX, N_READ, N_DECODED = 100, 512, 190, 70
SIZES = dict(n_embd=64, n_ff=64, n_head=4, n_head_kv=2, head_dim=32, n_vocab=N_VOCAB)
GEOMETRIES = {
    "llama": Geometry(arch="llama", n_layer=3, **SIZES),
    "qwen35": Geometry(n_layer=8, state_dim=16, **SIZES),
    "gemma3": Geometry(arch="gemma3", n_layer=6, interval=3, window=40, **SIZES),
}
TOKENS = np.random.default_rng(5).integers(0, N_VOCAB, N_CTX).astype(np.int32)
PAGED = Decoding("paged", page_tokens=64, group_pages=2)


@pytest.fixture(scope="module", params=list(GEOMETRIES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("paged") / f"{request.param}.gguf"
    write_synthetic(GEOMETRIES[request.param], path, storage="q8_0")
    return path


@pytest.fixture(scope="module")
def paged(model: Path) -> Iterator[Engine]:
    with Engine.load(model, n_ctx=N_CTX, decoding=PAGED, device="cpu") as engine:
        yield engine


def whole(engine):
    return engine.span(0, engine.spec.n_layer_full)


def read_and_decode(spans, n_read: int = N_READ, n_decoded: int = N_DECODED) -> np.ndarray:
    """Logits of the last row read and of every decoded one, [1 + n_decoded, n_vocab]."""
    logits = []
    for position in (0, *range(n_read, n_read + n_decoded)):
        rows = TOKENS[position : position + (n_read if position == 0 else 1)]
        for span in spans:
            rows = span.run(rows, position, "last" if span is spans[-1] else "none")
        logits.append(rows[-1])
    return np.stack(logits)


def test_reads_and_rows_are_those_of_the_fused_engine(model: Path, paged: Engine) -> None:
    whole(paged).truncate(0)
    with Engine.load(model, n_ctx=N_CTX, device="cpu") as fused:
        for position, n in ((0, 100), (100, 156), (256, 2), (258, 180)):
            ours, theirs = (
                whole(engine).run(TOKENS[position : position + n], position, "all")
                for engine in (paged, fused)
            )
            assert np.array_equal(ours, theirs)
        for ours, theirs in zip(*(whole(e).export_rows(3, 437) for e in (paged, fused)), strict=True):
            assert str(ours) == str(theirs) and bytes(ours.data) == bytes(theirs.data)


def test_decoding_is_attention_over_all_keys(model: Path, paged: Engine) -> None:
    whole(paged).truncate(0)
    ours = read_and_decode([whole(paged)])
    theirs = read_and_decode([whole(ReferenceEngine(model))])
    # As close as the fused engine is on the same model: f16 rows and q8_0 activations, not pages, make the difference.
    with Engine.load(model, n_ctx=N_CTX, device="cpu") as fused:
        allowed = np.std(read_and_decode([whole(fused)]) - theirs)
    assert np.std(ours - theirs) < 1.2 * allowed
    assert allowed < 0.1 * np.std(theirs)


def test_spans_sequences_and_repetition_change_no_bit(paged: Engine) -> None:
    whole(paged).truncate(0)
    logits, n = read_and_decode([whole(paged)]), paged.spec.n_layer_full
    for cut in (1, 2, n - 1):
        whole(paged).truncate(0)
        assert np.array_equal(read_and_decode([paged.span(0, cut), paged.span(cut, n)]), logits)
    other = paged.sequence(N_READ + N_DECODED)
    assert np.array_equal(read_and_decode([whole(other)]), logits)
    other.close()


class OldGroups:
    """Attends the first group of pages through the engine's own kernels, as whoever holds old pages elsewhere would."""

    def __init__(self, local: LocalPages) -> None:
        self._local = local
        local.first_page = local.group_pages

    def start_attend(self, query: PageQuery) -> None:
        self._query = query

    def wait_attend(self) -> list[PartialAttention]:
        return self._local.attend_pages(self._query, 0, self._local.group_pages)


def test_who_attends_old_pages_changes_no_bit(model: Path, paged: Engine) -> None:
    whole(paged).truncate(0)
    logits = read_and_decode([whole(paged)])
    other, asked = paged.sequence(N_READ + N_DECODED), []

    def choose(local: LocalPages) -> list[KvSource]:
        asked.append(local)
        return [OldGroups(local), local]

    other.set_sources(choose)
    assert np.array_equal(read_and_decode([whole(other)]), logits)
    assert len(asked) == N_DECODED
    whole(other).truncate(0)
    other.set_sources(None)
    assert np.array_equal(read_and_decode([whole(other)]), logits) and len(asked) == N_DECODED
    other.close()
    with (
        Engine.load(model, n_ctx=N_CTX, device="cpu") as fused,
        pytest.raises(EngineError, match="Decoding\\('paged'\\)"),
    ):
        fused.set_sources(choose)


def test_decoding_goes_on_from_rows_that_came_from_elsewhere(model: Path, paged: Engine) -> None:
    """As after a split read: rows computed by a fused engine are imported, then decoded on."""
    whole(paged).truncate(0)
    logits = read_and_decode([whole(paged)])
    whole(paged).truncate(0)
    with Engine.load(model, n_ctx=N_CTX, device="cpu") as fused:
        whole(fused).run(TOKENS[:N_READ], 0)
        whole(paged).import_rows(whole(fused).export_rows(0, N_READ), N_READ)
    steps = [whole(paged).run(TOKENS[p : p + 1], p, "last")[-1] for p in range(N_READ, N_READ + N_DECODED)]
    assert np.array_equal(np.stack(steps), logits[1:])


def test_a_dirty_past_changes_no_bit(paged: Engine) -> None:
    """Rows that a broken sequence left behind are not numbers; the next sequence must not see them."""
    whole(paged).truncate(0)
    clean = read_and_decode([whole(paged)])
    whole(paged).truncate(0)
    spec = paged.spec
    for layer in spec.layers:
        if spec.kind(layer) != "recurrent":
            broken = np.full(N_CTX * spec.n_embd_kv * 2, 0xFF, np.uint8)
            sections = [
                RowSection(layer, kind, F16, 0, N_CTX, spec.n_embd_kv * 2, broken)
                for kind in (KIND_K, KIND_V)
            ]
            paged.span(layer, layer + 1).import_rows(sections, N_CTX)
    whole(paged).truncate(0)
    assert np.isfinite(clean).all()
    assert np.array_equal(read_and_decode([whole(paged)]), clean)


def test_decode_that_wants_no_logits_keeps_the_same_rows(paged: Engine) -> None:
    whole(paged).truncate(0)
    read_and_decode([whole(paged)], n_decoded=3)
    rows = [bytes(section.data) for section in whole(paged).export_rows(0, N_READ + 3)]
    whole(paged).truncate(0)
    whole(paged).run(TOKENS[:N_READ], 0)
    for position in range(N_READ, N_READ + 3):
        assert whole(paged).run(TOKENS[position : position + 1], position).size == 0
    assert [bytes(section.data) for section in whole(paged).export_rows(0, N_READ + 3)] == rows


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (dict(path="guessed"), "decode is 'guessed'; allowed are paged and fused"),
        (dict(path="paged", page_tokens=100), "page_tokens is 100; it must be a multiple of 64"),
        (dict(path="paged", group_pages=0), "group_pages is 0"),
    ],
)
def test_odd_settings_are_refused(model: Path, wrong: dict, said: str) -> None:
    with pytest.raises(EngineError, match=said):
        Engine.load(model, n_ctx=N_CTX, decoding=Decoding(**wrong), device="cpu")
