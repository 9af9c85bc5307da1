"""A gemma3 GGUF file as a GemmaModel: checked by common.model, its rows dequantised by the gguf package.

GGUF stores a norm's gain, not gain - 1. The rotary factor and the layer kinds come from the file's own keys, through
the same reader the engine uses. Called by open_model.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from common.errors import ModelError
from common.model.gguf import GgufFile
from common.model.spec import ModelSpec, RopeSpec
from device.coreml.convert.description import GemmaModel, Kind
from device.coreml.convert.rope import Rope

OUTER_NAMES = {"embed": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight"}
LAYER_NAMES = {
    "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output", "gate": "ffn_gate", "up": "ffn_up",
    "down": "ffn_down", "attn_norm": "attn_norm", "q_norm": "attn_q_norm", "k_norm": "attn_k_norm",
    "post_attn_norm": "post_attention_norm", "ffn_norm": "ffn_norm", "post_ffn_norm": "post_ffw_norm",
}  # fmt: skip


class GgufSource:
    """Weights of a GGUF file under the converter's names."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec, self.file = spec, GgufFile(spec.path)

    def _name(self, name: str) -> str:
        layer, _, part = name.rpartition(".")
        return (
            self.spec.tensor_name(int(layer), f"{LAYER_NAMES[part]}.weight") if layer else OUTER_NAMES[part]
        )

    def rows(self, name: str, first: int, last: int) -> np.ndarray:
        info = self.file.tensor(self._name(name))
        raw = self.file.tensor_bytes(info.name).reshape(*info.shape[:0:-1], -1)[first:last]
        return dequantize(raw, GGMLQuantizationType(info.type)).astype(np.float32, copy=False)

    def gain(self, name: str) -> np.ndarray:
        info = self.file.tensor(self._name(name))
        return dequantize(self.file.tensor_bytes(info.name), GGMLQuantizationType(info.type)).astype(
            np.float64
        )

    def close(self) -> None:
        self.file.close()


def open_gguf(path: Path) -> GemmaModel:
    """Read and check a file's header. Raises ModelError: another architecture, a tail, a vocabulary without output."""
    spec = ModelSpec.read(path)
    if spec.arch != "gemma3" or spec.sliding is None:
        raise ModelError(f"{path}: architecture {spec.arch}; the converter makes gemma3 models")
    if spec.layer_start or not spec.has_embedding:
        raise ModelError(f"{path}: a part of a model (layers {spec.layers}); a whole one is needed")
    ropes: dict[Kind, RopeSpec] = {"sliding": spec.sliding.rope, "global": spec.rope}
    for kind, rope in ropes.items():
        if rope.n_rot != spec.head_dim or rope.sections:
            raise ModelError(f"{path}: {kind} layers turn {rope.n_rot} of {spec.head_dim} elements; all must")
    return GemmaModel(
        name=path.stem, source=GgufSource(spec),
        kinds=tuple("global" if kind == "attention" else "sliding" for kind in spec.kinds),
        n_embd=spec.n_embd, n_ff=spec.n_ff, n_head=spec.n_head, n_head_kv=spec.n_head_kv,
        head_dim=spec.head_dim, n_vocab=spec.n_vocab, n_ctx_train=spec.n_ctx_train,
        window=spec.sliding.window, eps=spec.eps, attention_scale=spec.attention_scale,
        ropes={kind: Rope(rope.freq_base, 1.0 / rope.freq_scale) for kind, rope in ropes.items()},
        tied="output.weight" not in spec.tensors, files=(Path(path),),
    )  # fmt: skip
