"""One layer of the llama architecture: attention with rotary positions, then a gated feed-forward.

Called by common/engine/graphs.py through arch.builder. The order of operations is that of stock llama.cpp, which keeps
the results equal to the last bit.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from common.ggml.builder import ROPE_NORMAL

if TYPE_CHECKING:
    from common.engine.step import Step
    from common.ggml.tensor import Tensor


def build_layer(step: Step, layer: int, x: Tensor) -> Tensor | None:
    """Residual f32 [n_embd, n_tokens] in and out. None when only the layer's K/V rows are wanted."""
    g, spec, n = step.builder, step.spec, step.n_tokens
    d, n_head, n_head_kv = spec.head_dim, spec.n_head, spec.n_head_kv
    weight = step.layer_weights(layer)

    a = g.norm(x, weight("attn_norm.weight"), spec.eps)
    q = g.reshape(g.matmul(weight("attn_q.weight"), a), d, n_head, n)
    k = g.reshape(g.matmul(weight("attn_k.weight"), a), d, n_head_kv, n)
    v = g.reshape(g.matmul(weight("attn_v.weight"), a), d, n_head_kv, n)
    q, k = step.rope(layer, q, ROPE_NORMAL), step.rope(layer, k, ROPE_NORMAL)
    step.keep_rows(layer, q, k, v)
    if step.is_over(layer):
        return None
    a = step.attend(layer, q, 1.0 / math.sqrt(d))
    a = g.matmul(weight("attn_output.weight"), a)
    if step.selects_after_attention(layer):
        a, x = step.select(a), step.select(x)

    h = g.add(a, x)
    f = g.norm(h, weight("ffn_norm.weight"), spec.eps)
    up = g.matmul(weight("ffn_up.weight"), f)
    gate = g.matmul(weight("ffn_gate.weight"), f)
    return g.add(g.matmul(weight("ffn_down.weight"), g.swiglu(gate, up)), h)
