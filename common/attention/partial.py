"""The partial result of attention over some of the keys, and the fold that joins two of them.

For one query row with scaled scores s_i over the keys of a part:

    m = max s_i        l = Σ exp(s_i - m)        O = Σ exp(s_i - m) · v_i

Attention over everything is O / l once all parts are folded. This is the online softmax of FlashAttention, with the
parts lying wherever they lie. Exponentials are base e, on the wire too.

Parts are folded in one order everywhere, the oldest keys first. Rounding then depends on the parts and not on where
they were computed. Used by merge.py's callers, common/engine and the worker.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from common.errors import EngineError


@dataclass(frozen=True)
class PartialAttention:
    """Accumulators of any number of query rows; `rows` stands for any leading axes, such as [n_head_kv, n_rows].

    m: f32 or f64 [*rows], the largest scaled score; -inf where a row saw no key
    l: same type  [*rows], the sum of exp(score - m)
    o: same type  [*rows, head_dim_v], the values summed with these weights, not divided by l
    """

    m: np.ndarray
    l: np.ndarray  # noqa: E741  the letter of the papers and of the protocol
    o: np.ndarray

    def __post_init__(self) -> None:
        fits = self.m.shape == self.l.shape == self.o.shape[:-1]
        if not fits or not self.m.dtype == self.l.dtype == self.o.dtype or self.m.dtype.kind != "f":
            raise EngineError(
                f"a partial needs m and l of one shape and o with one axis more, all of one float type; got "
                f"{self.m.dtype} {self.m.shape}, {self.l.dtype} {self.l.shape}, {self.o.dtype} {self.o.shape}"
            )

    @classmethod
    def identity(
        cls, rows: tuple[int, ...], head_dim_v: int, dtype: np.dtype | type = np.float32
    ) -> PartialAttention:
        """Attention over no keys: folding it with a partial gives that partial, to the bit."""
        return cls(np.full(rows, -np.inf, dtype), np.zeros(rows, dtype), np.zeros((*rows, head_dim_v), dtype))

    def normalised(self) -> tuple[np.ndarray, np.ndarray]:
        """(O [*rows, head_dim_v], lse [*rows]): the attention output and the log of the sum of exponentiated
        scores. A row that saw no key has O = 0 and lse = -inf."""
        seen = self.l > 0
        lse = np.where(seen, self.m + np.log(np.where(seen, self.l, 1)), -np.inf).astype(self.m.dtype)
        return self.output(), lse

    def output(self) -> np.ndarray:
        """O [*rows, head_dim_v] of `normalised`, for who does not want the lse."""
        return self.o / np.where(self.l > 0, self.l, 1)[..., None]


def fold(older: PartialAttention, newer: PartialAttention) -> PartialAttention:
    """The partial over the keys of both. Raises EngineError when their rows differ."""
    if older.o.shape != newer.o.shape or older.o.dtype != newer.o.dtype:
        raise EngineError(
            f"cannot fold partials of {older.o.dtype} {older.o.shape} and {newer.o.dtype} {newer.o.shape}"
        )
    m = np.maximum(older.m, newer.m)
    reference = np.maximum(
        m, np.finfo(m.dtype).min
    )  # a row without keys weighs nothing; -inf - -inf never happens
    with np.errstate(under="ignore", over="ignore"):  # a part that does not count any more
        weight_older, weight_newer = np.exp(older.m - reference), np.exp(newer.m - reference)
    l = older.l * weight_older  # noqa: E741
    l += newer.l * weight_newer  # noqa: E741
    o = older.o * weight_older[..., None]
    o += newer.o * weight_newer[..., None]
    return PartialAttention(m, l, o)


def fold_all(parts: Iterable[PartialAttention]) -> PartialAttention:
    """Folds parts from left to right; give them oldest keys first. Raises EngineError when there is none."""
    total = None
    for part in parts:
        total = part if total is None else fold(total, part)
    if total is None:
        raise EngineError("no partial to fold; fold PartialAttention.identity when there are no keys")
    return total
