"""The arithmetic of the supported models, written to be read: NumPy, one function a formula, no cleverness.

It is the specification that the engine's graphs are held against. In float64 it is the oracle of the laws; in float32
it shows what rounding alone does. Weights are dequantised on loading, so it is for small models. Shapes name their axes
as everywhere: x is [n_tokens, n_embd]. Used by tests and checks only.

    llama    x += attention(norm(x));  x += swiglu(norm(x))
    qwen35   the same; three layers of four have a gated delta net (recurrent) in the place of attention, and attention
             normalises q and k a head and gates its output
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from common.attention.reference import attend, group_queries, ungroup_rows
from common.errors import EngineError
from common.model.gguf import GgufFile
from common.model.spec import ModelSpec, RecurrentSpec, RopeSpec

if TYPE_CHECKING:
    from common.engine.span import WantedLogits


class ReferenceEngine:
    """A small model in memory, dequantised."""

    def __init__(self, path: str | Path, dtype: type = np.float64, kv_f16: bool = False) -> None:
        """dtype: float32 or float64, of all arithmetic but attention's, which is always float64.
        kv_f16: round keys and values to f16 as the engine's cache does; off, the oracle is free of it.
        """
        self.spec = ModelSpec.read(path)
        self.dtype, self.kv_f16 = np.dtype(dtype), kv_f16
        file = GgufFile(path)
        self.weights = {name: self._dequantised(file, name) for name in self.spec.tensors}
        file.close()

    def _dequantised(self, file: GgufFile, name: str) -> np.ndarray:
        info = file.tensor(name)
        rows = file.tensor_bytes(name).reshape(*info.shape[:0:-1], -1)  # u8, rows first
        return dequantize(rows, GGMLQuantizationType(info.type)).astype(self.dtype)

    def span(self, first: int, last: int) -> ReferenceSpan:
        """Layers [first, last) with a state of their own."""
        layers = self.spec.layers
        if not layers.start <= first < last <= layers.stop:
            raise EngineError(
                f"layers [{first}, {last}) are not in [{layers.start}, {layers.stop}) of this file"
            )
        return ReferenceSpan(self, first, last)


@dataclass
class LayerState:
    """What a layer remembers: keys and values of all positions, or a convolution tail and a state matrix."""

    k: np.ndarray  # [n_positions, n_head_kv, head_dim]
    v: np.ndarray
    conv: np.ndarray  # [d_conv - 1, n_channels], inputs of the last tokens
    matrix: np.ndarray  # [n_head_v, d_state (values), d_state (keys)]


@dataclass
class ReferenceSpan:
    """The counterpart of LayerSpan: the same `run`, no limits on rows."""

    engine: ReferenceEngine
    first: int
    last: int
    n_valid: int = 0
    state: dict[int, LayerState] = field(default_factory=dict)

    def __post_init__(self) -> None:
        spec, dtype = self.engine.spec, self.engine.dtype
        r = spec.recurrent or RecurrentSpec(1, 0, 0, 0)
        for layer in range(self.first, self.last):
            no_rows = np.zeros((0, spec.n_head_kv, spec.head_dim), dtype)
            conv = np.zeros((r.d_conv - 1, r.n_channels), dtype)
            matrix = np.zeros((r.n_head_v, r.d_state, r.d_state), dtype)
            self.state[layer] = LayerState(no_rows, no_rows, conv, matrix)

    def run(self, rows: np.ndarray, position: int, logits: WantedLogits = "none") -> np.ndarray:
        """Token ids [n_tokens] (first == 0) or residual [n_tokens, n_embd] at n_valid -> residual, or logits."""
        if position != self.n_valid:
            raise EngineError(f"rows at {position} after {self.n_valid} positions")
        spec, weights = self.engine.spec, self.engine.weights
        positions = np.arange(position, position + len(rows))
        x = weights["token_embd.weight"][rows] if self.first == 0 else rows.astype(self.engine.dtype)
        for layer in range(self.first, self.last):
            x = self._layer(layer, x, positions)
        self.n_valid += len(rows)
        if logits == "none":
            return x
        x = x if logits == "all" else x[-1:]
        output = "output.weight" if "output.weight" in weights else "token_embd.weight"
        return rms_norm(x, weights["output_norm.weight"], spec.eps) @ weights[output].T

    def _layer(self, layer: int, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        spec, state = self.engine.spec, self.state[layer]
        prefix = spec.tensor_name(layer, "")
        w = {
            name.removeprefix(prefix).removesuffix(".weight"): weight
            for name, weight in self.engine.weights.items()
            if name.startswith(prefix)
        }
        normed = rms_norm(x, w["attn_norm"], spec.eps)
        if spec.kind(layer) == "recurrent":
            assert spec.recurrent is not None
            x = x + gated_delta_net(normed, w, spec.recurrent, spec.eps, state)
        else:
            x = x + self._attention(normed, w, state, positions)
        normed = rms_norm(x, w["ffn_norm" if spec.arch == "llama" else "post_attention_norm"], spec.eps)
        return x + (silu(normed @ w["ffn_gate"].T) * (normed @ w["ffn_up"].T)) @ w["ffn_down"].T

    def _attention(
        self, x: np.ndarray, w: dict[str, np.ndarray], state: LayerState, positions: np.ndarray
    ) -> np.ndarray:
        spec = self.engine.spec
        n_tokens, gated = len(x), spec.arch == "qwen35"
        q = (x @ w["attn_q"].T).reshape(n_tokens, spec.n_head, -1)
        k = (x @ w["attn_k"].T).reshape(n_tokens, spec.n_head_kv, spec.head_dim)
        v = (x @ w["attn_v"].T).reshape(n_tokens, spec.n_head_kv, spec.head_dim)
        gate: np.ndarray | float = 1.0
        if gated:
            q, gate_logit = np.split(q, 2, axis=-1)  # a head's query, then its gate
            gate = sigmoid(gate_logit)
            q, k = rms_norm(q, w["attn_q_norm"], spec.eps), rms_norm(k, w["attn_k_norm"], spec.eps)
        factors = self.engine.weights.get("rope_freqs.weight")
        q, k = (rotate(heads, positions, spec.rope, factors, halves=gated) for heads in (q, k))
        if self.engine.kv_f16:
            k, v = k.astype(np.float16), v.astype(np.float16)
        state.k, state.v = (np.concatenate(pair).astype(x.dtype) for pair in ((state.k, k), (state.v, v)))
        causal = np.arange(len(state.k)) <= positions[:, None]  # [n_tokens, n_keys]
        visible = np.tile(causal, (spec.n_head // spec.n_head_kv, 1))
        partial = attend(group_queries(q, spec.n_head_kv), state.k, state.v, spec.head_dim**-0.5, visible)
        o = ungroup_rows(partial.normalised()[0], n_tokens).astype(x.dtype)
        return (o * gate).reshape(n_tokens, -1) @ w["attn_output"].T


def gated_delta_net(
    x: np.ndarray, w: dict[str, np.ndarray], r: RecurrentSpec, eps: float, state: LayerState
) -> np.ndarray:
    """x [n_tokens, n_embd] -> [n_tokens, n_embd]; advances the state.

    A value head's state S maps keys to values. Each token lets it decay, corrects what it recalls for the token's key
    towards the token's value, and reads it with the query:

        S ← e^g S;   S ← S + β (v - S k) kᵀ;   o = S q / √d_state
    """
    n_tokens, n_key = len(x), r.n_head_k * r.d_state
    history = np.concatenate([state.conv, x @ w["attn_qkv"].T])  # [d_conv - 1 + n_tokens, n_channels]
    taps = (history[j : j + n_tokens] * w["ssm_conv1d"][:, j] for j in range(r.d_conv))
    mixed = silu(sum(taps))
    state.conv = history[n_tokens:]
    q, k, v = (
        heads.reshape(n_tokens, -1, r.d_state) for heads in np.split(mixed, (n_key, 2 * n_key), axis=-1)
    )
    # value head h reads with key head h mod n_head_k
    q, k = (np.tile(unit(heads, eps), (1, r.n_head_v // r.n_head_k, 1)) for heads in (q, k))
    beta = sigmoid(x @ w["ssm_beta"].T)  # [n_tokens, n_head_v]
    decay = np.exp(w["ssm_a"] * softplus(x @ w["ssm_alpha"].T + w["ssm_dt.bias"]))
    o = np.empty_like(v)
    for t in range(n_tokens):
        s = state.matrix * decay[t][:, None, None]
        correction = beta[t][:, None] * (v[t] - np.einsum("hvk,hk->hv", s, k[t]))
        state.matrix = s + np.einsum("hv,hk->hvk", correction, k[t])
        o[t] = np.einsum("hvk,hk->hv", state.matrix, q[t]) * r.d_state**-0.5
    gate = silu(x @ w["attn_gate"].T).reshape(o.shape)
    return (rms_norm(o, w["ssm_norm"], eps) * gate).reshape(n_tokens, -1) @ w["ssm_out"].T


def rotate(
    heads: np.ndarray, positions: np.ndarray, rope: RopeSpec, factors: np.ndarray | None, halves: bool
) -> np.ndarray:
    """Rotary embedding of the first n_rot elements of each head. heads [n_tokens, n_head, head_dim].

    Pair i turns by position · freq_scale · freq_base^(-2i / n_rot), divided by factors[i] when there are some. Pairs
    are neighbours (2i, 2i + 1), or with `halves` (i, i + n_rot / 2). With sections, pairs take turns among the position
    axes time, height and width; text has one position for all three, and pairs beyond the sections stay unturned.
    """
    n_pairs = rope.n_rot // 2
    frequencies = rope.freq_scale * rope.freq_base ** (-np.arange(n_pairs) / n_pairs)
    if factors is not None:
        frequencies = frequencies / factors
    if rope.sections:
        pair = np.arange(n_pairs) % sum(rope.sections)
        frequencies = frequencies * (pair < 3 * np.take(rope.sections, pair % 3))
    angle = positions[:, None, None] * frequencies  # [n_tokens, 1, n_pairs]
    cos, sin = np.cos(angle).astype(heads.dtype), np.sin(angle).astype(heads.dtype)
    turned = heads.copy()
    first = slice(0, n_pairs) if halves else slice(0, rope.n_rot, 2)
    second = slice(n_pairs, rope.n_rot) if halves else slice(1, rope.n_rot, 2)
    turned[..., first] = heads[..., first] * cos - heads[..., second] * sin
    turned[..., second] = heads[..., first] * sin + heads[..., second] * cos
    return turned


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x over the root of the mean square of its last axis, times weight."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def unit(x: np.ndarray, eps: float) -> np.ndarray:
    """x over its length along the last axis."""
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + eps)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + e^-x), without overflow on either side."""
    return 0.5 * (1 + np.tanh(0.5 * x))


def silu(x: np.ndarray) -> np.ndarray:
    """x · sigmoid(x)."""
    return x * sigmoid(x)


def softplus(x: np.ndarray) -> np.ndarray:
    """log(1 + e^x), without overflow."""
    return np.logaddexp(0, x)
