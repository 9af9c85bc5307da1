"""Shared by the converter's tests: a tiny Gemma 3 checkpoint in Hugging Face layout, and bundles made from it."""

import json
import struct

import numpy as np
import pytest

from device.coreml.convert.convert import convert
from device.coreml.convert.options import ConvertOptions
from device.coreml.convert.source import open_model

N_EMBD, N_FF, N_HEAD, N_KV, DIM, N_LAYER, N_VOCAB, WINDOW, BATCH = 64, 96, 4, 2, 32, 7, 320, 64, 64
CONFIG = {
    "model_type": "gemma3_text", "hidden_size": N_EMBD, "intermediate_size": N_FF, "num_attention_heads": N_HEAD,
    "num_key_value_heads": N_KV, "head_dim": DIM, "num_hidden_layers": N_LAYER, "vocab_size": N_VOCAB,
    "sliding_window": WINDOW, "query_pre_attn_scalar": 40, "rms_norm_eps": 1e-6, "max_position_embeddings": 4096,
    "rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}  # fmt: skip
LINEAR = {
    "self_attn.q_proj": (N_HEAD * DIM, N_EMBD), "self_attn.k_proj": (N_KV * DIM, N_EMBD),
    "self_attn.v_proj": (N_KV * DIM, N_EMBD), "self_attn.o_proj": (N_EMBD, N_HEAD * DIM),
    "mlp.gate_proj": (N_FF, N_EMBD), "mlp.up_proj": (N_FF, N_EMBD), "mlp.down_proj": (N_EMBD, N_FF),
}  # fmt: skip
NORMS = {
    "input_layernorm": N_EMBD, "post_attention_layernorm": N_EMBD, "pre_feedforward_layernorm": N_EMBD,
    "post_feedforward_layernorm": N_EMBD, "self_attn.q_norm": DIM, "self_attn.k_norm": DIM,
}  # fmt: skip


def bf16(values):
    """(bytes, f32 values that they stand for): the upper halves of the floats."""
    upper = (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return upper.tobytes(), (upper.astype(np.uint32) << 16).view(np.float32)


def tiny_tensors(seed=0):
    """name -> f32 array that bf16 holds exactly."""
    rng = np.random.default_rng(seed)
    shapes = {"model.embed_tokens.weight": (N_VOCAB, N_EMBD), "model.norm.weight": (N_EMBD,)}
    for layer in range(N_LAYER):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in LINEAR.items()}
        shapes |= {f"model.layers.{layer}.{name}.weight": (n,) for name, n in NORMS.items()}
    tensors = {}
    for name, shape in shapes.items():
        std = 0.1 if len(shape) == 1 else shape[1] ** -0.5
        tensors[name] = bf16(rng.standard_normal(shape) * std)[1]
    return tensors


def write_checkpoint(folder, tensors=None, config=None, prefix=""):
    """A checkpoint in bf16: a length, a JSON table, the tensors' bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    table, data = {"__metadata__": {"format": "pt"}}, b""
    for name, value in (tiny_tensors() if tensors is None else tensors).items():
        raw = bf16(value)[0]
        place = [len(data), len(data) + len(raw)]
        table[prefix + name] = {"dtype": "BF16", "shape": list(value.shape), "data_offsets": place}
        data += raw
    header = json.dumps(table).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)
    (folder / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    return folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny-gemma")


@pytest.fixture(scope="session")
def tiny(checkpoint):
    return open_model(checkpoint)


@pytest.fixture(scope="session")
def make_bundle(tiny, tmp_path_factory):
    """make_bundle(context, chunks, luts..., scale) -> folder; the same arguments give the same folder."""
    made = {}

    def make(context, chunks=2, luts=(None, None, None), scale=1.0):
        key = (context, chunks, luts, scale)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("bundle")
            convert(tiny, made[key], ConvertOptions(context, BATCH, chunks, *luts, scale))
        return made[key]

    return make


@pytest.fixture(scope="session")
def text():
    """Token ids, more than two windows."""
    return np.random.default_rng(3).integers(0, N_VOCAB, 180).astype(np.int32)
