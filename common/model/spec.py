"""ModelSpec: what a model is made of, read from a GGUF header and checked before anything is allocated.

Layers are numbered as in the whole model, also in a tail file, whose block 0 is layer `layer_start`. How a file is read
and what is refused is in spec_reader.py. Knows nothing of graphs; used by common/engine, the split planner and the
handshake.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from common.errors import ModelError
from common.ggml.header import TensorInfo, read_header

from .fingerprint import fingerprint_text

LayerKind = Literal["attention", "sliding", "recurrent"]
"""What a layer remembers: K/V rows read from the first on, K/V rows of which the last `window` are read, or a state."""
GEMMA3_27B_LAYERS = 62


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding: dimensions rotated, base, linear scale (1 / factor), mRoPE sections (empty when plain)."""

    n_rot: int
    freq_base: float
    freq_scale: float
    sections: tuple[int, ...] = ()


@dataclass(frozen=True)
class SlidingSpec:
    """Sliding layers: a token sees itself and the `window` - 1 before it, and is rotated in another way."""

    window: int
    rope: RopeSpec


@dataclass(frozen=True)
class RecurrentSpec:
    """Sizes of a gated-delta-net layer."""

    d_conv: int
    d_state: int
    n_head_k: int
    n_head_v: int

    @property
    def d_inner(self) -> int:
        """Width of its output before projection."""
        return self.d_state * self.n_head_v

    @property
    def n_channels(self) -> int:
        """Channels of its convolution: q, k and v side by side."""
        return self.d_inner + 2 * self.n_head_k * self.d_state


@dataclass(frozen=True)
class ModelSpec:
    """Everything about a model that is not weights. Read with `ModelSpec.read(path)`."""

    path: Path
    arch: str
    name: str
    n_layer_full: int
    layer_start: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_vocab: int
    n_ctx_train: int
    eps: float
    rope: RopeSpec
    recurrent: RecurrentSpec | None
    sliding: SlidingSpec | None
    kinds: tuple[LayerKind, ...]
    cycle: int
    has_embedding: bool
    has_output: bool
    file_bytes: int
    tensors: dict[str, TensorInfo] = field(repr=False, compare=False)

    @property
    def layers(self) -> range:
        """Layers whose weights the file holds."""
        return range(self.layer_start, self.layer_start + len(self.kinds))

    @property
    def n_embd_kv(self) -> int:
        """Elements of one row of keys (and of values): heads side by side."""
        return self.n_head_kv * self.head_dim

    def kind(self, layer: int) -> LayerKind:
        """Kind of a layer that is present. Raises ModelError."""
        if layer not in self.layers:
            raise ModelError(f"{self.path}: layer {layer} is not in this file, which holds {self.layers}")
        return self.kinds[layer - self.layer_start]

    def rope_of(self, layer: int) -> RopeSpec:
        """How a layer that is present rotates queries and keys. Raises ModelError."""
        return self.sliding.rope if self.sliding and self.kind(layer) == "sliding" else self.rope

    @property
    def embedding_scale(self) -> float:
        """Factor between a row of the embedding and the residual."""
        return math.sqrt(self.n_embd) if self.arch == "gemma3" else 1.0

    @property
    def attention_scale(self) -> float:
        """Factor of attention's scores. The gemma3 of 62 layers divides by another size than that of its heads."""
        odd = self.arch == "gemma3" and self.n_layer_full == GEMMA3_27B_LAYERS
        return 1.0 / math.sqrt(self.n_embd // self.n_head if odd else self.head_dim)

    def tensor_name(self, layer: int, part: str) -> str:
        """Name in this file of a layer's tensor (`attn_q.weight`)."""
        return f"blk.{layer - self.layer_start}.{part}"

    def head(self, last: int) -> ModelSpec:
        """The spec of layers [0, last) alone, without the output head: what a host needs that has no tail.

        Raises ModelError when the file does not begin the model, or has not more layers than that.
        """
        if self.layer_start or not 1 <= last < self.layers.stop:
            raise ModelError(
                f"{self.path}: it holds {self.layers}, which has no head [0, {last}) to load alone"
            )
        others = {f"blk.{layer}." for layer in range(last, self.layers.stop)}
        kept = {
            name: info
            for name, info in self.tensors.items()
            if not name.startswith("output") and name[: name.find(".", 4) + 1] not in others
        }
        return replace(self, kinds=self.kinds[:last], has_output=False, tensors=kept)

    def fingerprint_text(self, first_layer: int, kv_type: str = "f16", *, output: bool = False) -> str:
        """Text that names layers [first_layer, n_layer_full) exactly; see fingerprint.py. Raises ModelError.

        output: and the output head with them.
        """
        return fingerprint_text(self, first_layer, kv_type, output=output)

    @classmethod
    def read(cls, path: str | Path) -> ModelSpec:
        """Reads and checks a file's header. Raises ModelError saying what was found and what is supported."""
        from .spec_reader import SpecReader  # it makes what this file defines

        return SpecReader(read_header(path)).spec()
