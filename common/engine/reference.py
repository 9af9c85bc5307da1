"""The arithmetic of the supported models, written to be read: NumPy, one function a formula, no cleverness.

It is the specification that the engine's graphs are held against. In float64 it is the oracle of the laws; in float32
it shows what rounding alone does. Weights are dequantised on loading, so it is for small models. Shapes name their axes
as everywhere: x is [n_tokens, n_embd]. Used by tests and checks only.

    llama    x += attention(norm(x));  x += swiglu(norm(x))
    qwen35   the same; three layers of four have a gated delta net (recurrent) in the place of attention, and attention
             normalises q and k a head and gates its output
    gemma3   x += norm(attention(norm(x)));  x += norm(geglu(norm(x))); attention normalises q and k a head; five layers
             of six are sliding: a token sees only the last `window` positions
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from common.attention.grouping import group_queries, ungroup_rows
from common.attention.reference import attend
from common.errors import EngineError
from common.model.gguf import GgufFile
from common.model.spec import ModelSpec, RecurrentSpec

from .formulas import LayerState, gated_delta_net, gelu, rms_norm, rotate, sigmoid, silu

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
        if self.first == 0:
            x = weights["token_embd.weight"][rows] * self.engine.dtype.type(spec.embedding_scale)
        else:
            x = rows.astype(self.engine.dtype)
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
        eps, post_norms = spec.eps, spec.arch == "gemma3"
        normed = rms_norm(x, w["attn_norm"], eps)
        if spec.kind(layer) == "recurrent":
            assert spec.recurrent is not None
            mixed = gated_delta_net(normed, w, spec.recurrent, eps, state)
        else:
            mixed = self._attention(layer, normed, w, positions)
        x = x + (rms_norm(mixed, w["post_attention_norm"], eps) if post_norms else mixed)
        normed = rms_norm(x, w["post_attention_norm" if spec.arch == "qwen35" else "ffn_norm"], eps)
        activation = gelu if spec.arch == "gemma3" else silu
        fed = (activation(normed @ w["ffn_gate"].T) * (normed @ w["ffn_up"].T)) @ w["ffn_down"].T
        return x + (rms_norm(fed, w["post_ffw_norm"], eps) if post_norms else fed)

    def _attention(
        self, layer: int, x: np.ndarray, w: dict[str, np.ndarray], positions: np.ndarray
    ) -> np.ndarray:
        spec, state = self.engine.spec, self.state[layer]
        n_tokens = len(x)
        q = (x @ w["attn_q"].T).reshape(n_tokens, spec.n_head, -1)
        k = (x @ w["attn_k"].T).reshape(n_tokens, spec.n_head_kv, spec.head_dim)
        v = (x @ w["attn_v"].T).reshape(n_tokens, spec.n_head_kv, spec.head_dim)
        gate: np.ndarray | float = 1.0
        if spec.arch == "qwen35":
            q, gate_logit = np.split(q, 2, axis=-1)  # a head's query, then its gate
            gate = sigmoid(gate_logit)
        if "attn_q_norm" in w:
            q, k = rms_norm(q, w["attn_q_norm"], spec.eps), rms_norm(k, w["attn_k_norm"], spec.eps)
        rope, factors = spec.rope_of(layer), self.engine.weights.get("rope_freqs.weight")
        q, k = (rotate(heads, positions, rope, factors, halves=spec.arch != "llama") for heads in (q, k))
        if self.engine.kv_f16:
            k, v = k.astype(np.float16), v.astype(np.float16)
        state.k, state.v = (np.concatenate(pair).astype(x.dtype) for pair in ((state.k, k), (state.v, v)))
        distance = positions[:, None] - np.arange(len(state.k))  # [n_tokens, n_keys]
        sees = distance >= 0
        if spec.kind(layer) == "sliding":
            assert spec.sliding is not None
            sees &= distance < spec.sliding.window
        visible = np.tile(sees, (spec.n_head // spec.n_head_kv, 1))
        partial = attend(group_queries(q, spec.n_head_kv), state.k, state.v, spec.attention_scale, visible)
        o = ungroup_rows(partial.normalised()[0], n_tokens).astype(x.dtype)
        return (o * gate).reshape(n_tokens, -1) @ w["attn_output"].T
