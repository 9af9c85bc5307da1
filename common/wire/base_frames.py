"""The residual channel's base messages (SPTL v2), as the published phone app speaks them.

Frames only: their fields, their order on the wire and their bounds. `state_format` 1 is llama.cpp's own sequence blob,
which this product cannot read or write: the worker refuses it by name. Fields we do not use (`n_rs_replay`, `taps`,
`status`) are sent as 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.limits import (
    CHUNK_TOKENS_MAX,
    ERROR_TEXT_BYTES_MAX,
    N_CTX_MAX,
    N_EMBD_MAX,
    N_LAYER_MAX,
    N_VOCAB_MAX,
    PING_BYTES_MAX,
)
from common.wire.frames import RESIDUAL, Frame, frame
from common.wire.layout import EMPTY, FieldError, Payload

PROTO = 2
STATE_FORMAT_LLAMA = 1
STATE_FORMAT_ROWS = 0x52530001

DTYPE_F32, DTYPE_F16 = 0, 1
DTYPE_BYTES = {DTYPE_F32: 4, DTYPE_F16: 2}

HELLO_REQ = (
    "u32 proto, u32 state_format, u32 split_layer, u32 n_layer_full, u32 n_embd, u32 n_vocab, u32 n_ctx, "
    "u32 n_ubatch"
)
HELLO_REQ2 = (
    f"{HELLO_REQ}, i32 type_k, i32 type_v, u32 flash_attn, u32 n_rs_replay, u32 n_taps, i32 taps[4], "
    "u64 session, u32 keep"
)
HELLO_REP = (
    "u32 proto, u32 state_format, u32 layer_start, u32 n_layer_full, u32 n_layer, u32 n_embd, u32 n_vocab, "
    "u32 n_ctx, u64 file_bytes, char desc[128]"
)
HELLO_REP2 = f"{HELLO_REP}, u32 n_valid, u64 session"


def at_most(name: str, value: float, bound: float) -> None:
    """Raise FieldError unless 0 <= value <= bound (which NaN is not)."""
    if not 0 <= value <= bound:
        raise FieldError(f"{name} is {value}, allowed 0 to {bound}")


def bounded_text(text: str, n_bytes_max: int = ERROR_TEXT_BYTES_MAX) -> str:
    """`text` cut at a character so that it has at most n_bytes_max bytes of UTF-8."""
    return text.encode(errors="replace")[:n_bytes_max].decode(errors="ignore")


def check_model(split_layer: int, n_layer_full: int, n_embd: int, n_vocab: int, n_ctx: int) -> None:
    """Bounds of the numbers every hello carries."""
    at_most("n_layer_full", n_layer_full, N_LAYER_MAX)
    at_most("first layer", split_layer, n_layer_full)
    at_most("n_embd", n_embd, N_EMBD_MAX)
    at_most("n_vocab", n_vocab, N_VOCAB_MAX)
    at_most("n_ctx", n_ctx, N_CTX_MAX)


def check_residual(position: int, n_tokens: int, dtype: int, n_bytes: int) -> None:
    """Bounds of a chunk. Its width is known to the link only; here the bytes must be whole elements a token."""
    at_most("pos0", position, N_CTX_MAX)
    at_most("n_tok", n_tokens, CHUNK_TOKENS_MAX)
    if dtype not in DTYPE_BYTES:
        raise FieldError(f"dtype is {dtype}, allowed 0 (f32) and 1 (f16)")
    if n_tokens == 0 or n_bytes % (n_tokens * DTYPE_BYTES[dtype]):
        raise FieldError(f"{n_bytes} bytes are no residual of {n_tokens} tokens")
    at_most("n_embd", n_bytes // (n_tokens * DTYPE_BYTES[dtype]), N_EMBD_MAX)


def check_range(p0: int, p1: int, flags: int) -> None:
    """Bounds of a range of positions and of its flags (1 KV rows, 2 recurrent state)."""
    at_most("p1", p1, N_CTX_MAX)
    at_most("p0", p0, p1)
    at_most("flags", flags, 3)


@frame(RESIDUAL, "HELLO", HELLO_REQ, size=32)
@dataclass(frozen=True)
class Hello(Frame):
    proto: int
    state_format: int
    split_layer: int
    n_layer_full: int
    n_embd: int
    n_vocab: int
    n_ctx: int
    n_ubatch: int

    def check(self) -> None:
        check_model(self.split_layer, self.n_layer_full, self.n_embd, self.n_vocab, self.n_ctx)


@frame(RESIDUAL, "HELLO", HELLO_REQ2, size=80)
@dataclass(frozen=True)
class Hello2(Hello):
    type_k: int
    type_v: int
    flash_attn: int
    n_rs_replay: int
    n_taps: int
    taps: tuple[int, int, int, int]
    session: int
    keep: int

    def check(self) -> None:
        super().check()
        at_most("n_taps", self.n_taps, len(self.taps))


@frame(RESIDUAL, "HELLO_OK", HELLO_REP, size=168)
@dataclass(frozen=True)
class HelloOk(Frame):
    proto: int
    state_format: int
    layer_start: int
    n_layer_full: int
    n_layer: int
    n_embd: int
    n_vocab: int
    n_ctx: int
    file_bytes: int
    desc: str

    def check(self) -> None:
        check_model(self.layer_start, self.n_layer_full, self.n_embd, self.n_vocab, self.n_ctx)


@frame(RESIDUAL, "HELLO_OK", HELLO_REP2, size=180)
@dataclass(frozen=True)
class HelloOk2(HelloOk):
    n_valid: int
    session: int


@frame(RESIDUAL, "RESET", "", size=0)
@dataclass(frozen=True)
class Reset(Frame):
    pass


@frame(RESIDUAL, "RESET_OK", "", size=0)
@dataclass(frozen=True)
class ResetOk(Frame):
    pass


@frame(RESIDUAL, "CHUNK", "i32 pos0, u32 n_tok, u32 dtype, u32 want", size=16, rest="payload")
@dataclass(frozen=True)
class Chunk(Frame):
    pos0: int
    n_tok: int
    dtype: int
    want: int
    residual: Payload

    def check(self) -> None:
        check_residual(self.pos0, self.n_tok, self.dtype, self.residual.n_bytes)


@frame(RESIDUAL, "CHUNK_ACK", "u32 status, u32 n_tok, u32 n_logits, f32 compute_ms", size=16, rest="payload")
@dataclass(frozen=True)
class ChunkAck(Frame):
    """`output` is the logits, f32 [n_logits], then tap rows, f16 (never asked for by us)."""

    status: int
    n_tok: int
    n_logits: int
    compute_ms: float
    output: Payload = EMPTY

    def check(self) -> None:
        at_most("n_tok", self.n_tok, CHUNK_TOKENS_MAX)
        at_most("n_logits", self.n_logits, min(N_VOCAB_MAX, self.output.n_bytes // 4))
        at_most("compute_ms", self.compute_ms, 1e9)


@frame(RESIDUAL, "TRIM", "u32 n", size=4)
@dataclass(frozen=True)
class Trim(Frame):
    n: int


@frame(RESIDUAL, "SYNC", "u32 flags, u32 n_valid_after", size=8, rest="payload")
@dataclass(frozen=True)
class Sync(Frame):
    flags: int
    n_valid_after: int
    blob: Payload

    def check(self) -> None:
        check_range(0, self.n_valid_after, self.flags)


@frame(RESIDUAL, "OK", "u32 n_valid", size=4)
@dataclass(frozen=True)
class Ok(Frame):
    n_valid: int


@frame(RESIDUAL, "STATE", "", size=0)
@dataclass(frozen=True)
class State(Frame):
    pass


@frame(RESIDUAL, "STATE_RANGE", "i32 p0, i32 p1, u32 flags", size=12)
@dataclass(frozen=True)
class StateRange(Frame):
    p0: int
    p1: int
    flags: int

    def check(self) -> None:
        check_range(self.p0, self.p1, self.flags)


@frame(RESIDUAL, "STATE_DATA", "", size=0, rest="payload")
@dataclass(frozen=True)
class StateData(Frame):
    blob: Payload


@frame(RESIDUAL, "PING", "u32 reply_len", size=4, rest="payload", rest_bytes_max=PING_BYTES_MAX)
@dataclass(frozen=True)
class Ping(Frame):
    reply_len: int
    data: Payload = EMPTY

    def check(self) -> None:
        at_most("reply_len", self.reply_len, PING_BYTES_MAX)


@frame(RESIDUAL, "PONG", "", size=0, rest="payload", rest_bytes_max=PING_BYTES_MAX)
@dataclass(frozen=True)
class Pong(Frame):
    data: Payload = EMPTY


@frame(RESIDUAL, "BYE", "", size=0)
@dataclass(frozen=True)
class Bye(Frame):
    pass


@frame(RESIDUAL, "ERR", "", size=0, rest="text", rest_bytes_max=ERROR_TEXT_BYTES_MAX)
@dataclass(frozen=True)
class Err(Frame):
    text: str
