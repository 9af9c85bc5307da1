"""SpecReader: the metadata of a GGUF header turned into a ModelSpec.

Refuses by name whatever the engine would otherwise run wrongly: unknown architectures, tensor types, missing or extra
tensors, shapes that contradict the metadata, arithmetic that is not built. Every complaint names the file, the key and
the value. What each architecture's layers must hold is declared in layout.py. Used by ModelSpec.read only.
"""

from __future__ import annotations

from typing import Any, NoReturn

from common.errors import ModelError
from common.ggml.header import GgufHeader, StringArray
from common.limits import N_CTX_MAX, N_EMBD_MAX, N_LAYER_MAX, N_VOCAB_MAX

from .layout import ARCHITECTURES, check_layer, check_outer
from .spec import LayerKind, ModelSpec, RecurrentSpec, RopeSpec, SlidingSpec

CYCLES = {"qwen35": 4, "gemma3": 6}
"""Layers after which the pattern of layer kinds repeats, unless the file says otherwise."""
SLIDING_PATTERN = "attention.sliding_window_pattern"
"""Either the layers of a cycle, or one flag a layer."""
FREQ_BASE_SLIDING = 10000.0
"""Rotary base of sliding layers, unless the file says otherwise."""
NOT_BUILT = ("expert_count", "nextn_predict_layers", "attn_logit_softcapping", "final_logit_softcapping")
"""Keys under the architecture's name that must be absent or 0."""
SAME_WHEN_SLIDING = ("attention.key_length", "attention.value_length", "rope.dimension_count")
"""Sizes that a file may give sliding layers under a name of their own (`..._swa`); they must be the same."""


class SpecReader:
    """Reads one header; `spec` is the result."""

    def __init__(self, header: GgufHeader) -> None:
        self.header, self.meta = header, header.metadata
        self.arch: str = self.meta.get("general.architecture") or "nothing"
        if self.arch not in ARCHITECTURES:
            self.refuse(f"architecture {self.arch!r}; supported: {', '.join(ARCHITECTURES)}")

    def refuse(self, what: str) -> NoReturn:
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
        rope = self.rope(head_dim)
        kinds = self.kinds(n_blocks)
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
            rope=rope,
            recurrent=self.recurrent() if self.arch == "qwen35" else None,
            sliding=self.sliding(rope) if self.slides else None,
            kinds=kinds,
            cycle=self.cycle(kinds),
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
        for key in NOT_BUILT:
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
        kind = self.meta.get(f"{self.arch}.rope.scaling.type", "linear")
        if kind not in ("none", "linear"):
            self.refuse(f"{self.arch}.rope.scaling.type is {kind!r}; supported: none, linear")
        if self.meta.get(f"{self.arch}.rope.scaling.attn_factor", 1.0) != 1.0:
            self.refuse(f"{self.arch}.rope.scaling.attn_factor is set; attention is not scaled by position")
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

    def sliding(self, rope: RopeSpec) -> SlidingSpec:
        for key in SAME_WHEN_SLIDING:
            own, shared = (self.meta.get(f"{self.arch}.{key}{end}") for end in ("_swa", ""))
            if own is not None and own != shared:
                self.refuse(
                    f"{self.arch}.{key}_swa is {own}, {self.arch}.{key} is {shared}: supported if equal"
                )
        return SlidingSpec(
            window=self.number("attention.sliding_window", 1, N_CTX_MAX),
            # the linear scale is for the layers that look far
            rope=RopeSpec(
                rope.n_rot, self.number("rope.freq_base_swa", 1e-6, 1e12, FREQ_BASE_SLIDING), freq_scale=1.0
            ),
        )

    @property
    def slides(self) -> bool:
        return self.arch == "gemma3" and bool(self.meta.get("gemma3.attention.sliding_window"))

    def kinds(self, n_blocks: int) -> tuple[LayerKind, ...]:
        if self.arch == "qwen35":
            return self.pattern(
                "attention.recurrent_layers", "full_attention_interval", "recurrent", n_blocks
            )
        if self.slides:
            return self.pattern(SLIDING_PATTERN, SLIDING_PATTERN, "sliding", n_blocks)
        attention: LayerKind = "attention"
        return (attention,) * n_blocks

    def pattern(
        self, flags_key: str, cycle_key: str, kind: LayerKind, n_blocks: int
    ) -> tuple[LayerKind, ...]:
        """Layers are of `kind` where a flag is set; without flags, all but the last of each cycle (all if it is 0)."""
        flags = self.meta.get(f"{self.arch}.{flags_key}")
        if not isinstance(flags, list):
            cycle = self.number(cycle_key, 0, N_LAYER_MAX, CYCLES[self.arch])
            flags = [cycle == 0 or (block + 1) % cycle != 0 for block in range(n_blocks)]
        if len(flags) < n_blocks:
            self.refuse(f"{self.arch}.{flags_key} names {len(flags)} layers of {n_blocks}")
        kinds: list[LayerKind] = [kind if flag else "attention" for flag in flags[:n_blocks]]
        return tuple(kinds)

    def cycle(self, kinds: tuple[LayerKind, ...]) -> int:
        """Layers after which the kinds repeat: as the file says, or as the layers show when it names each."""
        if "split.cycle" in self.meta:
            return self.number("split.cycle", 1, N_LAYER_MAX, prefix=False)
        if self.arch == "qwen35":
            return self.number("full_attention_interval", 1, N_LAYER_MAX, CYCLES[self.arch])
        if "sliding" in kinds and not isinstance(self.meta.get(f"{self.arch}.{SLIDING_PATTERN}"), list):
            return self.number(SLIDING_PATTERN, 0, N_LAYER_MAX, CYCLES[self.arch]) or 1
        return next(n for n in range(1, len(kinds) + 1) if kinds[n:] == kinds[:-n])
