"""The formulas of the reference engine, one function each: NumPy, any float type, rows first.

Knows no model and no file. Used by common/engine/reference.py only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from common.model.spec import RecurrentSpec, RopeSpec


@dataclass
class LayerState:
    """What a layer remembers: keys and values of all positions, or a convolution tail and a state matrix."""

    k: np.ndarray  # [n_positions, n_head_kv, head_dim]
    v: np.ndarray
    conv: np.ndarray  # [d_conv - 1, n_channels], inputs of the last tokens
    matrix: np.ndarray  # [n_head_v, d_state (values), d_state (keys)]


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


def gelu(x: np.ndarray) -> np.ndarray:
    """x times about the share of normal numbers below x, by the tanh form."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def silu(x: np.ndarray) -> np.ndarray:
    """x · sigmoid(x)."""
    return x * sigmoid(x)


def softplus(x: np.ndarray) -> np.ndarray:
    """log(1 + e^x), without overflow."""
    return np.logaddexp(0, x)
