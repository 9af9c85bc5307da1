"""One layer of the qwen35 architecture: gated attention, or the gated delta rule, then a gated feed-forward.

Called by common/engine/graphs.py through arch.builder. Shapes in comments are innermost first. S is the state size, Hk
and Hv the key and value heads of a recurrent layer. The order of operations is that of stock llama.cpp.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from common.ggml.builder import ROPE_INTERLEAVED_SECTIONS

if TYPE_CHECKING:
    from common.engine.step import Step
    from common.ggml.tensor import Tensor

F32_BYTES = 4


def build_layer(step: Step, layer: int, x: Tensor) -> Tensor | None:
    """Residual f32 [n_embd, n_tokens] in and out. None when only the layer's rows or states are wanted."""
    g, spec = step.builder, step.spec
    weight = step.layer_weights(layer)
    a = g.run(g.norm(x, weight("attn_norm.weight"), spec.eps))
    mix = _attention if spec.kind(layer) == "attention" else _delta_rule
    mixed = mix(step, layer, a)
    if mixed is None:
        return None
    h = g.add(mixed, x)
    f = g.norm(h, weight("post_attention_norm.weight"), spec.eps)
    up = g.matmul(weight("ffn_up.weight"), f)
    gate = g.matmul(weight("ffn_gate.weight"), f)
    return g.add(g.matmul(weight("ffn_down.weight"), g.swiglu(gate, up)), h)


def _attention(step: Step, layer: int, a: Tensor) -> Tensor | None:
    """Attention whose output each query head gates with a sigmoid of its own."""
    g, spec, n = step.builder, step.spec, step.n_tokens
    d, n_head, n_head_kv = spec.head_dim, spec.n_head, spec.n_head_kv
    weight = step.layer_weights(layer)
    q_gate = g.matmul(weight("attn_q.weight"), a)  # [2*d*n_head, n]: per head q, then its gate
    k = g.matmul(weight("attn_k.weight"), a)
    v = g.matmul(weight("attn_v.weight"), a)
    head, token = 2 * d * F32_BYTES, 2 * d * n_head * F32_BYTES
    q = g.norm(g.view(q_gate, (d, n_head, n), (head, token)), weight("attn_q_norm.weight"), spec.eps)
    k = g.norm(g.reshape(k, d, n_head_kv, n), weight("attn_k_norm.weight"), spec.eps)
    v = g.reshape(v, d, n_head_kv, n)
    q, k = step.rope(layer, q, ROPE_INTERLEAVED_SECTIONS), step.rope(layer, k, ROPE_INTERLEAVED_SECTIONS)
    step.keep_rows(layer, q, k, v)
    if step.is_over(layer):
        return None
    gate = g.cont_2d(g.view(q_gate, (d, n_head, n), (head, token), d * F32_BYTES), d * n_head, n)
    out = step.attend(layer, q, 1.0 / math.sqrt(d))
    return g.matmul(weight("attn_output.weight"), g.mul(out, g.sigmoid(gate)))


def _delta_rule(step: Step, layer: int, a: Tensor) -> Tensor | None:
    """Convolution, then the gated delta rule; reads the layer's two states and writes them back."""
    g, spec, n, r = step.builder, step.spec, step.n_tokens, step.spec.recurrent
    assert r is not None, "the spec checks that recurrent layers have sizes"
    size, n_head_k, n_head_v, n_channels = r.d_state, r.n_head_k, r.n_head_v, r.n_channels
    weight = step.layer_weights(layer)
    conv_state, state = step.recurrent_state(layer)

    qkv = g.matmul(weight("attn_qkv.weight"), a)  # [n_channels, n]
    z = g.matmul(weight("attn_gate.weight"), a)  # [d_inner, n]
    beta = g.sigmoid(g.reshape(g.matmul(weight("ssm_beta.weight"), a), 1, n_head_v, n, 1))
    alpha = g.matmul(weight("ssm_alpha.weight"), a)  # [Hv, n]
    decay = g.mul(g.softplus(g.add(alpha, weight("ssm_dt.bias"))), weight("ssm_a"))
    decay = g.reshape(decay, 1, n_head_v, n, 1)

    window = g.concat(conv_state, g.transpose(qkv), 0)  # [d_conv-1+n, n_channels]
    tail = g.view(window, (r.d_conv - 1, n_channels), (window.nb[1],), n * F32_BYTES)
    g.run(g.copy(tail, conv_state))
    mixed = g.silu(g.ssm_conv(window, weight("ssm_conv1d.weight")))  # [n_channels, n]: q, k, v side by side

    def heads(n_head: int, first_channel: int) -> Tensor:
        strides = (size * F32_BYTES, n_channels * F32_BYTES)
        return g.view(mixed, (size, n_head, n, 1), strides, first_channel * F32_BYTES)

    def unit(t: Tensor) -> Tensor:
        return g.scale(g.rms(t, spec.eps / size), 1.0 / math.sqrt(size))

    q, k = unit(heads(n_head_k, 0)), unit(heads(n_head_k, size * n_head_k))
    v = heads(n_head_v, 2 * size * n_head_k)
    packed = g.gated_delta_net(q, k, v, decay, beta, state)
    out = g.view(packed, (size, n_head_v, n, 1))
    state_offset = size * n_head_v * n * F32_BYTES
    g.run(g.copy(g.view(packed, (size, size, n_head_v, 1), (), state_offset), state))
    if step.is_over(layer):
        return None
    out = g.norm(out, weight("ssm_norm.weight"), spec.eps)
    out = g.mul(out, g.silu(g.reshape(z, size, n_head_v, n, 1)))
    out = g.matmul(weight("ssm_out.weight"), g.reshape(out, size * n_head_v, n))
    return g.reshape(out, spec.n_embd, n)
