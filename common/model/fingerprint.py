"""The text by which two sides tell whether they hold the same layers of the same model.

One line per tensor of the layers concerned: global name, type, shape, and a hash of sampled content, so that a
fine-tune of the same shape is told apart without reading the whole file. Equal whether made from a whole file or from a
tail of it. Used by the handshake, through ModelSpec.fingerprint_text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import xxhash

from common.errors import ModelError
from common.ggml.tensor import type_name
from common.limits import FINGERPRINT_TEXT_BYTES_MAX

from .gguf import GgufFile
from .layout import layer_parts

if TYPE_CHECKING:
    from .spec import ModelSpec

SAMPLES = 8
SAMPLE_BYTES = 4096
WHOLE_BYTES_MAX = SAMPLES * SAMPLE_BYTES
"""Tensors up to this size are hashed whole, longer ones at SAMPLES places from their beginning to their end."""


def fingerprint_text(spec: ModelSpec, first_layer: int, kv_type: str, *, output: bool = False) -> str:
    """Text of layers [first_layer, n_layer_full), and of the output head if it is wanted.

    Raises ModelError when the file does not hold all of them.
    """
    if first_layer not in spec.layers:
        raise ModelError(f"{spec.path}: layer {first_layer} is not in this file, which holds {spec.layers}")
    if output and not spec.has_output:
        raise ModelError(
            f"{spec.path}: it has no output head (it was split with --no-head), and the host has none either: with "
            f"split decode the worker's file must hold it"
        )
    lines = [
        f"{spec.arch} layers {first_layer}..{spec.n_layer_full} n_embd {spec.n_embd} eps {spec.eps:.9g}",
        f"heads {spec.n_head}/{spec.n_head_kv} of {spec.head_dim} kv {kv_type}",
        f"rope {spec.rope.n_rot} base {spec.rope.freq_base:.9g} scale {spec.rope.freq_scale:.9g} "
        f"sections {list(spec.rope.sections)} trained {spec.n_ctx_train}",
    ]
    flags = "".join("s" if spec.kind(n) == "sliding" else "-" for n in range(first_layer, spec.n_layer_full))
    if spec.sliding is not None and "s" in flags:
        lines.append(f"sliding {flags} window {spec.sliding.window} base {spec.sliding.rope.freq_base:.9g}")
    file = GgufFile(spec.path)
    try:
        if "rope_freqs.weight" in spec.tensors:
            lines.append(_line(file, "rope_freqs.weight", "rope_freqs.weight"))
        for layer in range(first_layer, spec.n_layer_full):
            for part in layer_parts(spec, layer):
                lines.append(_line(file, spec.tensor_name(layer, part), f"{layer}.{part}"))
        if output:
            matrix = "output.weight" if "output.weight" in spec.tensors else "token_embd.weight"
            lines.append(_line(file, "output_norm.weight", "output_norm.weight"))
            lines.append(_line(file, matrix, "output"))
    finally:
        file.close()
    text = "\n".join(lines)
    if len(text) > FINGERPRINT_TEXT_BYTES_MAX:
        raise ModelError(
            f"{spec.path}: fingerprint of {len(text)} bytes, at most {FINGERPRINT_TEXT_BYTES_MAX}"
        )
    return text


def _line(file: GgufFile, name: str, global_name: str) -> str:
    info = file.tensor(name)
    shape = "x".join(map(str, info.shape))
    return f"{global_name} {type_name(info.type)} {shape} {_sampled_hash(file.tensor_bytes(name)):016x}"


def _sampled_hash(data: np.ndarray) -> int:
    """xxh3-64 of the whole content, or of evenly spread samples of it."""
    if data.nbytes <= WHOLE_BYTES_MAX:
        return xxhash.xxh3_64_intdigest(data)
    digest = xxhash.xxh3_64()
    last = data.nbytes - SAMPLE_BYTES
    for i in range(SAMPLES):
        start = last * i // (SAMPLES - 1)
        digest.update(data[start : start + SAMPLE_BYTES])
    return digest.intdigest()
