"""Synthetic models: same seed same bytes, stock llama.cpp loads them, and what they compute resembles a trained model.

The tiny preset reads English text in stock llama.cpp: the next-token distribution is neither flat nor certain,
predictions are varied, far tokens matter. Without that, a comparison of two runs of such a model would prove little.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from common.errors import ModelError
from common.ggml.header import read_header
from common.ggml.stock import StockContext, StockModel
from common.model.geometry import PRESETS, Geometry, preset
from common.model.spec import ModelSpec
from common.model.synthetic import write_synthetic

TEXT = (
    "The harbour master kept a ledger of every boat that came in under sail, and every evening he read the day's "
    "entries aloud to the clerk. Some of the names were long, some of the cargoes strange: salt, lamp oil, a piano "
    "without legs, forty crates of books. When the fog came down no boat entered for a week, and still he read, "
    "slowly, turning the empty pages, because a day without arrivals was also a day and had to be written down. "
    "In spring the first steamer came. It did not wait for the wind, and it did not wait for the harbour master."
)
SMALL = Geometry(n_layer=4, n_embd=64, n_ff=96, n_head=4, n_head_kv=2, head_dim=32, n_vocab=100, state_dim=32)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Path:
    path = tmp_path_factory.mktemp("synthetic") / "tiny.gguf"
    geometry, storage = preset("tiny")
    write_synthetic(geometry, path, storage=storage, tokenizer=smollm2)
    return path


@pytest.mark.model
def test_it_behaves_like_a_trained_model_on_text(tiny: Path) -> None:
    model = StockModel(tiny, repack=False)
    context = StockContext(model, n_ctx=256)
    tokens = model.tokenize(TEXT)
    assert 100 < len(tokens) <= 256
    logits = context.decode(tokens, 0, "all").astype(np.float64)
    context.clear()
    changed = np.concatenate([tokens[: len(tokens) // 2][::-1], tokens[len(tokens) // 2 :]])
    other = context.decode(changed, 0, "last")[0]
    context.close()
    model.close()

    log_p = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    entropy = -(np.exp(log_p) * log_p).sum(axis=1)  # nats; a flat distribution has ln 49152 = 10.8
    assert 4 < entropy.mean() < 7
    assert 0.02 < np.exp(log_p.max(axis=1)).mean() < 0.5
    predicted = logits.argmax(axis=1)
    assert len(set(predicted.tolist())) > 0.8 * len(tokens)
    assert (predicted == tokens).mean() < 0.05  # it does not repeat what it was given
    assert np.sqrt(np.mean((other - logits[-1]) ** 2)) > 0.1  # the first half, reversed, is felt at the end


@pytest.mark.model
def test_greedy_decoding_does_not_fall_into_a_loop(tiny: Path) -> None:
    model = StockModel(tiny, repack=False)
    context = StockContext(model, n_ctx=256)
    tokens = model.tokenize(TEXT)[:40]
    logits, spoken = context.decode(tokens, 0), []
    for position in range(len(tokens), len(tokens) + 60):
        spoken.append(int(logits[0].argmax()))
        logits = context.decode(np.array(spoken[-1:], np.int32), position)
    context.close()
    model.close()
    assert len(set(spoken)) > 50


@pytest.mark.model
def test_the_tokenizer_is_taken_over_with_its_chat_template(tiny: Path, smollm2: Path) -> None:
    ours, theirs = (read_header(path, strings=True).metadata for path in (tiny, smollm2))
    taken = {key: value for key, value in theirs.items() if key.startswith("tokenizer.")}
    assert "tokenizer.chat_template" in taken
    assert taken.items() <= ours.items()


@pytest.mark.parametrize("storage", ["f32", "f16", "q8_0", "q4_0", "q4_1", "q4_K"])
@pytest.mark.parametrize("arch", ["llama", "qwen35", "gemma3"])
def test_stock_loads_every_type_and_architecture(tmp_path: Path, arch: str, storage: str) -> None:
    path = tmp_path / "model.gguf"
    geometry = replace(
        SMALL, arch=arch, n_embd=256, n_ff=256, head_dim=64, state_dim=64, tied=storage != "f16"
    )
    write_synthetic(geometry, path, storage=storage)
    model = StockModel(path, repack=False)
    context = StockContext(model, n_ctx=256)
    logits = context.decode(np.arange(20), 0, "all")
    context.close()
    model.close()
    assert logits.shape == (20, 100)
    assert 2.5 < logits.std() < 4.5


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a", "b", "c")]
    for path, seed in zip(files, (1, 1, 2), strict=True):
        write_synthetic(SMALL, path, storage="q4_0", seed=seed)
    a, b, c = (path.read_bytes() for path in files)
    assert a == b
    assert a != c


def test_a_matrix_larger_than_a_block_is_drawn_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_synthetic(SMALL, tmp_path / "whole")
    monkeypatch.setattr("common.model.synthetic.BLOCK_ELEMENTS", 7 * 64 + 1)
    write_synthetic(SMALL, tmp_path / "blocks")
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "blocks").read_bytes()


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_sizes_in_their_names(name: str) -> None:
    geometry, storage = PRESETS[name]
    in_layers, _ = geometry.n_params()
    least, most, n_layer = {
        "tiny": (0, 2e6, 8),
        "tiny-sliding": (0, 3e6, 12),
        "hybrid-60m": (55e6, 65e6, 32),
        "hybrid-27b-heads": (25e6, 40e6, 8),
        "hybrid-27b-cycle": (12e6, 20e6, 4),
        "hybrid-27b-wide": (190e6, 260e6, 16),
        "hybrid-400m": (380e6, 440e6, 32),
    }[name]
    assert least < in_layers < most
    assert geometry.n_layer == n_layer
    assert storage == "q4_0"


def test_the_spec_reads_back_what_the_geometry_said(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_synthetic(replace(SMALL, n_layer=6, interval=3, tied=False), path)
    spec = ModelSpec.read(path)
    assert (spec.arch, spec.n_layer_full, spec.cycle, spec.n_vocab) == ("qwen35", 6, 3, 100)
    assert [spec.kind(layer) == "attention" for layer in spec.layers] == [False, False, True] * 2
    assert spec.has_embedding and spec.has_output and "output.weight" in spec.tensors


@pytest.mark.model
def test_what_does_not_fit_together_is_refused(tmp_path: Path, smollm2: Path) -> None:
    out = tmp_path / "model.gguf"
    with pytest.raises(ModelError, match="rows of 64 and q4_K needs a multiple of 256"):
        write_synthetic(SMALL, out, storage="q4_K")
    with pytest.raises(ModelError, match="has 49152 tokens, the geometry asks for n_vocab 100"):
        write_synthetic(SMALL, out, tokenizer=smollm2)
    with pytest.raises(
        ModelError,
        match="unknown preset 'huge'; presets: tiny, tiny-sliding, hybrid-60m, hybrid-27b-heads, hybrid-27b-cycle, ",
    ):
        preset("huge")
    with pytest.raises(ModelError, match="n_head 4 must be a multiple of n_head_kv 3"):
        replace(SMALL, n_head_kv=3)
    with pytest.raises(ModelError, match="n_layer must be at least 1; got 0"):
        replace(SMALL, n_layer=0)
    write_synthetic(SMALL, out)
    with pytest.raises(ModelError, match="has no tokenizer to take over"):
        write_synthetic(SMALL, tmp_path / "other.gguf", tokenizer=out)
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]
