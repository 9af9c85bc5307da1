"""Synthetic models: GGUF files of seeded random weights that stock llama.cpp loads like any other.

They stand in for models too large to ship: hybrids of any depth and width, with a real tokenizer, so that text,
gateway and tests work. What the weights are is in geometry.py; here they are drawn, quantised by ggml and written
block by block. The same geometry, type, seed and tokenizer give the same bytes (with the same NumPy and ggml).
Called by `outrigger synth`, the benches and tests.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import ModelError
from common.ggml.header import read_header
from common.ggml.quantize import block_length, quantize_rows, row_bytes, storage_type
from common.model.embedded import embedded_model, models_folder
from common.model.geometry import Geometry, Weight, preset
from common.model.gguf_stream import GgufStream, Progress

BLOCK_ELEMENTS = 1 << 21
"""Weights drawn, quantised and written at a time: 8 MiB of f32."""
GENERATION = 2
"""Raised whenever the same seed would give other bytes, so that kept presets are made anew."""


def ensure_preset(
    name: str, *, storage: str | None = None, seed: int = 0, progress: Progress | None = None
) -> Path:
    """Path of a preset with the embedded model's tokenizer in the models folder; made when it is not there yet."""
    geometry, preset_storage = preset(name)
    storage = storage or preset_storage
    out = models_folder() / f"synthetic-{name}-{storage.lower()}-seed{seed}-g{GENERATION}.gguf"
    if not out.exists():
        write_synthetic(
            geometry, out, storage=storage, seed=seed, tokenizer=embedded_model(), progress=progress
        )
    return out


def write_synthetic(
    geometry: Geometry,
    out: Path,
    *,
    storage: str = "q8_0",
    seed: int = 0,
    tokenizer: Path | None = None,
    progress: Progress | None = None,
) -> None:
    """Writes a model of random weights.

    tokenizer: a GGUF whose tokenizer and chat template are taken over; it must have geometry.n_vocab tokens.
               None writes a model without tokenizer (token ids only; the vocabulary may then have any size).
    storage:   type of the matrices, one of common.ggml.quantize.STORAGE_TYPES. Vectors stay f32.
    Raises ModelError when something does not fit together, before anything is written.
    """
    weights = list(geometry.weights())
    _check_rows(weights, storage)
    with GgufStream(out, geometry.arch, progress) as file:
        _add_architecture(file, geometry, storage, seed)
        _add_tokenizer(file, geometry, tokenizer)
        for weight in weights:
            kind = _stored_as(weight, storage)
            n_rows = math.prod(weight.shape[:-1])
            file.declare(
                weight.name, weight.shape, storage_type(kind), n_rows * row_bytes(kind, weight.shape[-1])
            )
        file.begin()
        for weight in weights:
            file.write(_blocks(weight, _stored_as(weight, storage), seed))


def _stored_as(weight: Weight, storage: str) -> str:
    return storage if weight.quantised else "f32"


def _check_rows(weights: list[Weight], storage: str) -> None:
    block = block_length(storage)
    for weight in weights:
        if weight.quantised and weight.shape[-1] % block:
            raise ModelError(
                f"{weight.name} has rows of {weight.shape[-1]} and {storage} needs a multiple of {block}; change the "
                f"geometry or choose another type (f32 and f16 take any)"
            )


def _blocks(weight: Weight, kind: str, seed: int) -> Iterator[memoryview]:
    """A tensor's stored bytes, a few rows at a time. Each tensor has its own stream of random numbers, so that
    changing one leaves the others as they were."""
    rng = np.random.Generator(np.random.SFC64([seed, zlib.crc32(weight.name.encode())]))
    n_per_row = weight.shape[-1]
    n_rows = math.prod(weight.shape[:-1])
    step = max(1, BLOCK_ELEMENTS // n_per_row)
    for first in range(0, n_rows, step):
        n = min(step, n_rows - first)
        values = weight.draw(rng, n * n_per_row).reshape(n, n_per_row)
        yield quantize_rows(values, kind).data


def _add_architecture(file: GgufStream, g: Geometry, storage: str, seed: int) -> None:
    n_layer_params, _ = g.n_params()
    file.add_key("general.type", "model")
    file.add_key("general.name", f"Outrigger synthetic {g.arch} {n_layer_params / 1e6:.0f}M seed {seed}")
    file.add_key("general.description", f"random weights, seed {seed}; not a trained model")
    file.add_key("general.quantization_version", 2)
    keys: dict[str, Any] = {
        "block_count": g.n_layer,
        "context_length": g.n_ctx_train,
        "embedding_length": g.n_embd,
        "feed_forward_length": g.n_ff,
        "attention.head_count": g.n_head,
        "attention.head_count_kv": g.n_head_kv,
        "attention.key_length": g.head_dim,
        "attention.value_length": g.head_dim,
        "attention.layer_norm_rms_epsilon": g.eps,
        "rope.freq_base": g.rope_freq_base,
        "rope.dimension_count": g.n_rot,
        "vocab_size": g.n_vocab,
    }
    if g.arch == "qwen35":
        keys |= {
            "full_attention_interval": g.interval,
            "rope.dimension_sections": list(g.rope_sections),
            "ssm.conv_kernel": g.conv_kernel,
            "ssm.state_size": g.state_dim,
            "ssm.group_count": g.n_state_group,
            "ssm.time_step_rank": g.n_state_head,
            "ssm.inner_size": g.value_dim,
        }
    if g.arch == "gemma3":
        keys |= {
            "rope.scaling.type": "linear",
            "rope.scaling.factor": g.rope_linear_factor,
        }
        if g.interval > 1:
            keys |= {
                "attention.sliding_window": g.window,
                "attention.sliding_window_pattern": g.interval,
            }
    for key, value in keys.items():
        file.add_key(f"{g.arch}.{key}", value)


def _add_tokenizer(file: GgufStream, geometry: Geometry, tokenizer: Path | None) -> None:
    if tokenizer is None:
        file.add_key("tokenizer.ggml.model", "none")
        return
    entries = _tokenizer_entries(tokenizer)
    n_tokens = len(entries.get("tokenizer.ggml.tokens", ()))
    if n_tokens != geometry.n_vocab:
        raise ModelError(
            f"the tokenizer of {tokenizer} has {n_tokens} tokens, the geometry asks for n_vocab {geometry.n_vocab}"
        )
    for key, value in entries.items():
        file.add_key(key, value)


def _tokenizer_entries(path: Path) -> dict[str, Any]:
    """All tokenizer.* metadata of a GGUF, chat template included. Raises ModelError when it has no tokenizer."""
    metadata = read_header(path, strings=True).metadata
    entries = {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
    if "tokenizer.ggml.tokens" not in entries:
        raise ModelError(f"{path} has no tokenizer to take over (no tokenizer.ggml.tokens)")
    return entries
