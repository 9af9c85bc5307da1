"""Against stock llama.cpp of the same wheel: logits equal to the last bit, on natural text.

Both real architectures, both weight layouts, prompts of 0, 1 and 2 rows past the grid, whole and split at random
layers, then decoding along stock's own choices. The long form is `outrigger verify --parity`.
"""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from common.engine.engine import Engine
from common.engine.grid import cut
from common.engine.parity import compare
from common.engine.span import WantedLogits
from common.ggml.stock import StockContext, StockModel
from common.model.geometry import PRESETS
from common.model.synthetic import write_synthetic

N_CTX, N_GENERATED = 1024, 16


def natural_text() -> str:
    """Prose about Python, as the interpreter carries it."""
    return "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Path:
    path = tmp_path_factory.mktemp("parity") / "tiny.gguf"
    geometry, storage = PRESETS["tiny"]
    write_synthetic(geometry, path, storage=storage, tokenizer=smollm2)
    return path


@pytest.fixture(scope="module", params=[("plain", 2), ("repack", 1)], ids=str)
def hybrid(request: pytest.FixtureRequest, tiny: Path) -> Iterator[tuple[Engine, StockContext, np.ndarray]]:
    yield from loaded(tiny, *request.param)


@pytest.fixture(scope="module")
def dense(smollm2: Path) -> Iterator[tuple[Engine, StockContext, np.ndarray]]:
    yield from loaded(smollm2, "repack", 1)


def loaded(path: Path, weights: str, n_threads: int) -> Iterator[tuple[Engine, StockContext, np.ndarray]]:
    """Our engine and stock with the same layout, and the text's tokens."""
    model = StockModel(path, repack=weights == "repack")
    stock = StockContext(model, n_ctx=N_CTX, n_threads=n_threads)
    tokens = model.tokenize(natural_text()[: 6 * N_CTX])
    with Engine.load(path, n_ctx=N_CTX, n_threads=n_threads, weights=weights) as engine:
        yield engine, stock, tokens
    stock.close(), model.close()


def random_cuts(engine: Engine, seed: int) -> list[int]:
    rng = np.random.default_rng(seed)
    return sorted(
        rng.choice(np.arange(1, engine.spec.n_layer_full), size=1 + seed % 2, replace=False).tolist()
    )


@pytest.mark.model
@pytest.mark.parametrize("n_prompt", [512, 513, 514])
def test_a_hybrid_equals_stock_to_the_bit(
    hybrid: tuple[Engine, StockContext, np.ndarray], n_prompt: int
) -> None:
    engine, stock, tokens = hybrid
    for cuts in ([], random_cuts(engine, n_prompt), random_cuts(engine, n_prompt + 3)):
        logits: WantedLogits = "last" if cuts else "all"
        count = compare(engine, stock, tokens[:n_prompt], N_GENERATED, cuts, logits)
        assert count.compared == N_GENERATED + (len(cut(0, n_prompt)) if cuts else n_prompt)
        assert (count.equal, count.difference_max) == (count.compared, 0.0), f"cuts {cuts}"


@pytest.mark.model
@pytest.mark.parametrize(("n_prompt", "split"), [(256, False), (257, True), (258, False)])
def test_smollm2_equals_stock_to_the_bit(
    dense: tuple[Engine, StockContext, np.ndarray], n_prompt: int, split: bool
) -> None:
    engine, stock, tokens = dense
    cuts = random_cuts(engine, n_prompt) if split else []
    count = compare(engine, stock, tokens[100 : 100 + n_prompt], N_GENERATED, cuts)
    assert count.compared == N_GENERATED + len(cut(0, n_prompt))
    assert (count.equal, count.same_token, count.difference_max) == (count.compared, count.compared, 0.0)
