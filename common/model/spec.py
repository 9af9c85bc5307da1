"""ModelSpec: what a model is made of, read from a GGUF header and checked before anything is allocated.

Layers are numbered as in the whole model, also in a tail file, whose block 0 is layer `layer_start`. Reading refuses
by name whatever the engine would otherwise run wrongly: unknown architectures, tensor types, missing or extra tensors,
shapes that contradict the metadata. What each architecture's layers must hold is declared in layout.py.
Knows nothing of graphs; used by common/engine, the split planner and the handshake.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from common.errors import ModelError
from common.ggml.header import GgufHeader, StringArray, TensorInfo, read_header
from common.limits import N_EMBD_MAX, N_LAYER_MAX, N_VOCAB_MAX

from .fingerprint import fingerprint_text
from .layout import ARCHITECTURES, check_layer, check_outer

LayerKind = Literal["attention", "recurrent"]
CYCLES = {"llama": 1, "qwen35": 4}
"""Layers after which the pattern of layer kinds repeats, unless the file says otherwise."""


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding: dimensions rotated, base, linear scale (1 / factor), mRoPE sections (empty when plain)."""

    n_rot: int
    freq_base: float
    freq_scale: float
    sections: tuple[int, ...] = ()


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

    def tensor_name(self, layer: int, part: str) -> str:
        """Name in this file of a layer's tensor (`attn_q.weight`)."""
        return f"blk.{layer - self.layer_start}.{part}"

    def fingerprint_text(self, first_layer: int, kv_type: str = "f16") -> str:
        """Text that names layers [first_layer, n_layer_full) exactly; see fingerprint.py. Raises ModelError."""
        return fingerprint_text(self, first_layer, kv_type)

    @classmethod
    def read(cls, path: str | Path) -> ModelSpec:
        """Reads and checks a file's header. Raises ModelError saying what was found and what is supported."""
        return _Reader(read_header(path)).spec()


