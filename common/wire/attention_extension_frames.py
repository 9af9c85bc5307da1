"""The attention channel's extension messages: pages as they lie in memory, and accumulators in f32.

Every frame here is stamped (epoch, sequence number, hash); an answer names the request it answers. A page's image is
its keys f16 [n_head_kv][page_tokens][head_dim], then its values, one line of page_tokens + 32 elements for each element
of a row (`PageForm` in held.py). Why each message exists is told in docs/protocol.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from common.limits import (
    APPEND_PIECE_BYTES_MAX,
    HEAD_DIM_MAX,
    N_CTX_MAX,
    N_HEAD_MAX,
    N_LAYER_MAX,
    PAGE_PAD_TOKENS,
    QUERY_TOKENS_MAX,
)
from common.wire.base_frames import DTYPE_BYTES, at_most
from common.wire.extension_frames import Err2 as Err2
from common.wire.extension_frames import Hello3 as Hello3
from common.wire.extension_frames import Hello3Ok as Hello3Ok
from common.wire.frames import ATTENTION, Frame, frame
from common.wire.layout import EMPTY, FieldError, Payload

KV_TYPE_F16 = 1
"""ggml's number: the one type of pages."""
MANY_ROWS = ("kernels", "products")
"""CONFIG2's `many_rows` by its number."""
LAYER_BYTES = 4


