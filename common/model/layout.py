"""Which tensors a model file must hold, with their shapes: one table for each architecture and layer kind.

A shape is a tuple of names of sizes (innermost first), resolved by `sizes`. Weights of matrices may have any type in
WEIGHT_TYPES; everything else is f32. Adding an architecture means adding its rows here and a builder in
common/engine/arch. Used by spec_reader.py and fingerprint.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.errors import ModelError
from common.ggml.header import TensorInfo
from common.ggml.tensor import F32, type_name

if TYPE_CHECKING:
    from .spec import ModelSpec

WEIGHT_TYPES = frozenset(
    {0, 1, 2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 16, 17, 18, 19, 20, 21, 22, 23, 29, 30, 34, 35, 39}
)
"""f32, f16, bf16 and the quantised types whose rows stock llama.cpp multiplies on every backend."""

Shape = tuple[str, ...]
_FFN: dict[str, Shape] = {
    "ffn_gate.weight": ("n_embd", "n_ff"),
    "ffn_up.weight": ("n_embd", "n_ff"),
    "ffn_down.weight": ("n_ff", "n_embd"),
}
_HEAD_NORMS: dict[str, Shape] = {"attn_q_norm.weight": ("head_dim",), "attn_k_norm.weight": ("head_dim",)}
_ATTENTION: dict[str, Shape] = {
    "attn_norm.weight": ("n_embd",),
    "attn_k.weight": ("n_embd", "n_embd_kv"),
    "attn_v.weight": ("n_embd", "n_embd_kv"),
    "attn_output.weight": ("n_embd_q", "n_embd"),
}
_GEMMA3 = (
    _ATTENTION
    | _FFN
    | _HEAD_NORMS
    | {
        "attn_q.weight": ("n_embd", "n_embd_q"),
        "post_attention_norm.weight": ("n_embd",),
        "ffn_norm.weight": ("n_embd",),
        "post_ffw_norm.weight": ("n_embd",),
    }
)
ARCHITECTURES: dict[str, dict[str, dict[str, Shape]]] = {
    "llama": {
        "attention": _ATTENTION
        | _FFN
        | {"attn_q.weight": ("n_embd", "n_embd_q"), "ffn_norm.weight": ("n_embd",)},
    },
    "qwen35": {
        "attention": _ATTENTION
        | _FFN
        | _HEAD_NORMS
        | {
            "attn_q.weight": ("n_embd", "n_embd_q_gate"),
            "post_attention_norm.weight": ("n_embd",),
        },
        "recurrent": _FFN
        | {
            "attn_norm.weight": ("n_embd",),
            "post_attention_norm.weight": ("n_embd",),
            "attn_qkv.weight": ("n_embd", "n_channels"),
            "attn_gate.weight": ("n_embd", "d_inner"),
            "ssm_conv1d.weight": ("d_conv", "n_channels"),
            "ssm_dt.bias": ("n_head_v",),
            "ssm_a": ("n_head_v",),
            "ssm_beta.weight": ("n_embd", "n_head_v"),
            "ssm_alpha.weight": ("n_embd", "n_head_v"),
            "ssm_norm.weight": ("d_state",),
            "ssm_out.weight": ("d_inner", "n_embd"),
        },
    },
    "gemma3": {"attention": _GEMMA3, "sliding": _GEMMA3},
}
F32_ONLY = frozenset({"ssm_conv1d.weight", "ssm_dt.bias", "ssm_a"})


def sizes(spec: ModelSpec) -> dict[str, int]:
    """Values of the names used in the shapes above."""
    values = {
        "n_embd": spec.n_embd,
        "n_ff": spec.n_ff,
        "head_dim": spec.head_dim,
        "n_embd_q": spec.n_head * spec.head_dim,
        "n_embd_q_gate": 2 * spec.n_head * spec.head_dim,
        "n_embd_kv": spec.n_embd_kv,
        "n_vocab": spec.n_vocab,
    }
    if spec.recurrent:
        r = spec.recurrent
        values |= {"d_conv": r.d_conv, "d_state": r.d_state, "d_inner": r.d_inner}
        values |= {"n_channels": r.n_channels, "n_head_v": r.n_head_v}
    return values


def layer_parts(spec: ModelSpec, layer: int) -> list[str]:
    """Names of the tensors of a layer, in one fixed order, without the block prefix."""
    return sorted(ARCHITECTURES[spec.arch][spec.kind(layer)])


def check_layer(spec: ModelSpec, layer: int) -> set[str]:
    """Checks a layer's tensors; returns their names in the file. Raises ModelError."""
    table, values = ARCHITECTURES[spec.arch].get(spec.kind(layer)), sizes(spec)
    if table is None:
        raise ModelError(f"{spec.path}: layer {layer} is {spec.kind(layer)}, which {spec.arch} has not")
    names = set()
    for part, shape in table.items():
        name = spec.tensor_name(layer, part)
        _check(spec, name, tuple(values[s] for s in shape), f32=len(shape) == 1 or part in F32_ONLY)
        names.add(name)
    return names


def check_outer(spec: ModelSpec) -> set[str]:
    """Checks the tensors outside the layers; returns their names. Raises ModelError."""
    names = set()
    if spec.layer_start == 0 or "token_embd.weight" in spec.tensors:
        names.add("token_embd.weight")
        _check(spec, "token_embd.weight", (spec.n_embd, spec.n_vocab), f32=False)
    if spec.has_output:
        names.add("output_norm.weight")
        _check(spec, "output_norm.weight", (spec.n_embd,), f32=True)
        if "output.weight" in spec.tensors or not names & {"token_embd.weight"}:
            names.add("output.weight")
            _check(spec, "output.weight", (spec.n_embd, spec.n_vocab), f32=False)
    if "rope_freqs.weight" in spec.tensors and spec.arch == "llama":
        names.add("rope_freqs.weight")
        _check(spec, "rope_freqs.weight", (spec.rope.n_rot // 2,), f32=True)
    return names


def _check(spec: ModelSpec, name: str, shape: tuple[int, ...], *, f32: bool) -> TensorInfo:
    info = spec.tensors.get(name)
    if info is None:
        raise ModelError(f"{spec.path}: tensor {name} is missing; a {spec.arch} model needs it")
    if info.shape != shape:
        raise ModelError(f"{spec.path}: tensor {name} has shape {list(info.shape)}, expected {list(shape)}")
    allowed = {F32} if f32 else WEIGHT_TYPES
    if info.type not in allowed:
        wanted = ", ".join(type_name(t) for t in sorted(allowed))
        raise ModelError(f"{spec.path}: tensor {name} has type {type_name(info.type)}; supported: {wanted}")
    return info


def matrices(spec: ModelSpec) -> set[str]:
    """Names (`output` for the output matrix) of the tensors that are only ever multiplied with rows."""
    parts = {
        p for kinds in ARCHITECTURES[spec.arch].values() for p, shape in kinds.items() if len(shape) == 2
    }
    parts -= F32_ONLY
    return {"output"} | {n for n in spec.tensors if n.startswith("blk.") and n.split(".", 2)[2] in parts}
