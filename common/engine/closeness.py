"""Closeness: how often an engine's choice is stock llama.cpp's, where it need not be equal to the bit.

Teacher-forced: all sides read the same text and then decode it token by token, each step with the token the text has,
so that one difference does not lead to another. The yardstick is stock itself, with flash attention and without: two
roundings of the same mathematics. Used by tests and `outrigger verify --held`; never while serving.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from common.ggml.stock import StockContext

from .engine import Engine
from .grid import cut


@dataclass(frozen=True)
class Difference:
    """At `position` our likeliest token was not stock's, by `gap` in stock's logits."""

    position: int
    ours: int
    stock: int
    gap: float


@dataclass
class Closeness:
    """Decoded positions, and at how many of them the likeliest token was the same."""

    compared: int = 0
    same_as_stock: int = 0
    """Ours and stock with flash attention."""
    stock_same: int = 0
    """Stock with flash attention and stock without."""
    differences: list[Difference] = field(default_factory=list)
    stock_gap_max: float = 0.0
    """The largest gap at which stock differs from itself."""

    @property
    def top1_vs_stock(self) -> float:
        """Share of positions at which we agree with stock."""
        return self.same_as_stock / self.compared

    @property
    def stock_flash_vs_nonflash(self) -> float:
        """Share of positions at which stock agrees with itself."""
        return self.stock_same / self.compared

    def add(self, position: int, ours: np.ndarray, flash: np.ndarray, plain: np.ndarray) -> None:
        """One position's logits f32 [n_vocab] of the three."""
        best_ours, best, best_plain = (int(logits.argmax()) for logits in (ours, flash, plain))
        self.compared += 1
        self.same_as_stock += best_ours == best
        self.stock_same += best_plain == best
        self.stock_gap_max = max(self.stock_gap_max, float(flash[best] - flash[best_plain]))
        if best_ours != best:
            gap = float(flash[best] - flash[best_ours])
            self.differences.append(Difference(position, best_ours, best, gap))


def teacher_forced(
    engine: Engine,
    flash: StockContext,
    plain: StockContext,
    tokens: np.ndarray,
    n_read: int,
    on_step: Callable[[int], None] = lambda _position: None,
) -> Closeness:
    """Reads the first `n_read` tokens i32 on the grid, decodes the others. `plain` is stock without flash attention.

    Sequences are empty before and left as they are after. on_step is told each decoded position.
    """
    span = engine.span(0, engine.spec.n_layer_full)
    span.truncate(0)
    flash.clear()
    plain.clear()
    for position, n in cut(0, n_read):
        rows = tokens[position : position + n]
        for read in (span.run, flash.decode, plain.decode):
            read(rows, position, "none")
    closeness = Closeness()
    for position in range(n_read, len(tokens)):
        row = tokens[position : position + 1]
        ours, theirs, others = (
            decode(row, position, "last")[-1] for decode in (span.run, flash.decode, plain.decode)
        )
        closeness.add(position, ours, theirs, others)
        on_step(position)
    return closeness
