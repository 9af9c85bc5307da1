"""Arithmetic on one row of logits, around the choice of a token: biases before it, log-probabilities after it.

Plain NumPy, the same on every machine. Used by services.mac, beside the sampler.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.errors import EngineError
from common.limits import TOP_LOGPROBS_MAX

LOGIT_BIAS_ABS_MAX = 100.0


class Logprobs(NamedTuple):
    """Natural logarithms of probabilities: of the token chosen, and (token id, logprob) of the likeliest ones."""

    chosen: float
    top: tuple[tuple[int, float], ...]


class LogitBias:
    """What a request adds to the logits of some tokens."""

    def __init__(self, biases: Sequence[tuple[int, float]], n_vocab: int) -> None:
        """biases: (token id, bias), each id once. Raises EngineError for ids or values outside their ranges."""
        for token_id, bias in biases:
            if not 0 <= token_id < n_vocab:
                raise EngineError(f"logit_bias names token id {token_id}; allowed are 0 to {n_vocab - 1}")
            if not math.fabs(bias) <= LOGIT_BIAS_ABS_MAX:  # also refuses NaN
                raise EngineError(
                    f"logit_bias of token id {token_id} is {bias}; allowed are "
                    f"{-LOGIT_BIAS_ABS_MAX:g} to {LOGIT_BIAS_ABS_MAX:g}"
                )
        self._ids = np.array([token_id for token_id, _ in biases], np.int64)
        self._values = np.array([bias for _, bias in biases], np.float32)
        if len(np.unique(self._ids)) != len(self._ids):
            raise EngineError("logit_bias names a token id twice")

    def apply(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """logits f32 [n_vocab] with the biases added: a copy, or the array itself when there are none."""
        if not self._ids.size:
            return logits
        biased = logits.copy()
        biased[self._ids] += self._values
        return biased


def logprobs(logits: NDArray[np.float32], token_id: int, n_top: int) -> Logprobs:
    """Log-softmax of logits f32 [n_vocab] in f32, for the token chosen and the n_top likeliest.

    Of equal logits the lowest id comes first, as in greedy's choice. Raises EngineError when n_top is out of range.
    """
    if not 0 <= n_top <= TOP_LOGPROBS_MAX:
        raise EngineError(f"top_logprobs is {n_top}; allowed are 0 to {TOP_LOGPROBS_MAX}")
    shifted = logits - logits.max()
    # The sum is taken in f64 so that it depends neither on the vocabulary's order nor on its size.
    log_sum = np.float32(np.log(np.exp(shifted).sum(dtype=np.float64)))
    top = tuple((int(i), float(shifted[i] - log_sum)) for i in _likeliest(logits, n_top))
    return Logprobs(float(shifted[token_id] - log_sum), top)


def _likeliest(logits: NDArray[np.float32], n: int) -> NDArray[np.int64]:
    """Ids of the n highest logits, highest first, of equals the lowest id first."""
    n = min(n, len(logits))
    if n == 0:
        return np.empty(0, np.int64)
    lowest = np.partition(logits, len(logits) - n)[len(logits) - n]
    among = np.flatnonzero(logits >= lowest)
    return among[np.argsort(-logits[among], kind="stable")][:n]
