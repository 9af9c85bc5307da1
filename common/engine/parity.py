"""Parity: our engine beside stock llama.cpp on the same file, read by the same grid, compared to the last bit.

Used by tests (short), `outrigger verify --parity` (long), the first-start check and the bench; never while serving.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from common.ggml.stock import StockContext

from .engine import Engine
from .grid import cut
from .span import LayerSpan, WantedLogits


@dataclass
class ParityCount:
    """Positions whose logits were compared, and how many were equal to the last bit, had the same top token, or were
    the furthest apart."""

    compared: int = 0
    equal: int = 0
    same_token: int = 0
    difference_max: float = 0.0

    def add(self, ours: np.ndarray, stock: np.ndarray) -> None:
        """Compares logits f32 [n, n_vocab]."""
        self.compared += len(stock)
        self.equal += int((ours == stock).all(axis=1).sum())
        self.same_token += int((ours.argmax(axis=1) == stock.argmax(axis=1)).sum())
        self.difference_max = max(self.difference_max, float(np.abs(ours - stock).max()))

    def __add__(self, other: ParityCount) -> ParityCount:
        return ParityCount(
            self.compared + other.compared,
            self.equal + other.equal,
            self.same_token + other.same_token,
            max(self.difference_max, other.difference_max),
        )


def run_spans(
    spans: Sequence[LayerSpan], rows: np.ndarray, position: int, logits: WantedLogits
) -> np.ndarray:
    """One ubatch through consecutive spans; what the last one returns."""
    for span in spans:
        rows = span.run(rows, position, logits if span is spans[-1] else "none")
    return rows


def compare(
    engine: Engine,
    stock: StockContext,
    tokens: np.ndarray,
    n_generated: int,
    cuts: Sequence[int] = (),
    logits: WantedLogits = "last",
) -> ParityCount:
    """Reads tokens i32 on the grid in both, then decodes `n_generated` tokens, always the one stock found best.

    cuts: layers at which our engine is split into spans. logits: `last` compares the last row of every ubatch, `all`
    every row. Both sequences are empty before and left as they are after.
    """
    edges = [0, *sorted(cuts), engine.spec.n_layer_full]
    spans = [engine.span(a, b) for a, b in pairwise(edges)]
    stock.clear()
    for span in spans:
        span.truncate(0)
    count = ParityCount()
    theirs = np.empty((0, 0), np.float32)
    for position, n in cut(0, len(tokens)):
        rows = tokens[position : position + n]
        theirs = stock.decode(rows, position, logits)
        count.add(run_spans(spans, rows, position, logits), theirs)
    for i in range(n_generated):
        best = np.array([theirs[-1].argmax()], np.int32)
        theirs = stock.decode(best, len(tokens) + i)
        count.add(run_spans(spans, best, len(tokens) + i, "last"), theirs)
    return count
