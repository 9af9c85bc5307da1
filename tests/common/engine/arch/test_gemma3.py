"""gemma3 against stock llama.cpp: logits equal to the last bit, past the window, whole and split, prompt and decode.

Stock keeps all rows of sliding layers, as we do (swa_full): its own smaller cache reorders the cells, which rounds
differently. Synthetic models vary window, pattern and depth; Gemma 3 270M is the real one.
"""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from common.engine.engine import Engine
from common.engine.parity import compare, run_spans
from common.ggml.stock import StockContext, StockModel
from common.model.geometry import Geometry
from common.model.synthetic import write_synthetic

N_CTX = 512
SMALL: dict[str, object] = dict(
    arch="gemma3", n_layer=8, n_embd=64, n_ff=96, n_head=4, n_head_kv=2, head_dim=32, n_vocab=200, interval=3,
    window=40, rope_freq_base=1e6, rope_linear_factor=8.0,
)  # fmt: skip
VARIANTS = {
    "sliding": {},
    "a window of one": {"window": 1},
    "a window beyond the context": {"window": 5000},
    "all global": {"interval": 1},
    "no linear scale": {"rope_linear_factor": 1.0},
    "62 layers": {"n_layer": 62, "n_head": 1, "n_head_kv": 1, "interval": 6},
}


@contextmanager
def both(path: Path, n_ctx: int) -> Iterator[tuple[Engine, StockContext, StockModel]]:
    """Our engine and stock, both with repacked weights, on one thread."""
    model = StockModel(path, repack=True)
    stock = StockContext(model, n_ctx=n_ctx)
    with Engine.load(path, n_ctx=n_ctx) as engine:
        yield engine, stock, model
    stock.close()
    model.close()


@pytest.mark.parametrize("variant", VARIANTS)
def test_synthetic_models_equal_stock_to_the_bit(tmp_path: Path, variant: str) -> None:
    path = tmp_path / "model.gguf"
    write_synthetic(Geometry(**(SMALL | VARIANTS[variant])), path, storage="q4_0")
    tokens = np.random.default_rng(1).integers(0, 200, 300).astype(np.int32)
    with both(path, N_CTX) as (engine, stock, _):
        for cuts in ([], [2, 5]):
            count = compare(engine, stock, tokens, 20, cuts, "all")
            assert (count.compared, count.equal) == (320, 320), f"cuts {cuts}: {count}"


def test_rows_taken_over_by_another_engine_go_on_alike(tmp_path: Path) -> None:
    """What the worker does: layers 3 to 7 elsewhere, all rows home again, more than the window."""
    path = tmp_path / "model.gguf"
    write_synthetic(Geometry(**SMALL), path, storage="q8_0")
    tokens = np.random.default_rng(2).integers(0, 200, 120).astype(np.int32)
    with Engine.load(path, n_ctx=N_CTX) as here, Engine.load(path, n_ctx=N_CTX) as there:
        head, tail, away = here.span(0, 3), here.span(3, 8), there.span(3, 8)
        run_spans([head, away], tokens[:100], 0, "none")
        tail.import_rows(away.export_rows(0, 100), 100)
        for at in range(100, 120):
            row = tokens[at : at + 1]
            residual = head.run(row, at)
            assert np.array_equal(tail.run(residual, at, "last"), away.run(residual, at, "last"))
        for span in (head, tail):
            span.truncate(60)
        again = run_spans([head, tail], tokens[60:], 60, "all")
        for span in (head, away):
            span.truncate(60)
        assert np.array_equal(run_spans([head, away], tokens[60:], 60, "all"), again)


@pytest.mark.model
def test_gemma_3_270m_equals_stock_to_the_bit(gemma3: Path) -> None:
    with both(gemma3, 768) as (engine, stock, model):
        assert (engine.spec.cycle, engine.spec.n_layer_full, engine.spec.n_vocab) == (6, 18, 262_144)
        assert [n for n in range(18) if engine.spec.kind(n) == "attention"] == [5, 11, 17]
        text = "\n".join(pydoc_data.topics.topics[name] for name in ("assert", "assignment"))
        tokens = model.tokenize(text)[:530]
        assert len(tokens) == 530  # further than the window of 512
        count = compare(engine, stock, tokens, 6, cuts=[6, 11])
        assert (count.compared, count.equal) == (9, 9), count
