"""The model's forward pass written from its formulas, in float64 or float32, one layer's weights in memory at a time.

It shares nothing with the programs but the description and the rotary angles: the oracle of the proofs, and the source
of real activations for the fp16 check (`watch` sees what flows at each place). Called by proof.py and tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from device.coreml.convert.description import GemmaModel

Watch = Callable[[int, str, np.ndarray], None]
"""Called with (layer, place, rows): places are `attention`, `attention_normed`, `mid`, `gate`, `mlp`, `mlp_normed`,
`residual`; layer -1 and `embedding` for the first residual."""


@dataclass
class Forward:
    """Runs a whole text at once. `weights` may replace a matrix by another (its palette, say) before it is used."""

    model: GemmaModel
    dtype: Any = np.float64
    watch: Watch = lambda layer, place, rows: None
    weights: Callable[[str, np.ndarray], np.ndarray] = lambda name, weight: weight

    def embedded(self, tokens: np.ndarray) -> np.ndarray:
        """[n_tokens, n_embd], the first residual of token ids."""
        table = np.stack([self.model.rows("embed", int(i), int(i) + 1)[0] for i in tokens])
        return table.astype(self.dtype) * self.model.embedding_scale

    def residuals(self, tokens: np.ndarray, embedded: np.ndarray | None = None) -> Iterator[np.ndarray]:
        """[n_tokens, n_embd] after the embedding (or from `embedded` on), then after each layer."""
        x = self.embedded(tokens) if embedded is None else embedded.astype(self.dtype)
        self.watch(-1, "embedding", x)
        yield x
        for layer in range(self.model.n_layer):
            x = self.layer(layer, x)
            yield x

    def layer(self, layer: int, x: np.ndarray) -> np.ndarray:
        """One layer over all positions."""
        attended = self._attention(layer, self.norm(x, f"{layer}.attn_norm"))
        self.watch(layer, "attention", attended)
        attended = self.norm(attended, f"{layer}.post_attn_norm")
        self.watch(layer, "attention_normed", attended)
        x = x + attended
        self.watch(layer, "mid", x)
        h = self.norm(x, f"{layer}.ffn_norm")
        gate = gelu(h @ self._matrix(f"{layer}.gate").T) * (h @ self._matrix(f"{layer}.up").T)
        self.watch(layer, "gate", gate)
        fed = gate @ self._matrix(f"{layer}.down").T
        self.watch(layer, "mlp", fed)
        fed = self.norm(fed, f"{layer}.post_ffn_norm")
        self.watch(layer, "mlp_normed", fed)
        x = x + fed
        self.watch(layer, "residual", x)
        return x

    def logits(self, x: np.ndarray) -> np.ndarray:
        """[n_tokens, n_vocab] of the last layer's residuals."""
        h = self.norm(x, "norm").astype(np.float32 if self.dtype is np.float32 else np.float64)
        blocks = [h @ self.weights("head", rows).astype(h.dtype).T for _, rows in self.model.blocks("head")]
        return np.concatenate(blocks, axis=1)

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        """RMSNorm over the last axis."""
        mean_square = (x * x).mean(axis=-1, keepdims=True)
        return x / np.sqrt(mean_square + self.model.eps) * self.model.gain(name).astype(self.dtype)

    def _matrix(self, name: str) -> np.ndarray:
        return self.weights(name, self.model.rows(name)).astype(self.dtype)

    def _attention(self, layer: int, h: np.ndarray) -> np.ndarray:
        model, n = self.model, len(h)
        q, k, v = ((h @ self._matrix(f"{layer}.{each}").T).reshape(n, -1, model.head_dim) for each in "qkv")
        q, k = self.norm(q, f"{layer}.q_norm"), self.norm(k, f"{layer}.k_norm")
        q, k = self._rotated(layer, q), self._rotated(layer, k)
        age = np.arange(n)[:, None] - np.arange(n)[None, :]
        seen = age >= 0
        if model.kinds[layer] == "sliding":
            seen &= age < model.window
        out = np.empty_like(q)
        n_shared = model.n_head // model.n_head_kv
        for head in range(model.n_head):
            scores = q[:, head] @ k[:, head // n_shared].T * model.attention_scale
            scores = np.where(seen, scores, -np.inf)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            out[:, head] = weights @ v[:, head // n_shared] / weights.sum(axis=-1, keepdims=True)
        return out.reshape(n, -1) @ self._matrix(f"{layer}.o").T

    def _rotated(self, layer: int, heads: np.ndarray) -> np.ndarray:
        rope, half = self.model.ropes[self.model.kinds[layer]], self.model.head_dim // 2
        angles = rope.angles(np.arange(len(heads)), self.model.head_dim)[:, None]
        cos, sin = np.cos(angles).astype(self.dtype), np.sin(angles).astype(self.dtype)
        a, b = heads[..., :half], heads[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def gelu(x: np.ndarray) -> np.ndarray:
    """The tanh form, as the models were trained with."""
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
