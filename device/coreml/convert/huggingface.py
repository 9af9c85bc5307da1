"""A Gemma 3 checkpoint folder of Hugging Face (config.json, .safetensors) as a GemmaModel.

Text only: of a multimodal checkpoint the `language_model.` part is taken and the vision part named as left out. What
the converter would otherwise get silently wrong is refused by name. Called by open_model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import ModelError
from device.coreml.convert.description import MATRICES, GemmaModel, Kind
from device.coreml.convert.rope import Rope, scaled
from device.coreml.convert.safetensors_file import STORED, Tensor, open_tensors, weight_files

DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window": 4096,
    "max_position_embeddings": 131_072, "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip
"""What a Gemma 3 text configuration means where it does not say."""
LAYERS_A_CYCLE = 6
MODEL_TYPES = ("gemma3", "gemma3_text")
KIND_NAMES: dict[str, Kind] = {"sliding_attention": "sliding", "full_attention": "global"}
VISION = ("vision_tower.", "multi_modal_projector.")
LAYER_NAMES = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
    "attn_norm": "input_layernorm", "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm",
    "post_attn_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffn_norm": "post_feedforward_layernorm",
}  # fmt: skip
OUTER_NAMES = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}


class CheckpointSource:
    """Weights of a checkpoint under the converter's names."""

    def __init__(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        self.folder, self.tensors = folder, tensors

    def tensor(self, name: str) -> Tensor:
        layer, _, part = name.rpartition(".")
        stored = f"model.layers.{layer}.{LAYER_NAMES[part]}" if layer else OUTER_NAMES[part]
        found = self.tensors.get(f"{stored}.weight")
        if found is None:
            raise ModelError(f"{self.folder}: tensor {stored}.weight is missing")
        if found.kind not in STORED:
            raise ModelError(
                f"{self.folder}: tensor {stored}.weight is {found.kind}; {', '.join(STORED)} are read"
            )
        return found

    def rows(self, name: str, first: int, last: int) -> np.ndarray:
        return self.tensor(name).rows(first, last)

    def gain(self, name: str) -> np.ndarray:
        tensor = self.tensor(name)
        return 1.0 + tensor.rows(0, tensor.shape[0]).astype(np.float64)

    def close(self) -> None:
        self.tensors.clear()


def open_checkpoint(folder: Path) -> GemmaModel:
    """Read config.json and the headers of the weight files, and check one against the other. Raises ModelError."""
    whole = _read_config(folder)
    config = DEFAULTS | _text_config(whole, folder)
    names = {_text_name(name): tensor for name, tensor in open_tensors(folder).items()}
    tensors = {name: tensor for name, tensor in names.items() if not name.startswith(VISION)}
    source, notes = CheckpointSource(folder, tensors), []
    if len(tensors) < len(names):
        notes.append(f"the vision part is left out ({len(names) - len(tensors)} tensors)")
    n_rows, n_vocab = source.tensor("embed").shape[0], config["vocab_size"]
    image_id = whole.get("image_token_index", whole.get("image_token_id"))
    if "vision_config" in whole and isinstance(image_id, int) and 0 < n_vocab - image_id <= 64:
        n_vocab = image_id
        notes.append(f"token ids from {image_id} on stand for images: left out of embeddings and head")
    kinds = _kinds(config, folder)
    model = GemmaModel(
        name=folder.resolve().name, source=source, kinds=kinds, n_embd=config["hidden_size"],
        n_ff=config["intermediate_size"], n_head=config["num_attention_heads"],
        n_head_kv=config["num_key_value_heads"], head_dim=config["head_dim"], n_vocab=n_vocab,
        n_ctx_train=config["max_position_embeddings"], window=config["sliding_window"],
        eps=config["rms_norm_eps"], attention_scale=config["query_pre_attn_scalar"] ** -0.5,
        ropes=_ropes(config, folder), tied="lm_head.weight" not in tensors, notes=tuple(notes),
        files=(folder / "config.json", *weight_files(folder)),
    )  # fmt: skip
    _check_shapes(model, source, n_rows)
    return model


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path}: no JSON: {error}") from error
    if not isinstance(config, dict) or config.get("model_type") not in MODEL_TYPES:
        found = config.get("model_type") if isinstance(config, dict) else type(config).__name__
        raise ModelError(f"{path}: model_type is {found!r}; converted are: {', '.join(MODEL_TYPES)}")
    return config


