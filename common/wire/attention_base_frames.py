"""The attention channel's base messages (PATN v4), as the published phone app speaks them.

Frames only: their fields, their order on the wire and their bounds. Their geometry is fixed: heads of 256 elements, 48
query rows for each key/value head (8 tokens of 6 heads). `layer` counts layers with keys from 0. Every request but the
queries is answered by OK, whose payload depends on the request. Settings of that app's processor (`sme_`, `gpu_`) are
sent as 0 and ignored.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.limits import ERROR_TEXT_BYTES_MAX, N_CTX_MAX, N_HEAD_MAX, N_LAYER_MAX, PING_BYTES_MAX
from common.wire.base_frames import at_most
from common.wire.frames import ATTENTION, Frame, frame
from common.wire.layout import EMPTY, FieldError, Payload

VERSION = 4
HEAD_DIM = 256
QUERY_ROWS = 48
QUERY_TOKENS = 8
"""Row g * QUERY_TOKENS + t is token t of head g of a group; rows of tokens that are not there are zero."""
BLOCKS_MAX = 64
"""Blocks of QUERY_TOKENS tokens in one ATTN_BIG."""
KV_F16, KV_Q8_0, KV_Q4_0 = 0, 1, 2
F16_BYTES, F32_BYTES = 2, 4
BLOCK_BYTES_Q = QUERY_ROWS * HEAD_DIM * F16_BYTES
"""Queries of one block for one key/value head."""


@frame(ATTENTION, "HELLO", "", size=0)
@dataclass(frozen=True)
class Hello(Frame):
    pass


@frame(ATTENTION, "HELLO_OK", "u32 version, u32 sme2, char device[64]", size=72)
@dataclass(frozen=True)
class HelloOk(Frame):
    version: int
    sme2: int
    device: str


@frame(
    ATTENTION,
    "CONFIG",
    "u32 n_layer, u32 n_head_kv, u32 row_bytes, u32 head_bytes, u32 kv_type, u32 sme_workers, u32 sme_helpers, "
    "u32 gpu_permille, u32 gpu_chunk, u32 store_f16, u32 gpu_variant",
    size=44,
)
@dataclass(frozen=True)
class Config(Frame):
    n_layer: int
    n_head_kv: int
    row_bytes: int
    head_bytes: int
    kv_type: int
    sme_workers: int = 0
    sme_helpers: int = 0
    gpu_permille: int = 0
    gpu_chunk: int = 0
    store_f16: int = 0
    gpu_variant: int = 0

    def check(self) -> None:
        at_most("n_layer", self.n_layer, N_LAYER_MAX)
        at_most("n_head_kv", self.n_head_kv, N_HEAD_MAX)
        at_most("head_bytes", self.head_bytes, HEAD_DIM * F16_BYTES)
        if self.row_bytes != self.n_head_kv * self.head_bytes:
            raise FieldError(
                f"row_bytes is {self.row_bytes}; {self.n_head_kv} heads of {self.head_bytes} bytes have "
                f"{self.n_head_kv * self.head_bytes}"
            )


@frame(ATTENTION, "APPEND", "u32 layer, u32 pos0, u32 n", size=12, rest="payload")
@dataclass(frozen=True)
class Append(Frame):
    """`rows`: n K rows, then n V rows, each token-major."""

    layer: int
    pos0: int
    n: int
    rows: Payload

    def check(self) -> None:
        check_rows(self.layer, self.pos0, self.n)
        if self.n == 0 or self.rows.n_bytes % (2 * self.n):
            raise FieldError(f"{self.rows.n_bytes} bytes are no K and V rows of {self.n} tokens")


def check_rows(layer: int, pos0: int, n: int) -> None:
    """Bounds of a run of rows of a layer."""
    at_most("layer", layer, N_LAYER_MAX - 1)
    at_most("pos0", pos0, N_CTX_MAX)
    at_most("n", n, N_CTX_MAX)


@frame(ATTENTION, "TRUNCATE", "u32 n", size=4)
@dataclass(frozen=True)
class Truncate(Frame):
    n: int


@dataclass(frozen=True)
class _Query(Frame):
    """nk: keys that are attended, a multiple of 64; 0: all that are held."""

    layer: int
    n_tok: int
    nk: int
    scale: float
    q: Payload

    def check(self) -> None:
        at_most("layer", self.layer, N_LAYER_MAX - 1)
        at_most("nk", self.nk, N_CTX_MAX)
        at_most("scale", self.scale, 1e6)
        if self.n_tok < 1:
            raise FieldError("n_tok is 0")


QUERY = "u32 layer, u32 n_tok, u32 nk, f32 scale"


@frame(ATTENTION, "ATTN", QUERY, size=16, rest="payload")
@dataclass(frozen=True)
class Attn(_Query):
    """`q`: f16 [n_head_kv][48][256], unscaled."""

    def check(self) -> None:
        super().check()
        at_most("n_tok", self.n_tok, QUERY_TOKENS)


@frame(ATTENTION, "ATTN_BIG", QUERY, size=16, rest="payload")
@dataclass(frozen=True)
class AttnBig(_Query):
    """`q`: f16 [n_blocks][n_head_kv][48][256] with n_blocks = ceil(n_tok / 8)."""

    def check(self) -> None:
        super().check()
        at_most("n_tok", self.n_tok, BLOCKS_MAX * QUERY_TOKENS)

    @property
    def n_blocks(self) -> int:
        return -(-self.n_tok // QUERY_TOKENS)


@frame(
    ATTENTION,
    "ATTN_OK",
    "u32 nk, f32 total_ms, f32 gpu_ms, f32 cpu_ms, u32 gpu_pages, u32 pages",
    size=24,
    rest="payload",
)
@dataclass(frozen=True)
class AttnOk(Frame):
    """`output`, for each block: O f16 [n_head_kv][48][256], normalised, then lse f32 [n_head_kv][48]."""

    nk: int
    total_ms: float
    gpu_ms: float
    cpu_ms: float
    gpu_pages: int
    pages: int
    output: Payload

    def check(self) -> None:
        at_most("nk", self.nk, N_CTX_MAX)
        for name in ("total_ms", "gpu_ms", "cpu_ms"):
            at_most(name, getattr(self, name), 1e9)


@frame(ATTENTION, "STATS", "", size=0)
@dataclass(frozen=True)
class Stats(Frame):
    pass


@frame(ATTENTION, "OK", "", size=0, rest="payload")
@dataclass(frozen=True)
class Ok(Frame):
    """`data`: after APPEND u32 n_now, after FETCH rows, after STATS text, after PING reply_len bytes; else nothing."""

    data: Payload = EMPTY


@frame(ATTENTION, "ERR", "", size=0, rest="text", rest_bytes_max=ERROR_TEXT_BYTES_MAX)
@dataclass(frozen=True)
class Err(Frame):
    text: str


@frame(ATTENTION, "BYE", "", size=0)
@dataclass(frozen=True)
class Bye(Frame):
    pass


@frame(ATTENTION, "PING", "u32 reply_len", size=4, rest="payload", rest_bytes_max=PING_BYTES_MAX)
@dataclass(frozen=True)
class Ping(Frame):
    reply_len: int
    data: Payload = EMPTY

    def check(self) -> None:
        at_most("reply_len", self.reply_len, PING_BYTES_MAX)


@frame(ATTENTION, "FETCH", "u32 layer, u32 pos0, u32 n, u32 which", size=16)
@dataclass(frozen=True)
class Fetch(Frame):
    """which: 0 K rows, 1 V rows."""

    layer: int
    pos0: int
    n: int
    which: int

    def check(self) -> None:
        check_rows(self.layer, self.pos0, self.n)
        at_most("which", self.which, 1)
