"""A span runs what it is asked or refuses it before anything changes; what it keeps is told layer by layer.

On a small hybrid: wrong rows, positions and wishes; runs that want no logits; going back; graphs and masks reused.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.engine import Engine
from common.errors import EngineError
from common.model.geometry import Geometry
from common.model.split import write_tail
from common.model.synthetic import write_synthetic

N, N_VOCAB, N_EMBD, N_CTX = 8, 100, 64, 768
HYBRID = Geometry(
    n_layer=N, n_embd=N_EMBD, n_ff=64, n_head=4, n_head_kv=2, head_dim=32, state_dim=16, n_vocab=N_VOCAB
)
TOKENS = np.random.default_rng(5).integers(0, N_VOCAB, N_CTX).astype(np.int32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("span") / "hybrid.gguf"
    write_synthetic(HYBRID, path, storage="q8_0")
    return path


@pytest.fixture(scope="module")
def loaded(model: Path) -> Iterator[Engine]:
    with Engine.load(model, n_ctx=N_CTX) as engine:
        yield engine


@pytest.fixture
def engine(loaded: Engine) -> Engine:
    """The one engine of this file, emptied."""
    loaded.span(0, N).truncate(0)
    return loaded


@pytest.mark.parametrize(
    ("rows", "position", "logits", "said"),
    [
        (TOKENS[:0], 0, "last", "a ubatch has 1 to 256 rows, not 0"),
        (TOKENS[:257], 0, "last", "a ubatch has 1 to 256 rows, not 257"),
        (TOKENS[:4], 1, "last", "layer 0 has rows for 0 positions, not 1"),
        (TOKENS[:4], -1, "last", r"positions \[-1, 3\) do not fit a context of 768"),
        (TOKENS[:4], N_CTX - 3, "last", r"positions \[765, 769\) do not fit a context of 768"),
        (np.array([3, N_VOCAB], np.int32), 0, "last", "token ids 3 to 100; the vocabulary has 0 to 99"),
        (np.array([-1], np.int32), 0, "last", "token ids -1 to -1"),
        (TOKENS[:4].astype(np.float32), 0, "last", "token ids are i32"),
        (TOKENS[:4, None], 0, "last", r"token ids are i32 \[n_tokens\], not int32 \[4, 1\]"),
        (TOKENS[:4], 0, "some", "logits is 'some'; allowed are none, last and all"),
    ],
)
def test_misfits_are_refused_and_change_nothing(
    engine: Engine, rows: np.ndarray, position: int, logits: str, said: str
) -> None:
    with pytest.raises(EngineError, match=said):
        engine.span(0, N).run(rows, position, logits)
    assert engine.span(0, N).n_valid == 0


def test_residuals_are_checked_as_tokens_are(engine: Engine) -> None:
    tail = engine.span(4, N)
    for rows in (TOKENS[:4], np.zeros((4, N_EMBD)), np.zeros((4, N_EMBD + 1), np.float32)):
        with pytest.raises(EngineError, match=r"residual is f32 \[n_tokens, 64\]"):
            tail.run(rows, 0)
    with pytest.raises(EngineError, match=r"layers \[0, 4\) yield no logits: it does not end the model"):
        engine.span(0, 4).run(TOKENS[:4], 0, "last")


def test_spans_are_those_the_file_holds(engine: Engine, model: Path, tmp_path: Path) -> None:
    for first, last in [(-1, 2), (3, 3), (4, 3), (0, N + 1)]:
        with pytest.raises(EngineError, match="are not in"):
            engine.span(first, last)
    assert engine.span(2, 5) is engine.span(2, 5)
    write_tail(model, 4, tmp_path / "tail.gguf", head=False)
    with Engine.load(tmp_path / "tail.gguf", n_ctx=256) as worker:
        with pytest.raises(EngineError, match=r"layers \[0, 8\) are not in \[4, 8\)"):
            worker.span(0, N)
        tail, residual = worker.span(4, N), engine.span(0, 4).run(TOKENS[:9], 0)
        with pytest.raises(EngineError, match="the file has no output head"):
            tail.run(residual, 0, "last")
        assert tail.run(residual, 0).size == 0 and tail.n_valid == 9
        engine.span(4, N).run(residual, 0)
        for ours, theirs in zip(engine.span(4, N).export_rows(0, 9), tail.export_rows(0, 9), strict=True):
            assert str(ours) == str(theirs) and bytes(ours.data) == bytes(theirs.data)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"n_ctx": 0}, "n_ctx is 0; allowed are 1 to"),
        ({"n_ctx": 256, "n_ubatch": 0}, "n_ubatch is 0; allowed are 1 to"),
        ({"n_ctx": 256, "weights": "shuffled"}, "weights is 'shuffled'; allowed are repack and plain"),
        ({"n_ctx": 256, "device": "abacus"}, "no device 'abacus'"),
        ({"n_ctx": 256, "n_threads": 1000}, "n_threads is 1000"),
    ],
)
def test_wrong_settings_are_refused_by_value(model: Path, wrong: dict, said: str) -> None:
    with pytest.raises(EngineError, match=said):
        Engine.load(model, **wrong)


def test_a_run_without_logits_leaves_the_same_rows_and_states(engine: Engine) -> None:
    """The last layer ends early then: its rows and states must be those of a run that goes on to the logits."""
    span = engine.span(0, N)
    whole = span.run(TOKENS[:50], 0, "all")
    rows = [bytes(s.data) for s in span.export_rows(0, 50)]
    span.truncate(0)
    assert whole.shape == (50, N_VOCAB) and span.run(TOKENS[:50], 0).shape == (0, 0)
    assert [bytes(s.data) for s in span.export_rows(0, 50)] == rows
    span.truncate(0)
    assert np.array_equal(span.run(TOKENS[:50], 0, "last"), whole[-1:])


def test_a_snapshot_brings_back_the_future_it_had(engine: Engine) -> None:
    span = engine.span(0, N)
    span.run(TOKENS[:30], 0)
    snapshot = span.snapshot()
    once = span.run(TOKENS[30:60], 30, "all")
    span.restore(snapshot)
    span.run(TOKENS[100:140], 30)
    span.restore(snapshot)
    assert span.n_valid == 30
    assert np.array_equal(span.run(TOKENS[30:60], 30, "all"), once)


def test_head_and_tail_are_counted_apart(engine: Engine) -> None:
    head, tail, whole = engine.span(0, 4), engine.span(4, N), engine.span(0, N)
    head.run(TOKENS[:20], 0)
    assert (head.n_valid, tail.n_valid, whole.n_valid) == (20, 0, 0)
    with pytest.raises(EngineError, match="layer 4 has rows for 0 positions, not 20"):
        whole.run(TOKENS[20:30], 20)


def test_decoding_builds_one_graph_and_crosses_cache_pads(engine: Engine) -> None:
    """Token by token over two multiples of 256, then again from a fresh engine state: the graph is only re-aimed."""
    span = engine.span(0, N)
    span.run(TOKENS[:250], 0)
    span.run(TOKENS[250:251], 250, "last")
    built = engine.graphs.n_built
    ours = [span.run(TOKENS[p : p + 1], p, "last") for p in range(251, 520)]
    assert engine.graphs.n_built == built
    with Engine.load(engine.spec.path, n_ctx=N_CTX) as other:
        fresh = other.span(0, N)
        fresh.run(TOKENS[:250], 0)
        for p in range(250, 519):
            fresh.run(TOKENS[p : p + 1], p)
        assert np.array_equal(fresh.run(TOKENS[519:520], 519, "last"), ours[-1])


@settings(max_examples=25)
@given(pieces=st.lists(st.integers(1, 40), min_size=1, max_size=8), seed=st.integers(0, 9))
def test_what_ran_before_leaves_no_trace(loaded: Engine, pieces: list[int], seed: int) -> None:
    """Masks, positions and compute memory are reused: after any other run the bits are those of a first run."""
    span, rng = loaded.span(0, N), np.random.default_rng(seed)

    def read() -> np.ndarray:
        span.truncate(0)
        position, logits = 0, np.empty(0)
        for n in pieces:
            logits = span.run(TOKENS[position : position + n], position, "all")
            position += n
        return logits

    first = read()
    span.truncate(0)
    for _ in range(3):
        n, position = int(rng.integers(1, 256)), span.n_valid
        loaded.span(4, N).truncate(0) if rng.random() < 0.2 and position == 0 else None
        span.run(rng.integers(0, N_VOCAB, n).astype(np.int32), position, ["none", "last", "all"][n % 3])
    assert np.array_equal(read(), first)


def test_an_engine_says_what_runs(engine: Engine) -> None:
    said = engine.describe()
    assert sum(said["weights"].values()) == len(engine.spec.tensors) + 1, "every tensor, and the tied output"
    assert said["attention"] == "fused" and said["kv_type"] == "f16" and said["compute_bytes"] > 0


def test_closing_twice_is_allowed(model: Path) -> None:
    engine = Engine.load(model, n_ctx=1)
    assert engine.n_ctx == 256, "rounded up to what attention reads at a time"
    engine.close(), engine.close()