def _text_config(whole: dict[str, Any], folder: Path) -> dict[str, Any]:
    config = whole.get("text_config", whole)
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(key):
            raise ModelError(f"{folder}: {key} = {config[key]} is not implemented")
    if config.get("attention_bias"):
        raise ModelError(f"{folder}: attention_bias is not implemented")
    activation = config.get("hidden_activation", config.get("hidden_act", DEFAULTS["hidden_activation"]))
    if activation != DEFAULTS["hidden_activation"]:
        raise ModelError(f"{folder}: hidden_activation {activation!r}; only gelu_pytorch_tanh is implemented")
    return {key: value for key, value in config.items() if value is not None}


def _text_name(name: str) -> str:
    """The name a text-only checkpoint would use. Both orders of the prefixes exist."""
    if name.startswith("model.language_model."):
        return "model." + name.removeprefix("model.language_model.")
    name = name.removeprefix("language_model.")
    return name.removeprefix("model.") if name.removeprefix("model.").startswith(VISION) else name


def _kinds(config: dict[str, Any], folder: Path) -> tuple[Kind, ...]:
    n_layer = config["num_hidden_layers"]
    named = config.get("layer_types")
    if named is None:
        cycle = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", LAYERS_A_CYCLE))
        return tuple("sliding" if (layer + 1) % cycle else "global" for layer in range(n_layer))
    unknown = sorted(set(named) - set(KIND_NAMES))
    if unknown or len(named) != n_layer:
        raise ModelError(
            f"{folder}: layer_types has {len(named)} entries for {n_layer} layers"
            + (f"; {unknown[0]!r} is not implemented" if unknown else "")
        )
    return tuple(KIND_NAMES[each] for each in named)


def _ropes(config: dict[str, Any], folder: Path) -> dict[Kind, Rope]:
    """Older configurations scale global layers only (rope_scaling); newer ones name both kinds (rope_parameters)."""
    newer = config.get("rope_parameters")
    if newer:
        bases = {"sliding_attention": config["rope_local_base_freq"], "full_attention": config["rope_theta"]}
        unknown = sorted(set(newer) - set(bases))
        if unknown:
            raise ModelError(f"{folder}: rope_parameters has {unknown[0]!r}; known are: {', '.join(bases)}")
        return {
            KIND_NAMES[name]: scaled(base, newer.get(name), f"{folder}: rope_parameters.{name}")
            for name, base in bases.items()
        }
    return {
        "sliding": scaled(config["rope_local_base_freq"], None, str(folder)),
        "global": scaled(config["rope_theta"], config.get("rope_scaling"), str(folder)),
    }


def _check_shapes(model: GemmaModel, source: CheckpointSource, n_rows: int) -> None:
    """Every matrix is there and has the shape that the configuration asks for."""
    if n_rows < model.n_vocab:
        raise ModelError(
            f"{source.folder}: the embedding has {n_rows} rows, the vocabulary {model.n_vocab} tokens"
        )
    outer = ["head"] if not model.tied else []
    inner = [f"{layer}.{name}" for layer in range(model.n_layer) for name in MATRICES]
    for name in outer + inner:
        found, wanted = source.tensor(name).shape, model.shape(name)
        if found[1:] != wanted[1:] or found[0] < wanted[0] or (name != "head" and found != wanted):
            raise ModelError(f"{source.folder}: {name} has shape {found}, the configuration says {wanted}")