class _Reader:
    """Turns metadata into a ModelSpec; every complaint names the file, the key and the value."""

    def __init__(self, header: GgufHeader) -> None:
        self.header, self.meta = header, header.metadata
        self.arch = self.meta.get("general.architecture")
        if self.arch not in ARCHITECTURES:
            self.refuse(f"architecture {self.arch!r}; supported: {', '.join(ARCHITECTURES)}")

    def refuse(self, what: str) -> None:
        raise ModelError(f"{self.header.path}: {what}")

    def number(
        self, key: str, low: float, high: float, default: float | None = None, *, prefix: bool = True
    ) -> Any:
        """A number of the metadata within [low, high]; its default when absent; ModelError otherwise."""
        full = f"{self.arch}.{key}" if prefix else key
        value = self.meta.get(full, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            self.refuse(f"{full} is {value!r}; it must be a number from {low} to {high}")
        return value

    def spec(self) -> ModelSpec:
        n_embd = self.number("embedding_length", 1, N_EMBD_MAX)
        n_head = self.number("attention.head_count", 1, 1024)
        n_blocks = self.number("block_count", 1, N_LAYER_MAX)
        layer_start = self.number("split.layer_start", 0, N_LAYER_MAX - 1, 0, prefix=False)
        head_dim = self.number("attention.key_length", 1, 4096, n_embd // n_head)
        spec = ModelSpec(
            path=self.header.path,
            arch=self.arch,
            name=str(self.meta.get("general.name") or self.header.path.stem),
            n_layer_full=self.number(
                "split.n_layer_full", 1, N_LAYER_MAX, layer_start + n_blocks, prefix=False
            ),
            layer_start=layer_start,
            n_embd=n_embd,
            n_ff=self.number("feed_forward_length", 1, 1 << 20),
            n_head=n_head,
            n_head_kv=self.number("attention.head_count_kv", 1, n_head, n_head),
            head_dim=head_dim,
            n_vocab=self.n_vocab(),
            n_ctx_train=self.number("context_length", 1, 1 << 30),
            eps=self.number("attention.layer_norm_rms_epsilon", 1e-20, 1.0),
            rope=self.rope(head_dim),
            recurrent=self.recurrent() if self.arch == "qwen35" else None,
            kinds=self.kinds(n_blocks),
            cycle=self.number("full_attention_interval", 1, N_LAYER_MAX, CYCLES[self.arch]),
            has_embedding="token_embd.weight" in self.header.tensors and layer_start == 0,
            has_output=not self.meta.get("split.no_head", 0),
            file_bytes=self.header.file_bytes,
            tensors=self.header.tensors,
        )
        self.check(spec)
        return spec

    def check(self, spec: ModelSpec) -> None:
        """Relations between the numbers, and the tensors against the numbers."""
        if spec.layers.stop != spec.n_layer_full:
            self.refuse(
                f"it holds layers {spec.layers.start} to {spec.layers.stop - 1}, and the model has "
                f"{spec.n_layer_full}: a file must hold a whole model or its last layers"
            )
        if spec.n_head % spec.n_head_kv:
            self.refuse(f"{spec.n_head} query heads do not divide among {spec.n_head_kv} key/value heads")
        value_dim = self.number("attention.value_length", 1, 4096, spec.head_dim)
        if value_dim != spec.head_dim:
            self.refuse(f"values of {value_dim} dimensions beside keys of {spec.head_dim} are not supported")
        for key in ("expert_count", "nextn_predict_layers"):
            if self.meta.get(f"{self.arch}.{key}"):
                self.refuse(f"{self.arch}.{key} = {self.meta[f'{self.arch}.{key}']}: not supported (0 is)")
        known = check_outer(spec)
        for layer in spec.layers:
            known |= check_layer(spec, layer)
        extra = sorted(set(self.header.tensors) - known)
        if extra:
            self.refuse(
                f"tensor {extra[0]} is not part of a supported {self.arch} model ({len(extra)} such tensors)"
            )

    def n_vocab(self) -> int:
        for name in ("token_embd.weight", "output.weight"):
            if name in self.header.tensors and len(self.header.tensors[name].shape) == 2:
                return self.header.tensors[name].shape[1]
        tokens = self.meta.get("tokenizer.ggml.tokens")
        if isinstance(tokens, StringArray) and 1 <= tokens.n <= N_VOCAB_MAX:
            return tokens.n
        return self.number("vocab_size", 1, N_VOCAB_MAX)

    def rope(self, head_dim: int) -> RopeSpec:
        kind = self.meta.get(f"{self.arch}.rope.scaling.type", "none")
        if kind not in ("none", "linear"):
            self.refuse(f"rope scaling {kind!r}; supported: none, linear")
        factor = self.number("rope.scaling.factor", 0.0, 1e6, 0.0) or self.number(
            "rope.scale_linear", 0.0, 1e6, 0.0
        )
        sections: tuple[int, ...] = ()
        if self.arch == "qwen35":
            sections = tuple(self.meta.get("qwen35.rope.dimension_sections") or ())
            if len(sections) not in (3, 4) or not all(
                isinstance(s, int) and 0 <= s <= 4096 for s in sections
            ):
                self.refuse(f"qwen35.rope.dimension_sections is {sections}; it must be 4 small numbers")
            sections = (*sections, 0)[:4]
        return RopeSpec(
            n_rot=self.number("rope.dimension_count", 2, head_dim, head_dim),
            freq_base=self.number("rope.freq_base", 1e-6, 1e12, 10000.0),
            freq_scale=1.0 / factor if kind == "linear" and factor else 1.0,
            sections=sections,
        )

    def recurrent(self) -> RecurrentSpec:
        spec = RecurrentSpec(
            d_conv=self.number("ssm.conv_kernel", 2, 64),
            d_state=self.number("ssm.state_size", 1, 4096),
            n_head_k=self.number("ssm.group_count", 1, 1024),
            n_head_v=self.number("ssm.time_step_rank", 1, 1024),
        )
        inner = self.number("ssm.inner_size", 1, 1 << 20)
        if inner != spec.d_inner or spec.n_head_v % spec.n_head_k:
            self.refuse(
                f"ssm sizes contradict each other: inner {inner}, state {spec.d_state}, heads {spec.n_head_k} keys "
                f"and {spec.n_head_v} values"
            )
        return spec

    def kinds(self, n_blocks: int) -> tuple[LayerKind, ...]:
        if self.arch != "qwen35":
            return ("attention",) * n_blocks
        flags = self.meta.get("qwen35.attention.recurrent_layers")
        if flags is None:
            interval = self.number("full_attention_interval", 1, N_LAYER_MAX, CYCLES["qwen35"])
            flags = [(block + 1) % interval != 0 for block in range(n_blocks)]
        if not isinstance(flags, list) or len(flags) < n_blocks:
            self.refuse(f"qwen35.attention.recurrent_layers does not name all {n_blocks} layers")
        return tuple("recurrent" if flag else "attention" for flag in flags[:n_blocks])
