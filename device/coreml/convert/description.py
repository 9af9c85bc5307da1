"""GemmaModel: a Gemma 3 model as the converter sees it, whatever file it came from; weights are read when asked for.

Names of weights: `embed`, `head` (the same as embed where they are tied), `norm`, and for a layer `3.q`, `3.k`, `3.v`,
`3.o`, `3.gate`, `3.up`, `3.down` (matrices [n_out, n_in]) and the norms `3.attn_norm`, `3.q_norm`, `3.k_norm`,
`3.post_attn_norm`, `3.ffn_norm`, `3.post_ffn_norm`.

A norm's weight is always its gain, the factor itself: checkpoints store gain - 1, GGUF files the gain, and readers make
it one here. Made by huggingface.py and gguf_model.py; used by everything else in this room.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from device.coreml.convert.rope import Rope

Kind = Literal["sliding", "global"]
MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
NORMS = ("attn_norm", "q_norm", "k_norm", "post_attn_norm", "ffn_norm", "post_ffn_norm")
ROWS_AT_ONCE_BYTES = 64 << 20


class WeightSource(Protocol):
    """Where weights come from. Names as at the head of this file."""

    def rows(self, name: str, first: int, last: int) -> np.ndarray:
        """f32 [last - first, n_in] of a matrix."""
        ...

    def gain(self, name: str) -> np.ndarray:
        """f64 [n] of a norm, the factor itself."""
        ...

    def close(self) -> None:
        """Give files back."""
        ...


@dataclass(frozen=True)
class GemmaModel:
    """Sizes and rules of a model, and the source of its weights. Sizes are in elements."""

    name: str
    source: WeightSource
    kinds: tuple[Kind, ...]
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_vocab: int
    n_ctx_train: int
    window: int
    """A sliding layer's token sees itself and the window - 1 before it."""
    eps: float
    attention_scale: float
    ropes: dict[Kind, Rope]
    tied: bool = True
    files: tuple[Path, ...] = ()
    """The files it is made of, for its identity."""
    notes: tuple[str, ...] = ()
    """What was left out or changed on reading, in sentences; the converter prints them."""

    @property
    def n_layer(self) -> int:
        return len(self.kinds)

    @property
    def embedding_scale(self) -> float:
        return float(self.n_embd) ** 0.5

    def shape(self, name: str) -> tuple[int, int]:
        """[n_out, n_in] of a matrix."""
        n_q, n_kv = self.n_head * self.head_dim, self.n_head_kv * self.head_dim
        return {
            "embed": (self.n_vocab, self.n_embd),
            "head": (self.n_vocab, self.n_embd),
            "q": (n_q, self.n_embd),
            "k": (n_kv, self.n_embd),
            "v": (n_kv, self.n_embd),
            "o": (self.n_embd, n_q),
            "gate": (self.n_ff, self.n_embd),
            "up": (self.n_ff, self.n_embd),
            "down": (self.n_embd, self.n_ff),
        }[name.rpartition(".")[2]]

    def rows(self, name: str, first: int = 0, last: int | None = None) -> np.ndarray:
        """f32 [last - first, n_in]; the whole matrix if nothing is said."""
        name = "embed" if name == "head" and self.tied else name
        return self.source.rows(name, first, self.shape(name)[0] if last is None else last)

    def blocks(self, name: str, multiple: int = 1) -> Iterator[tuple[int, np.ndarray]]:
        """(first row, f32 rows) of a matrix in pieces of bounded size; each but the last has a multiple of rows."""
        n_out, n_in = self.shape(name)
        step = max(ROWS_AT_ONCE_BYTES // (4 * n_in) // multiple, 1) * multiple
        for first in range(0, n_out, step):
            yield first, self.rows(name, first, min(first + step, n_out))

    def gain(self, name: str) -> np.ndarray:
        """f64 [n]: the factor a norm multiplies by."""
        return self.source.gain(name)

    @property
    def n_weights(self) -> int:
        """All matrices, the embedding counted once more as the head."""
        return sum(map(self.layer_weights, range(self.n_layer))) + 2 * self.n_vocab * self.n_embd

    def layer_weights(self, layer: int) -> int:
        """How many weights the matrices of one layer have."""
        return sum(int(np.prod(self.shape(f"{layer}.{name}"))) for name in MATRICES)

    def close(self) -> None:
        self.source.close()