@frame(
    ATTENTION,
    "CONFIG2",
    "u32 n_layer, u32 n_head_kv, u32 n_group, u32 head_dim_k, u32 head_dim_v, u32 kv_type, u32 page_tokens, "
    "u32 group_pages, u32 many_rows, u64 bytes_wanted, u64 session, u32 keep",
    size=56,
    rest="payload",
    rest_bytes_max=LAYER_BYTES * N_LAYER_MAX,
)
@dataclass(frozen=True)
class Config2(Frame):
    """`layers`: u32 [n_layer], numbers in the whole model, ascending. keep: 1 keeps pages of this session and form."""

    n_layer: int
    n_head_kv: int
    n_group: int
    head_dim_k: int
    head_dim_v: int
    kv_type: int
    page_tokens: int
    group_pages: int
    many_rows: int
    bytes_wanted: int
    session: int
    keep: int
    layers: Payload

    def check(self) -> None:
        for name, bound in (("n_head_kv", N_HEAD_MAX), ("n_group", N_HEAD_MAX), ("head_dim_k", HEAD_DIM_MAX)):
            _between(name, getattr(self, name), 1, bound)
        _between("head_dim_v", self.head_dim_v, 1, HEAD_DIM_MAX)
        _between("page_tokens", self.page_tokens, 1, N_CTX_MAX)
        _between("group_pages", self.group_pages, 1, N_CTX_MAX // self.page_tokens)
        at_most("many_rows", self.many_rows, len(MANY_ROWS) - 1)
        if self.page_tokens % PAGE_PAD_TOKENS:
            raise FieldError(f"page_tokens is {self.page_tokens}, not a multiple of {PAGE_PAD_TOKENS}")
        _between("n_layer", self.n_layer, 1, N_LAYER_MAX)
        if self.layers.n_bytes != LAYER_BYTES * self.n_layer:
            raise FieldError(f"{self.layers.n_bytes} bytes are not the numbers of {self.n_layer} layers")
        numbers = self.layer_numbers
        if list(numbers) != sorted(set(numbers)) or numbers[-1] >= N_LAYER_MAX:
            raise FieldError(f"layers are not ascending numbers below {N_LAYER_MAX}")

    @property
    def layer_numbers(self) -> tuple[int, ...]:
        return tuple(np.frombuffer(self.layers.joined(), "<u4").tolist())


def _between(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise FieldError(f"{name} is {value}, allowed {least} to {most}")


@frame(
    ATTENTION,
    "CONFIG2_OK",
    "u64 answers, u64 bytes_granted, u32 tokens_max, u32 n_keys",
    size=24,
)
@dataclass(frozen=True)
class Config2Ok(Frame):
    """n_keys: keys that every layer kept."""

    answers: int
    bytes_granted: int
    tokens_max: int
    n_keys: int

    def check(self) -> None:
        at_most("tokens_max", self.tokens_max, N_CTX_MAX)
        at_most("n_keys", self.n_keys, self.tokens_max)


@frame(
    ATTENTION,
    "APPEND2",
    "u32 layer, u32 page, u32 n, u32 offset, u64 image_xxh3",
    size=24,
    rest="payload",
    rest_bytes_max=APPEND_PIECE_BYTES_MAX,
)
@dataclass(frozen=True)
class Append2(Frame):
    """A piece of a page's image, from byte `offset` on; n: the page's keys. The hash is of the whole image."""

    layer: int
    page: int
    n: int
    offset: int
    image_xxh3: int
    piece: Payload

    def check(self) -> None:
        at_most("layer", self.layer, N_LAYER_MAX - 1)
        at_most("n", self.n, N_CTX_MAX)
        at_most("page", self.page, N_CTX_MAX)


@frame(ATTENTION, "OK2", "u64 answers, u32 n_now", size=12, rest="payload")
@dataclass(frozen=True)
class Ok2(Frame):
    """n_now: keys of the layer asked for (APPEND2, FETCH2), or that every layer holds. `data`: FETCH2's image."""

    answers: int
    n_now: int
    data: Payload = EMPTY

    def check(self) -> None:
        at_most("n_now", self.n_now, N_CTX_MAX)


@frame(
    ATTENTION,
    "ATTN2",
    "u32 layer, u32 n_tok, u32 group_first, u32 group_end, u32 per_group, f32 scale, u32 q_dtype",
    size=28,
    rest="payload",
)
@dataclass(frozen=True)
class Attn2(Frame):
    """`q`: f32 or f16 [n_head_kv][n_group * n_tok][head_dim_k], unscaled; every row sees every key of these groups.

    Over no groups the answer is the identity, folded (per_group 0): what the way costs without work.
    """

    layer: int
    n_tok: int
    group_first: int
    group_end: int
    per_group: int
    scale: float
    q_dtype: int
    q: Payload

    def check(self) -> None:
        at_most("layer", self.layer, N_LAYER_MAX - 1)
        _between("n_tok", self.n_tok, 1, QUERY_TOKENS_MAX)
        at_most("group_end", self.group_end, N_CTX_MAX // PAGE_PAD_TOKENS)
        at_most("group_first", self.group_first, self.group_end - self.per_group)
        at_most("per_group", self.per_group, 1)
        at_most("scale", self.scale, 1e6)
        if self.q_dtype not in DTYPE_BYTES:
            raise FieldError(f"q_dtype is {self.q_dtype}, allowed 0 (f32) and 1 (f16)")

    @property
    def n_groups(self) -> int:
        return self.group_end - self.group_first


@frame(
    ATTENTION,
    "ATTN2_OK",
    "u64 answers, u32 n_parts, u32 n_keys, u32 n_keys_frozen, f32 total_ms, f32 frozen_ms, f32 generic_ms, "
    "f32 queue_ms",
    size=36,
    rest="payload",
)
@dataclass(frozen=True)
class Attn2Ok(Frame):
    """`parts`: m f32 [n_parts][n_head_kv][rows], l of the same shape, O f32 [n_parts][n_head_kv][rows][head_dim_v]."""

    answers: int
    n_parts: int
    n_keys: int
    n_keys_frozen: int
    total_ms: float
    frozen_ms: float
    generic_ms: float
    queue_ms: float
    parts: Payload

    def check(self) -> None:
        at_most("n_keys", self.n_keys, N_CTX_MAX)
        at_most("n_keys_frozen", self.n_keys_frozen, self.n_keys)
        _between("n_parts", self.n_parts, 1, N_CTX_MAX // PAGE_PAD_TOKENS)
        for name in ("total_ms", "frozen_ms", "generic_ms", "queue_ms"):
            at_most(name, getattr(self, name), 1e9)
        if self.parts.n_bytes % (4 * self.n_parts):
            raise FieldError(f"{self.parts.n_bytes} bytes are not {self.n_parts} parts")


@frame(ATTENTION, "TRUNCATE2", "u32 n", size=4)
@dataclass(frozen=True)
class Truncate2(Frame):
    n: int

    def check(self) -> None:
        at_most("n", self.n, N_CTX_MAX)


@frame(ATTENTION, "FETCH2", "u32 layer, u32 page", size=8)
@dataclass(frozen=True)
class Fetch2(Frame):
    layer: int
    page: int

    def check(self) -> None:
        at_most("layer", self.layer, N_LAYER_MAX - 1)
        at_most("page", self.page, N_CTX_MAX)
