"""Shapes of synthetic models, and the random law of each weight.

A model of random weights is only worth comparing when its arithmetic behaves like that of a trained one: activations
keep their size over all layers, attention picks out some keys, recurrent memory reaches back, and the next-token
distribution is neither flat nor certain. The constants below were chosen for that, and
tests/common/model/test_synthetic.py holds what they bring about. Knows no file. Used by common.model.synthetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from common.errors import ModelError

LOGIT_STD = 3.3
"""Gaussian logits of this spread over 49,152 tokens have an entropy of about ln 49152 - 3.3²/2 = 5.4 nats."""
SCORE_STD = 2.5
"""Spread of attention scores: softmax then rests on a few keys in five hundred instead of averaging them all away."""
BRANCH_GAIN = 2.0
"""Gain of each branch's last matrix, times the root of n_layer: the layers together move the residual about as far
from the embedding whatever their number."""

ARCHITECTURES = ("qwen35", "llama", "gemma3")

Draw = Callable[[np.random.Generator, int], np.ndarray]
"""(generator, n) -> f32 [n]; drawing n and then m gives the same numbers as drawing n + m."""


@dataclass(frozen=True)
class Weight:
    """One tensor to be made. `shape` is rows first; `quantised` says whether it takes the model's storage type."""

    name: str
    shape: tuple[int, ...]
    draw: Draw
    quantised: bool = False


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Everything that decides the tensor shapes of a synthetic model. Raises ModelError when they cannot fit."""

    arch: str = "qwen35"  # one of ARCHITECTURES
    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_vocab: int = 49_152
    n_ctx_train: int = 262_144
    tied: bool = True  # the output multiplies with the embedding
    rope_freq_base: float = 1e7
    eps: float = 1e-6
    # qwen35 and gemma3: every interval-th layer is full attention, the others are recurrent or sliding
    interval: int = 4
    # sliding layers, gemma3 only
    window: int = 64
    rope_linear_factor: float = 1.0  # of the layers that do not slide
    # recurrent layers, qwen35 only
    conv_kernel: int = 4
    state_dim: int = 64
    n_state_group: int = 2  # query and key heads of the recurrent layers
    n_state_head: int = 4  # value heads of the recurrent layers

    def __post_init__(self) -> None:
        if self.arch not in ARCHITECTURES:
            raise ModelError(
                f"unknown architecture {self.arch!r} of a synthetic model; known: {', '.join(ARCHITECTURES)}"
            )
        sizes = {key: value for key, value in vars(self).items() if type(value) is int}
        for key, value in sizes.items():
            if value < 1:
                raise ModelError(f"{key} must be at least 1; got {value}")
        if self.n_head % self.n_head_kv:
            raise ModelError(f"n_head {self.n_head} must be a multiple of n_head_kv {self.n_head_kv}")
        if self.n_state_head % self.n_state_group:
            raise ModelError(
                f"n_state_head {self.n_state_head} must be a multiple of n_state_group {self.n_state_group}"
            )
        if self.n_state_head < 2:
            raise ModelError(
                "n_state_head must be at least 2; got 1 (readers drop the axis of a one-row matrix)"
            )
        if self.head_dim % 16:
            raise ModelError(f"head_dim must be a multiple of 16 (rotary pairs); got {self.head_dim}")

    @property
    def n_rot(self) -> int:
        """Leading elements of a head that are rotated."""
        return max(16, self.head_dim // 4) if self.arch == "qwen35" else self.head_dim

    @property
    def rope_sections(self) -> tuple[int, int, int, int]:
        """Rotary pairs that follow the position axes time, height, width, none; the first three take turns."""
        pairs = self.n_rot // 2
        return (pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0

    @property
    def key_dim(self) -> int:
        return self.state_dim * self.n_state_group

    @property
    def value_dim(self) -> int:
        return self.state_dim * self.n_state_head

    @property
    def conv_dim(self) -> int:
        return 2 * self.key_dim + self.value_dim

    def is_recurrent(self, layer: int) -> bool:
        return self.arch == "qwen35" and (layer + 1) % self.interval != 0

    def weights(self) -> Iterator[Weight]:
        """Every tensor, in file order."""
        # the residual begins with unit variance; the output's spread does not depend on whether it is tied
        embedding_gain = (
            1.0 if self.arch == "gemma3" else math.sqrt(self.n_embd)
        )  # gemma3 scales the rows itself
        yield _matrix("token_embd.weight", self.n_vocab, self.n_embd, embedding_gain)
        for layer in range(self.n_layer):
            for weight in self._layer(layer):
                yield replace(weight, name=f"blk.{layer}.{weight.name}")
        if self.tied:
            # random signs part the output's directions from the embedding's: with plain weights every token would
            # mostly predict itself
            yield Weight("output_norm.weight", (self.n_embd,), _signs(LOGIT_STD / embedding_gain))
        else:
            yield Weight("output_norm.weight", (self.n_embd,), _normal(LOGIT_STD, 0.1))
            yield _matrix("output.weight", self.n_vocab, self.n_embd)

    def n_params(self) -> tuple[int, int]:
        """(parameters of the layers, parameters of embedding and output)."""
        sizes = {weight.name: math.prod(weight.shape) for weight in self.weights()}
        layers = sum(size for name, size in sizes.items() if name.startswith("blk."))
        return layers, sum(sizes.values()) - layers

    def _layer(self, layer: int) -> Iterator[Weight]:
        branch = BRANCH_GAIN / math.sqrt(self.n_layer)
        yield _norm("attn_norm.weight", self.n_embd)
        if self.is_recurrent(layer):
            yield from self._recurrent(branch)
        else:
            yield from self._attention(branch)
        if self.arch == "gemma3":  # each branch ends in a norm, whose weights are its gain
            yield _norm("post_attention_norm.weight", self.n_embd, branch)
            yield _norm("post_ffw_norm.weight", self.n_embd, branch)
        yield _norm("post_attention_norm.weight" if self.arch == "qwen35" else "ffn_norm.weight", self.n_embd)
        yield _matrix("ffn_gate.weight", self.n_ff, self.n_embd)
        yield _matrix("ffn_up.weight", self.n_ff, self.n_embd)
        yield _matrix("ffn_down.weight", self.n_embd, self.n_ff, branch)

    def _attention(self, branch: float) -> Iterator[Weight]:
        q_dim, kv_dim = self.n_head * self.head_dim, self.n_head_kv * self.head_dim
        sharpen = math.sqrt(SCORE_STD)
        if self.arch in ("qwen35", "gemma3"):
            # qwen35: per head its query rows, then its gate rows
            yield _matrix("attn_q.weight", (2 if self.arch == "qwen35" else 1) * q_dim, self.n_embd)
            yield _matrix("attn_k.weight", kv_dim, self.n_embd)
            yield _norm("attn_q_norm.weight", self.head_dim, sharpen)
            yield _norm("attn_k_norm.weight", self.head_dim, sharpen)
        else:
            yield _matrix("attn_q.weight", q_dim, self.n_embd, sharpen)
            yield _matrix("attn_k.weight", kv_dim, self.n_embd, sharpen)
        yield _matrix("attn_v.weight", kv_dim, self.n_embd)
        yield _matrix("attn_output.weight", self.n_embd, q_dim, branch)

    def _recurrent(self, branch: float) -> Iterator[Weight]:
        heads = self.n_state_head
        yield _matrix("attn_qkv.weight", self.conv_dim, self.n_embd)
        yield _matrix("attn_gate.weight", self.value_dim, self.n_embd)
        taps = 1 / math.sqrt(self.conv_kernel)
        yield Weight("ssm_conv1d.weight", (self.conv_dim, self.conv_kernel), _normal(0, taps))
        yield Weight("ssm_dt.bias", (heads,), _normal(0, 0.5))
        yield Weight("ssm_a", (heads,), _decay)
        yield replace(_matrix("ssm_beta.weight", heads, self.n_embd), quantised=False)
        yield replace(_matrix("ssm_alpha.weight", heads, self.n_embd), quantised=False)
        yield _norm("ssm_norm.weight", self.state_dim)
        yield _matrix("ssm_out.weight", self.n_embd, self.value_dim, branch)


def _matrix(name: str, n_out: int, n_in: int, gain: float = 1.0) -> Weight:
    """Unit-variance inputs give outputs of standard deviation `gain`."""
    return Weight(name, (n_out, n_in), _normal(0, gain / math.sqrt(n_in)), quantised=True)


def _norm(name: str, n: int, mean: float = 1.0) -> Weight:
    return Weight(name, (n,), _normal(mean, 0.1))


def _normal(mean: float, std: float) -> Draw:
    def draw(rng: np.random.Generator, n: int) -> np.ndarray:
        values = rng.standard_normal(n, np.float32)
        values *= np.float32(std)
        values += np.float32(mean)
        return values

    return draw


def _signs(scale: float) -> Draw:
    def draw(rng: np.random.Generator, n: int) -> np.ndarray:
        return np.where(rng.random(n, np.float32) < 0.5, np.float32(-scale), np.float32(scale))

    return draw


def _decay(rng: np.random.Generator, n: int) -> np.ndarray:
    """Decay rates spread evenly in their logarithm: memories between about one and a hundred tokens."""
    return -np.exp(rng.uniform(-4.5, 0.5, n)).astype(np.float32)


PRESETS: dict[str, tuple[Geometry, str]] = {
    "tiny": (
        Geometry(n_layer=8, n_embd=128, n_ff=256, n_head=4, n_head_kv=2, head_dim=32, state_dim=32),
        "q4_0",
    ),
    "tiny-sliding": (
        Geometry(
            arch="gemma3", n_layer=12, n_embd=128, n_ff=256, n_head=4, n_head_kv=1, head_dim=64,
            interval=6, window=64, rope_freq_base=1e6, rope_linear_factor=8.0, n_ctx_train=32_768,
        ),
        "q4_0",
    ),
    "hybrid-60m": (
        Geometry(n_layer=32, n_embd=512, n_ff=768, n_head=4, n_head_kv=2, head_dim=128, state_dim=64),
        "q4_0",
    ),
    "hybrid-27b-heads": (
        Geometry(n_layer=8, n_embd=512, n_ff=768, n_head=24, n_head_kv=4, head_dim=256, state_dim=64),
        "q4_0",
    ),
    "hybrid-27b-cycle": (
        Geometry(n_layer=4, n_embd=512, n_ff=768, n_head=24, n_head_kv=4, head_dim=256, state_dim=64),
        "q4_0",
    ),
    "hybrid-27b-wide": (
        Geometry(n_layer=16, n_embd=1024, n_ff=2560, n_head=24, n_head_kv=4, head_dim=256, state_dim=64),
        "q4_0",
    ),
    "hybrid-400m": (
        Geometry(
            n_layer=32, n_embd=1024, n_ff=2560, n_head=6, n_head_kv=1, head_dim=256,
            state_dim=128, n_state_group=8, n_state_head=8,
        ),
        "q4_0",
    ),
}  # fmt: skip
"""Name -> (geometry, storage type). The sizes in the names count the layers' parameters, without the embedding's."""


def preset(name: str) -> tuple[Geometry, str]:
    """(geometry, storage type) of one of PRESETS. Raises ModelError naming them."""
    if name not in PRESETS:
        raise ModelError(f"unknown preset {name!r}; presets: {', '.join(PRESETS)}")
    return PRESETS[name]
