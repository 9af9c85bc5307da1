"""What stock llama.cpp and our engine compute with one tail file, from the same rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from common.engine.engine import Engine
from common.ggml.stock import StockContext, StockModel
from common.model.gguf import GgufFile

TOKENS = np.arange(30)


def stock_logits(tail: Path) -> np.ndarray:
    """Stock's logits f32 [30, n_vocab]: it turns TOKENS into rows of the tail's one matrix."""
    model = StockModel(tail, repack=False)
    stock = StockContext(model, n_ctx=256)
    logits = stock.decode(TOKENS, 0, "all")
    stock.close()
    model.close()
    return logits


def our_logits(tail: Path, first: int, last: int, scale: float = 1.0) -> np.ndarray:
    """Our span's logits f32 [30, n_vocab] of layers [first, last): the same rows, times `scale`, are its residual."""
    file = GgufFile(tail)
    info = file.tensor("token_embd.weight")
    rows = file.tensor_bytes(info.name).reshape(info.shape[1], -1)[TOKENS]
    residual = dequantize(rows, GGMLQuantizationType(info.type)) * np.float32(scale)
    file.close()
    with Engine.load(tail, n_ctx=256, weights="plain") as engine:
        return engine.span(first, last).run(residual, 0, "all")
