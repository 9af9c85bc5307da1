"""The operations of one transformer layer of a chunk, for one token (`infer`) or a batch of them (`prefill`).

Layouts: the residual is [1, n_tokens, n_embd], as apps pass it between chunks; inside, channels come first and every
linear layer is a 1x1 convolution, which is what the Neural Engine runs. RMSNorm is layer_norm over [x, -x], whose mean
is 0: the engine has that operation and computes it wider than fp16 could square a residual.

Queries of heads that share a KV head lie side by side in one matrix product, so keys and values are never repeated.
The attention scale is part of the query norm's gain. Caches are caches.py's. Called by programs.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from device.coreml import toolchain
from device.coreml.convert.caches import Caches
from device.coreml.convert.description import GemmaModel
from device.coreml.convert.stored import WeightStore

F16 = np.float16


@dataclass
class LayerBuilder:
    """Adds layers to the function that is being built. `scale` is the residual's (1, or fp16-check's power of two)."""

    model: GemmaModel
    store: WeightStore
    n_tokens: int
    scale: float
    caches: Caches
    rotations: dict[str, tuple[Any, Any]]
    """Of each layer kind: cosines and sines [1, 1, n_tokens, head_dim / 2] of the tokens' positions."""

    def add(self, layer: int, x: Any) -> Any:
        """The residual after layer `layer`."""
        mb = toolchain.builder()
        attended = self._attention(layer, self.norm(x, f"{layer}.attn_norm"))
        x = mb.add(x=x, y=self.norm(attended, f"{layer}.post_attn_norm", self.scale), name=f"l{layer}_mid")
        h = _channels_first(self.norm(x, f"{layer}.ffn_norm"))
        gate = mb.gelu(x=self._conv(h, f"{layer}.gate"), mode="TANH_APPROXIMATION")
        fed = self._conv(mb.mul(x=gate, y=self._conv(h, f"{layer}.up")), f"{layer}.down")
        fed = self.norm(_tokens_first(fed), f"{layer}.post_ffn_norm", self.scale)
        return mb.add(x=x, y=fed, name=f"l{layer}_out")

    def norm(self, x: Any, name: str, scale: float = 1.0) -> Any:
        """RMSNorm over the last axis, times gain * scale: the product is made in float64 and rounded once."""
        mb = toolchain.builder()
        doubled = mb.concat(values=[x, mb.mul(x=x, y=F16(-1))], axis=-1)
        normed = mb.layer_norm(x=doubled, axes=[-1], epsilon=F16(self.model.eps))
        half = mb.slice_by_index(x=normed, begin=[0] * len(x.shape), end=list(x.shape))
        return mb.mul(x=half, y=self.store.vector(name, self.model.gain(name) * scale))

    def _conv(self, x: Any, name: str) -> Any:
        return toolchain.builder().conv(x=x, weight=self.store.matrix(name, trailing=2))

    def _attention(self, layer: int, h: Any) -> Any:
        model, mb, n = self.model, toolchain.builder(), self.n_tokens
        channels = _channels_first(h)
        q = self._heads(channels, f"{layer}.q", model.n_head)
        k = self._heads(channels, f"{layer}.k", model.n_head_kv)
        v = self._heads(channels, f"{layer}.v", model.n_head_kv)
        q = self._rotated(layer, self.norm(q, f"{layer}.q_norm", model.attention_scale))
        k = self._rotated(layer, self.norm(k, f"{layer}.k_norm"))
        keys, values, mask = self.caches.written(layer, mb.concat(values=[k, v], axis=0))
        n_shared = model.n_head // model.n_head_kv
        q = mb.reshape(x=q, shape=[1, model.n_head_kv, n_shared * n, model.head_dim])
        scores = mb.matmul(x=q, y=keys, transpose_y=True)
        scores = mb.reshape(x=scores, shape=[model.n_head_kv, n_shared, n, keys.shape[2]])
        weights = mb.softmax(x=mb.add(x=scores, y=mask), axis=-1)
        weights = mb.reshape(x=weights, shape=[1, model.n_head_kv, n_shared * n, keys.shape[2]])
        out = mb.reshape(x=mb.matmul(x=weights, y=values), shape=[1, model.n_head, n, model.head_dim])
        out = mb.reshape(
            x=mb.transpose(x=out, perm=[0, 2, 1, 3]), shape=[1, n, model.n_head * model.head_dim]
        )
        return _tokens_first(self._conv(_channels_first(out), f"{layer}.o"))

    def _heads(self, channels: Any, name: str, n_head: int) -> Any:
        """[1, n_head, n_tokens, head_dim]."""
        mb = toolchain.builder()
        shape = [1, n_head, self.model.head_dim, self.n_tokens]
        return mb.transpose(x=mb.reshape(x=self._conv(channels, name), shape=shape), perm=[0, 1, 3, 2])

    def _rotated(self, layer: int, heads: Any) -> Any:
        """Pairs (i, i + head_dim / 2) turned by their positions' angles."""
        mb, half = toolchain.builder(), self.model.head_dim // 2
        cos, sin = self.rotations[self.model.kinds[layer]]
        n_head, n = heads.shape[1], self.n_tokens
        a = mb.slice_by_index(x=heads, begin=[0, 0, 0, 0], end=[1, n_head, n, half])
        b = mb.slice_by_index(x=heads, begin=[0, 0, 0, half], end=[1, n_head, n, 2 * half])
        first = mb.sub(x=mb.mul(x=a, y=cos), y=mb.mul(x=b, y=sin))
        second = mb.add(x=mb.mul(x=b, y=cos), y=mb.mul(x=a, y=sin))
        return mb.concat(values=[first, second], axis=-1)


def _channels_first(x: Any) -> Any:
    """[1, n_tokens, channels] -> [1, channels, 1, n_tokens]."""
    mb = toolchain.builder()
    return mb.expand_dims(x=mb.transpose(x=x, perm=[0, 2, 1]), axes=[2])


def _tokens_first(x: Any) -> Any:
    """[1, channels, 1, n_tokens] -> [1, n_tokens, channels]."""
    mb = toolchain.builder()
    return mb.transpose(x=mb.squeeze(x=x, axes=[2]), perm=[0, 2, 1])
