"""Aim: a real model, Gemma 3 270M, is converted right: at two contexts, in fp16 and with palettes of 4 and 6 bits.

Method: every part of every bundle is executed by the interpreter over a document that passes the window of 512; layers
are compared with the float64 forward of the same weights, distributions with it and with stock llama.cpp, which
computes with the same file but rounds activations to 8 bits. Minutes: marked coreml, run by `make verify`.
"""

from pathlib import Path

import numpy as np
import pytest

from common.errors import ModelError
from common.ggml.stock import StockContext, StockModel
from common.model.embedded import gemma3_model
from device.coreml.convert.calibration import BOS, calibration_tokens
from device.coreml.convert.conversation import Conversation
from device.coreml.convert.convert import convert
from device.coreml.convert.forward import Forward
from device.coreml.convert.options import ConvertOptions
from device.coreml.convert.palette import Lut
from device.coreml.convert.proof import closeness, distance
from device.coreml.convert.scale import choose_scale, peaks_over
from device.coreml.convert.source import open_model

pytestmark = [pytest.mark.coreml, pytest.mark.model, pytest.mark.timeout(1500)]

N_TOKENS, N_SINGLE, N_LAYER = 560, 6, 18
CHOSEN = np.r_[5:N_TOKENS:40, N_TOKENS - 8 : N_TOKENS]
"""Positions whose distributions are compared."""

# name -> (context, chunks, palettes of the layers, limits: residual, KL mean and largest, share of equal argmax)
SETTINGS = {
    "fp16-1024": (1024, N_LAYER, None, (2e-2, 1e-4, 3e-4, 1.0)),
    "fp16-4096": (4096, 1, None, (2e-2, 1e-4, 3e-4, 1.0)),
    "lut6-4096": (4096, 1, Lut(6, 4), (0.5, 0.06, 0.3, 0.85)),
    "lut4-1024": (1024, 1, Lut(4, 8), (2.0, 1.5, 4.0, 0.25)),
}
STOCK_KL_MEAN = 0.015
"""Of stock from float64; measured 0.005, which is what its 8-bit activations cost."""


@pytest.fixture(scope="module")
def path():
    try:
        return gemma3_model()
    except ModelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def model(path):
    return open_model(path)


@pytest.fixture(scope="module")
def tokens_and_stock(path):
    """(token ids of a document, stock llama.cpp's logits at the chosen positions)."""
    stock = StockModel(path, repack=False)
    document = Path(__file__).parents[4] / "docs" / "frozen-pages.md"
    tokens = np.concatenate([[BOS], stock.tokenize(document.read_text(encoding="utf-8"))])[:N_TOKENS]
    context = StockContext(stock, n_ctx=1024, n_threads=2)
    logits = [context.decode(tokens[at : at + 140], at, "all") for at in range(0, N_TOKENS, 140)]
    logits = np.concatenate(logits)[CHOSEN]
    context.close()
    stock.close()
    return tokens.astype(np.int32), logits


@pytest.fixture(scope="module")
def exact(model, tokens_and_stock):
    """(float64 residuals after each layer, the last normed; logits at the chosen positions)."""
    forward = Forward(model)
    residuals = list(forward.residuals(tokens_and_stock[0]))[1:]
    logits = forward.logits(residuals[-1][CHOSEN])
    return [*residuals[:-1], forward.norm(residuals[-1], "norm")], logits


@pytest.fixture(scope="module")
def scale(path, model):
    return choose_scale(peaks_over(model, calibration_tokens(path)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One folder for all settings: embeddings and head are made once and kept."""
    return tmp_path_factory.mktemp("bundle")


def test_the_measured_scale_keeps_a_margin(scale, exact):
    peak = max(float(np.abs(rows).max()) for rows in exact[0][:-1])
    assert peak > 65_504, "this model overflows fp16 unscaled: that is why it is measured"
    assert peak * scale * 3 < 65_504


def test_stock_agrees_with_float64(exact, tokens_and_stock):
    stock = closeness(tokens_and_stock[1], exact[1])
    assert stock.kl_mean < STOCK_KL_MEAN
    assert stock.top1 > 0.9


@pytest.mark.parametrize("name", SETTINGS)
def test_a_bundle_against_float64_and_stock(name, model, folder, scale, exact, tokens_and_stock):
    context, chunks, lut, (residual, kl_mean, kl_max, top1) = SETTINGS[name]
    convert(model, folder, ConvertOptions(context, 64, chunks, None, lut, None, scale))
    tokens, stock = tokens_and_stock
    talk = Conversation(folder)
    found = talk.read(tokens)
    for layer, rows in enumerate(found[:-1]):
        assert distance(rows.astype(np.float64) / scale, exact[0][layer]) < residual, f"layer {layer}"
    assert distance(found[-1], exact[0][-1]) < residual
    logits = talk.logits(found[-1][CHOSEN])
    against_exact, against_stock = closeness(logits, exact[1]), closeness(logits, stock)
    print(f"\n{name}: last residual {distance(found[-1], exact[0][-1]):.2e}; float64: {against_exact}")
    print(f"{name}: stock llama.cpp: {against_stock}")
    assert against_exact.kl_mean < kl_mean
    assert against_exact.kl_max < kl_max
    assert against_exact.top1 >= top1
    assert against_stock.kl_mean < kl_mean + STOCK_KL_MEAN
    talk.restart()
    talk.read(tokens[:-N_SINGLE])
    single = talk.read(tokens[-N_SINGLE:], one_by_one=True)[-1]
    assert distance(single, found[-1][-N_SINGLE:].astype(np.float64)) < 2e-2


def test_without_a_scale_it_overflows(model, folder, tokens_and_stock):
    """What an unmeasured conversion gives: not a number, from the first token on."""
    convert(model, folder, ConvertOptions(1024, 64, 1, None, None, None, 1.0))
    with np.errstate(all="ignore"):
        assert not np.isfinite(Conversation(folder).read(tokens_and_stock[0][:8])[-1]).all()
