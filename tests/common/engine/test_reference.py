"""The NumPy oracle against stock llama.cpp, and against itself: float32, other ubatches, continued reads.

Small models of all architectures with f32 weights, so that nothing but arithmetic differs; every logit row compared.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from common.engine.reference import ReferenceEngine
from common.errors import EngineError
from common.ggml.stock import StockContext, StockModel
from common.model.geometry import Geometry
from common.model.synthetic import write_synthetic

# Stock multiplies f16 queries with its f16 cache and, for few rows, sums values in f16: 2^-11 relative, in scores of
# spread 2.5, through eight layers, on logits of spread 3.3. Measured over six seeds: 0.019 to 0.027 (llama), 0.0034 to
# 0.0054 (qwen35, two attention layers), 0.037 to 0.097 (gemma3, whose norms after each branch enlarge small errors). A
# wrong head mapping, rotation, window or gate is off by 1 and more.
STOCK_TOLERANCE = {"llama": 0.06, "qwen35": 0.02, "gemma3": 0.25}
# float64 sums in another order, through eight layers.
UBATCH_TOLERANCE = 1e-11
# float32 has 2^-24; the rest is the same amplification.
FLOAT32_TOLERANCE = 1e-3

N_TOKENS, N_LAYER = 60, 8


@pytest.fixture(scope="module", params=list(STOCK_TOLERANCE))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three value heads a key head and three query heads a key/value head, so that a wrong mapping shows."""
    path = tmp_path_factory.mktemp("reference") / f"{request.param}.gguf"
    geometry = Geometry(
        arch=request.param, n_layer=N_LAYER, n_embd=96, n_ff=128, n_head=6, n_head_kv=2, head_dim=64,
        n_vocab=300, state_dim=32, n_state_group=2, n_state_head=6,
        window=24, rope_linear_factor=8.0,
    )  # fmt: skip
    write_synthetic(geometry, path, storage="f32", seed=3)
    return path


@pytest.fixture
def tokens() -> np.ndarray:
    return np.random.default_rng(4).integers(0, 300, N_TOKENS).astype(np.int32)


def test_stock_computes_the_same(model: Path, tokens: np.ndarray) -> None:
    stock_model = StockModel(model, repack=False)
    stock = StockContext(stock_model, n_ctx=256)
    wanted = np.concatenate([stock.decode(tokens[:50], 0, "all"), stock.decode(tokens[50:], 50, "all")])
    stock.close()
    stock_model.close()
    got = ReferenceEngine(model, kv_f16=True).span(0, N_LAYER).run(tokens, 0, "all")
    assert np.abs(got - wanted).max() < STOCK_TOLERANCE[model.stem]
    assert 2.5 < got.std() < 4.5


def test_rows_do_not_depend_on_how_a_prompt_is_cut(model: Path, tokens: np.ndarray) -> None:
    engine = ReferenceEngine(model)
    at_once, in_parts = engine.span(0, N_LAYER), engine.span(0, N_LAYER)
    parts = [in_parts.run(tokens[a:b], a, "all") for a, b in ((0, 1), (1, 2), (2, 31), (31, N_TOKENS))]
    assert np.abs(np.concatenate(parts) - at_once.run(tokens, 0, "all")).max() < UBATCH_TOLERANCE


def test_float32_differs_from_the_oracle_by_rounding(model: Path, tokens: np.ndarray) -> None:
    exact = ReferenceEngine(model).span(0, N_LAYER).run(tokens, 0, "all")
    rounded = ReferenceEngine(model, np.float32).span(0, N_LAYER).run(tokens, 0, "all")
    assert rounded.dtype == np.float32
    assert 0 < np.abs(rounded - exact).max() < FLOAT32_TOLERANCE


def test_every_row_depends_on_every_token_before_it(model: Path, tokens: np.ndarray) -> None:
    """What makes the comparisons above mean something: an oracle that lost its memory would be caught."""
    engine = ReferenceEngine(model)
    changed = tokens.copy()
    changed[0] = (changed[0] + 1) % 300
    rows = [engine.span(0, N_LAYER).run(ids, 0, "all") for ids in (tokens, changed)]
    rms = np.sqrt(np.mean((rows[0] - rows[1]) ** 2, axis=1))
    assert rms.min() > 0.01


def test_rows_out_of_turn_and_layers_not_there_are_refused(model: Path, tokens: np.ndarray) -> None:
    engine = ReferenceEngine(model)
    span = engine.span(0, N_LAYER)
    with pytest.raises(EngineError, match="rows at 5 after 0 positions"):
        span.run(tokens, 5)
    with pytest.raises(EngineError, match=r"layers \[3, 9\) are not in \[0, 8\)"):
        engine.span(3, 9)
