"""The grid law: what a token's rows are depends on the token ids alone.

First as arithmetic, for reads of any length: where `cut` cuts, and which rows a longer read would compute alike. Then
with the engine, on a hybrid whose weights are repacked (the layout in which groups of rows round differently): a read
split at random layers, and a longer read that starts from a shorter one's canonical rows, give the bits of a cold read.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.engine import Engine
from common.engine.grid import canonical_end, cut
from common.engine.parity import run_spans
from common.engine.span import LayerSpan
from common.limits import UBATCH_TOKENS
from common.model.geometry import Geometry
from common.model.synthetic import write_synthetic

N_CTX = 4 * UBATCH_TOKENS
N_LAYER = 8
LENGTHS = st.integers(1, 40 * UBATCH_TOKENS) | st.builds(
    lambda k, d: max(1, k * UBATCH_TOKENS + d), st.integers(0, 40), st.integers(-2, 2)
)


@given(LENGTHS)
def test_a_read_is_cut_at_multiples_of_the_ubatch_and_never_ends_in_one_row(n: int) -> None:
    pieces = cut(0, n)
    assert pieces[0][0] == 0 and sum(pieces[-1]) == n
    assert all(a + rows == b for (a, rows), (b, _) in pairwise(pieces))
    assert all(position % UBATCH_TOKENS == 0 for position, _ in pieces[:-1])
    assert n == 1 or all(2 <= rows <= UBATCH_TOKENS for _, rows in pieces)
    assert pieces[-1][0] % UBATCH_TOKENS in (0, UBATCH_TOKENS - 1)


@given(LENGTHS, LENGTHS)
def test_rows_before_the_canonical_end_are_cut_alike_in_every_longer_read(n: int, more: int) -> None:
    end = canonical_end(n)
    assert end % UBATCH_TOKENS == 0 and n - end <= UBATCH_TOKENS + 1
    before = [piece for piece in cut(0, n) if sum(piece) <= end]
    assert before == [(p, UBATCH_TOKENS) for p in range(0, end, UBATCH_TOKENS)]
    longer = cut(0, n + more)
    if n + more > end + 1:  # a read of one token more would have given up a row
        assert longer[: len(before)] == before and longer[len(before) :] == cut(end, n + more)


@given(LENGTHS, st.integers(1, UBATCH_TOKENS - 1))
def test_a_read_starts_at_a_grid_point_before_its_end(n: int, off: int) -> None:
    for start in (off, n + UBATCH_TOKENS, -UBATCH_TOKENS):
        with pytest.raises(ValueError, match="starts at a grid point"):
            cut(start, min(n, start) if start > 0 and start % UBATCH_TOKENS == 0 else n + off + 1)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    geometry = Geometry(
        n_layer=N_LAYER, n_embd=64, n_ff=64, n_head=2, n_head_kv=1, head_dim=32, state_dim=16, n_vocab=200
    )
    path: Path = tmp_path_factory.mktemp("grid") / "hybrid.gguf"
    write_synthetic(geometry, path, storage="q4_0")
    return Engine.load(path, n_ctx=N_CTX, weights="repack")


def read(spans: list[LayerSpan], tokens: np.ndarray, start: int = 0) -> np.ndarray:
    """Reads tokens[start:] on the grid; the last row's logits."""
    logits = np.empty(0)
    for position, n in cut(start, len(tokens)):
        logits = run_spans(spans, tokens[position : position + n], position, "last")
    return logits


def tokens_of(seed: int, n: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 200, n).astype(np.int32)


READS = st.integers(2, N_CTX) | st.sampled_from([256, 257, 258, 511, 512, 513, 514])


@settings(max_examples=15)
@given(READS, st.integers(0, 99), st.sets(st.integers(1, N_LAYER - 1), min_size=1, max_size=3))
def test_every_split_of_a_read_gives_the_same_bits(
    engine: Engine, n: int, seed: int, layers: set[int]
) -> None:
    tokens, whole = tokens_of(seed, n), engine.span(0, N_LAYER)
    parts = [engine.span(a, b) for a, b in pairwise([0, *sorted(layers), N_LAYER])]
    whole.truncate(0)
    cold = read([whole], tokens)
    rows = [bytes(section.data) for section in whole.export_rows(0, n)]
    whole.truncate(0)
    assert np.array_equal(read(parts, tokens), cold)
    assert [bytes(section.data) for section in whole.export_rows(0, n)] == rows


@settings(max_examples=15)
@given(READS, READS, st.integers(0, 99))
def test_a_longer_read_from_canonical_rows_gives_the_bits_of_a_cold_one(
    engine: Engine, n: int, m: int, seed: int
) -> None:
    """Rows and states are exported where they are canonical, the sequence is thrown away, and they are put back."""
    shorter, longer = sorted((n, m))
    start, tokens, span = canonical_end(shorter), tokens_of(seed, longer), engine.span(0, N_LAYER)
    if longer < start + 2:
        start = max(0, start - UBATCH_TOKENS)
    span.truncate(0)
    cold = read([span], tokens)
    span.truncate(0)
    if start:
        read([span], tokens[:start])
    kept = span.export_rows(0, start)
    span.run(tokens_of(seed + 1, 7), start)  # another ending, of which nothing must stay
    span.truncate(0)
    span.import_rows(kept, start)
    assert np.array_equal(read([span], tokens, start), cold)
