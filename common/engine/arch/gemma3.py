"""One layer of the gemma3 architecture: attention, global or sliding, then a gated feed-forward, each between norms.

Called by common/engine/graphs.py through arch.builder. Sliding layers differ only in their mask and in how they rotate,
which step.py knows from the layer's kind. Queries are scaled before attention and not inside it. The order of
operations is that of stock llama.cpp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.ggml.builder import ROPE_NEOX

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
    q = step.rope(layer, g.norm(q, weight("attn_q_norm.weight"), spec.eps), ROPE_NEOX)
    k = step.rope(layer, g.norm(k, weight("attn_k_norm.weight"), spec.eps), ROPE_NEOX)
    q = g.scale(q, spec.attention_scale)
    step.keep_rows(layer, q, k, v)
    if step.is_over(layer):
        return None
    a = g.matmul(weight("attn_output.weight"), step.attend(layer, q, 1.0))
    if step.selects_after_attention(layer):
        a, x = step.select(a), step.select(x)

    h = g.add(g.norm(a, weight("post_attention_norm.weight"), spec.eps), x)
    f = g.norm(h, weight("ffn_norm.weight"), spec.eps)
    up = g.matmul(weight("ffn_up.weight"), f)
    gate = g.matmul(weight("ffn_gate.weight"), f)
    f = g.matmul(weight("ffn_down.weight"), g.geglu(gate, up))
    return g.add(g.norm(f, weight("post_ffw_norm.weight"), spec.eps), h)
