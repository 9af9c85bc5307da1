"""Several sequences of one engine do not know of each other: interleaved in any way, each computes what it would alone.

Method: hypothesis draws the order of steps of two sequences over a small model of each architecture; results, rows and
states are compared to the bit with an engine that runs one after the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.engine import Engine
from common.engine.sequence import EngineSequence
from common.errors import EngineError
from common.model.geometry import Geometry
from common.model.synthetic import write_synthetic

N_CTX, N_SHORT, N_VOCAB = 1024, 512, 100
GEOMETRIES = {
    "llama": Geometry(
        arch="llama", n_layer=3, n_embd=64, n_ff=96, n_head=2, n_head_kv=1, head_dim=32, n_vocab=N_VOCAB
    ),
    "qwen35": Geometry(
        n_layer=4, n_embd=64, n_ff=64, n_head=2, n_head_kv=1, head_dim=32, state_dim=16, n_vocab=N_VOCAB
    ),
}
RANDOM = np.random.default_rng(9)
LONG = RANDOM.integers(0, N_VOCAB, N_CTX).astype(np.int32)
SHORT = RANDOM.integers(0, N_VOCAB, N_SHORT).astype(np.int32)
CUTS = {"long": [0, 256, 512, 700, 701, 702], "short": [0, 256, 300, 301, 302, 303, 304]}


@pytest.fixture(scope="module", params=list(GEOMETRIES))
def path(request, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("sequences") / "model.gguf"
    write_synthetic(GEOMETRIES[request.param], path, storage="q8_0")
    return path


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[Engine]:
    with Engine.load(path, n_ctx=N_CTX, device="cpu") as engine:
        yield engine


@pytest.fixture(scope="module")
def short(engine: Engine) -> EngineSequence:
    return engine.sequence(N_SHORT)


def steps(sequence, tokens, cuts):
    """Runs one ubatch for each next(): the logits of its last token."""
    whole = sequence.span(0, sequence.spec.n_layer_full)
    whole.truncate(0)
    for start, end in itertools.pairwise(cuts):
        yield whole.run(tokens[start:end], start, "last")[-1]


def content(sequence, n):
    return [
        (section.kind, section.layer, bytes(section.data))
        for section in sequence.span(0, sequence.spec.n_layer_full).export_rows(0, n)
    ]


@pytest.fixture(scope="module")
def alone(path: Path):
    """Logits of each step and the content in the end, of each sequence in an engine of its own."""
    found = {}
    for name, tokens in (("long", LONG), ("short", SHORT)):
        with Engine.load(path, n_ctx=N_CTX, device="cpu") as engine:
            found[name] = list(steps(engine, tokens, CUTS[name])), content(engine, CUTS[name][-1])
    return found


@settings(max_examples=12)
@given(order=st.permutations(["long"] * 5 + ["short"] * 6))
def test_interleaved_sequences_compute_what_each_computes_alone(engine, short, alone, order):
    running = {"long": steps(engine, LONG, CUTS["long"]), "short": steps(short, SHORT, CUTS["short"])}
    logits: dict[str, list[np.ndarray]] = {"long": [], "short": []}
    for name in order:
        logits[name].append(next(running[name]))
    for name, sequence in (("long", engine), ("short", short)):
        expected, rows = alone[name]
        assert all(np.array_equal(a, b) for a, b in zip(logits[name], expected, strict=True))
        assert content(sequence, CUTS[name][-1]) == rows


def test_a_sequence_goes_on_where_another_was(engine, short, alone):
    """Rows and states copied from the short sequence into the engine's own."""
    running = steps(short, SHORT, CUTS["short"])
    for _ in range(3):
        next(running)
    n = CUTS["short"][3]
    n_layer = engine.spec.n_layer_full
    engine.span(0, n_layer).truncate(0)
    engine.span(0, n_layer).import_rows(short.span(0, n_layer).export_rows(0, n), n)
    there = engine.span(0, n_layer).run(SHORT[n : n + 1], n, "last")[-1]
    assert np.array_equal(there, alone["short"][0][3]) and np.array_equal(next(running), there)


def test_its_end_and_its_size_are_its_own(engine, short):
    whole = short.span(0, short.spec.n_layer_full)
    whole.truncate(0)
    with pytest.raises(EngineError, match=r"positions \[510, 514\) do not fit a context of 512"):
        whole.run(LONG[:4], 510)
    for n_ctx in (0, N_CTX + 1):
        with pytest.raises(EngineError, match=f"1 to {N_CTX} positions here, not {n_ctx}"):
            engine.sequence(n_ctx)


def test_a_closed_sequence_leaves_the_others_alone(engine, alone):
    other = engine.sequence(N_SHORT)
    bytes_with = engine.describe()["state_bytes"]
    list(steps(other, SHORT, CUTS["short"]))
    other.close()
    assert engine.describe()["state_bytes"] < bytes_with
    assert all(
        np.array_equal(a, b) for a, b in zip(steps(engine, LONG, CUTS["long"]), alone["long"][0], strict=True)
    )
