"""The choice of the next token: arg-max for greedy, llama.cpp's own standalone samplers for everything else.

Runs on the host, on its thread; knows logits and token ids, no text. One Sampler lives as long as one request, because
penalties remember what was chosen and the random stream goes on from token to token.
"""

from __future__ import annotations

import ctypes
from types import TracebackType
from typing import Protocol

import numpy as np

from common.errors import EngineError
from common.ggml.llama import llama
from common.limits import N_VOCAB_MAX

PENALTY_WINDOW_TOKENS = 1 << 14
"""How many of the newest generated tokens the penalties count."""

RANDOM_SEED = 0xFFFF_FFFF
"""libllama's word for "take any seed": never passed on, or a request could not be repeated."""

_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)], align=True)
"""One llama_token_data."""


class SamplingValues(Protocol):
    """What a sampler needs to be told; `common.wire.messages.Sampling` has this shape."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...
    @property
    def presence_penalty(self) -> float: ...
    @property
    def frequency_penalty(self) -> float: ...
    @property
    def repeat_penalty(self) -> float: ...
    @property
    def seed(self) -> int: ...


class Sampler:
    """Chooses token after token for one request; the same seed and logits give the same tokens.

    temperature 0 is greedy: the highest logit, of equals the lowest id. Otherwise, in llama.cpp's order: penalties,
    top-k (0: off), top-p, min-p, temperature, draw. Penalties count generated tokens only, as OpenAI's do.
    `close` it at the end.
    """

    def __init__(self, values: SamplingValues, n_vocab: int) -> None:
        """Raises EngineError for values outside their ranges."""
        _require_ranges(values, n_vocab)
        self.n_vocab = n_vocab
        self._greedy = values.temperature == 0
        self._chain: int | None = None
        parts = self._parts(values)
        if parts:
            native = llama()
            self._candidates = np.zeros(n_vocab, _CANDIDATE)
            self._ids = np.arange(n_vocab, dtype=np.int32)
            self._chain = native.llama_sampler_chain_init(native.llama_sampler_chain_default_params())
            for part in parts:
                native.llama_sampler_chain_add(self._chain, part)
        self._closed = False

    def _parts(self, values: SamplingValues) -> list[int]:
        """The native samplers of the chain, in order; empty for plain greedy."""
        native = llama()
        parts = []
        penalties = (values.repeat_penalty, values.frequency_penalty, values.presence_penalty)
        if penalties != (1.0, 0.0, 0.0):
            parts.append(native.llama_sampler_init_penalties(self.n_vocab, PENALTY_WINDOW_TOKENS, *penalties))
        if self._greedy:
            return parts
        if values.top_k > 0:
            parts.append(native.llama_sampler_init_top_k(values.top_k))
        if values.top_p < 1:
            parts.append(native.llama_sampler_init_top_p(values.top_p, 1))
        if values.min_p > 0:
            parts.append(native.llama_sampler_init_min_p(values.min_p, 1))
        parts.append(native.llama_sampler_init_temp(values.temperature))
        parts.append(native.llama_sampler_init_dist(values.seed))
        return parts

    def sample(self, logits: np.ndarray) -> int:
        """The next token id. logits: f32 [n_vocab], left unchanged. Raises EngineError when one is not finite."""
        if self._closed:
            raise EngineError("this sampler was closed")
        if logits.shape != (self.n_vocab,) or logits.dtype != np.float32:
            raise EngineError(f"logits must be f32 [{self.n_vocab}], not {logits.dtype} {list(logits.shape)}")
        if not np.isfinite(logits).all():
            bad = int(np.flatnonzero(~np.isfinite(logits))[0])
            raise EngineError(
                f"the logit of token id {bad} is {logits[bad]}; the model's weights or state are damaged"
            )
        if self._chain is None:
            return int(np.argmax(logits))
        return self._sample_native(logits)

    def _sample_native(self, logits: np.ndarray) -> int:
        native = llama()
        candidates = self._candidates
        candidates["id"] = self._ids
        candidates["logit"] = logits
        candidates["p"] = 0
        array = native.llama_token_data_array()
        array.data = candidates.ctypes.data_as(native.llama_token_data_p)
        array.size, array.selected, array.sorted = self.n_vocab, -1, False
        native.llama_sampler_apply(self._chain, ctypes.byref(array))
        if self._greedy:
            # Penalties change logits in place and keep the order, so the lowest id still wins among equals.
            token_id = int(np.argmax(candidates["logit"]))
        elif 0 <= array.selected < array.size <= self.n_vocab:
            token_id = int(array.data[array.selected].id)
        else:
            raise EngineError(f"llama.cpp's samplers chose nothing (index {array.selected} of {array.size})")
        native.llama_sampler_accept(self._chain, token_id)
        return token_id

    def close(self) -> None:
        """Frees the native chain and the samplers in it. Calling it twice does no harm."""
        if self._chain is not None:
            llama().llama_sampler_free(self._chain)
        self._chain, self._closed = None, True

    def __enter__(self) -> Sampler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _require_ranges(values: SamplingValues, n_vocab: int) -> None:
    """Native samplers assert, so that a value out of range would end the process."""
    allowed = (
        ("temperature", 0, 100),
        ("top_k", 0, N_VOCAB_MAX),
        ("top_p", 0, 1),
        ("min_p", 0, 1),
        ("presence_penalty", -100, 100),
        ("frequency_penalty", -100, 100),
        ("repeat_penalty", 0.01, 100),
        ("seed", 0, RANDOM_SEED - 1),
    )
    for name, low, high in allowed:
        value = getattr(values, name)
        if not low <= value <= high:  # also refuses NaN
            raise EngineError(f"{name} is {value}; allowed are {low} to {high}")
    if not 0 < n_vocab <= N_VOCAB_MAX:
        raise EngineError(f"n_vocab is {n_vocab}; allowed are 1 to {N_VOCAB_MAX}")
