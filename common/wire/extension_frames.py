"""The residual channel's extension messages: what our own worker speaks beyond the base protocol.

Every frame here is stamped (epoch, sequence number, hash). An answer names the request it answers by that request's
sequence number, `answers`; 0 in an ERR2 means the connection as a whole. Why each message exists is told in
docs/protocol.md. Greetings and ERR2 are the attention channel's, too.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.limits import (
    CHUNK_TOKENS_MAX,
    CHUNK_WINDOW_MAX,
    ERROR_TEXT_BYTES_MAX,
    FINGERPRINT_TEXT_BYTES_MAX,
    N_CTX_MAX,
    N_VOCAB_MAX,
)
from common.wire.base_frames import at_most, bounded_text, check_model, check_range, check_residual
from common.wire.fingerprint import fingerprint
from common.wire.frames import ATTENTION, RESIDUAL, Frame, also, frame
from common.wire.layout import EMPTY, FieldError, Payload

EXTENSION_VERSION = 1
"""The one version of the extension this code speaks; ext_min..ext_max of a hello must contain it."""
FEATURE_ROW_STATE = 1
FEATURE_SNAPSHOTS = 2
FEATURE_F32_PARTIALS = 4
FEATURE_OUTPUT = 8
"""The host has no output head: the worker is to give logits, and its fingerprint covers what they come from."""
LSE_BASE_NATURAL = 1

HELLO3 = (
    "u16 ext_min, u16 ext_max, u64 boot_id, u32 features, u32 lse_base, u32 kv_type, u32 page_tokens, "
    "u32 group_pages, u32 frame_mib_max, u32 window, u32 split_layer, u32 n_layer_full, u32 n_embd, u32 n_vocab, "
    "u32 n_ctx, char device[64], u8 fingerprint[32]"
)


@dataclass(frozen=True)
class Hello3Fields(Frame):
    """Both halves of the greeting have the same fields. `text` is what `fingerprint` is the hash of.

    split_layer: in HELLO3 the first layer the host wants run; in HELLO3_OK the first layer the worker holds, with
    `text` and `fingerprint` of the layers from the *asked* split layer on, so that both sides compare like with like.
    """

    ext_min: int
    ext_max: int
    boot_id: int
    features: int
    lse_base: int
    kv_type: int
    page_tokens: int
    group_pages: int
    frame_mib_max: int
    window: int
    split_layer: int
    n_layer_full: int
    n_embd: int
    n_vocab: int
    n_ctx: int
    device: str
    fingerprint: bytes
    text: str

    def check(self) -> None:
        check_model(self.split_layer, self.n_layer_full, self.n_embd, self.n_vocab, self.n_ctx)
        if not 1 <= self.window <= CHUNK_WINDOW_MAX:
            raise FieldError(f"window is {self.window}, allowed 1 to {CHUNK_WINDOW_MAX}")
        if self.ext_min > self.ext_max:
            raise FieldError(f"ext_min {self.ext_min} exceeds ext_max {self.ext_max}")
        if self.fingerprint != fingerprint(self.text):
            raise FieldError("fingerprint is not the hash of the text")


@also(ATTENTION)
@frame(RESIDUAL, "HELLO3", HELLO3, size=156, rest="text", rest_bytes_max=FINGERPRINT_TEXT_BYTES_MAX)
@dataclass(frozen=True)
class Hello3(Hello3Fields):
    pass


@also(ATTENTION)
@frame(RESIDUAL, "HELLO3_OK", HELLO3, size=156, rest="text", rest_bytes_max=FINGERPRINT_TEXT_BYTES_MAX)
@dataclass(frozen=True)
class Hello3Ok(Hello3Fields):
    pass


@frame(RESIDUAL, "CHUNK2", "i32 pos0, u32 n_tok, u32 dtype, u32 want", size=16, rest="payload")
@dataclass(frozen=True)
class Chunk2(Frame):
    """want: 1 logits of the last row, 2 tap rows, 4 the chunk's K/V rows, 8 the recurrent state after it."""

    pos0: int
    n_tok: int
    dtype: int
    want: int
    residual: Payload

    def check(self) -> None:
        check_residual(self.pos0, self.n_tok, self.dtype, self.residual.n_bytes)
        at_most("want", self.want, 15)


@frame(
    RESIDUAL,
    "CHUNK2_ACK",
    "u64 answers, u32 n_tok, u32 n_valid, u32 n_logits, f32 compute_ms, f32 queue_ms, u32 reserved",
    size=32,
    rest="payload",
)
@dataclass(frozen=True)
class Chunk2Ack(Frame):
    """`output` is the logits, f32 [n_logits], then a ROWS blob when rows or state were wanted."""

    answers: int
    n_tok: int
    n_valid: int
    n_logits: int
    compute_ms: float
    queue_ms: float
    reserved: int = 0
    output: Payload = EMPTY

    def check(self) -> None:
        at_most("n_tok", self.n_tok, CHUNK_TOKENS_MAX)
        at_most("n_valid", self.n_valid, N_CTX_MAX)
        at_most("n_logits", self.n_logits, min(N_VOCAB_MAX, self.output.n_bytes // 4))
        at_most("compute_ms", self.compute_ms, 1e9)
        at_most("queue_ms", self.queue_ms, 1e9)


@frame(RESIDUAL, "SYNC2", "u32 flags, u32 n_valid_after", size=8, rest="payload")
@dataclass(frozen=True)
class Sync2(Frame):
    flags: int
    n_valid_after: int
    blob: Payload

    def check(self) -> None:
        check_range(0, self.n_valid_after, self.flags)


@frame(RESIDUAL, "OK2", "u64 answers, u32 n_valid", size=12)
@dataclass(frozen=True)
class Ok2(Frame):
    answers: int
    n_valid: int

    def check(self) -> None:
        at_most("n_valid", self.n_valid, N_CTX_MAX)


@frame(RESIDUAL, "STATE_RANGE2", "i32 p0, i32 p1, u32 flags", size=12)
@dataclass(frozen=True)
class StateRange2(Frame):
    p0: int
    p1: int
    flags: int

    def check(self) -> None:
        check_range(self.p0, self.p1, self.flags)


@frame(RESIDUAL, "STATE_DATA2", "u64 answers", size=8, rest="payload")
@dataclass(frozen=True)
class StateData2(Frame):
    answers: int
    blob: Payload


@frame(RESIDUAL, "SNAPSHOT", "u32 n", size=4)
@dataclass(frozen=True)
class Snapshot(Frame):
    n: int

    def check(self) -> None:
        at_most("n", self.n, N_CTX_MAX)


@frame(RESIDUAL, "TRIM2", "u32 n", size=4)
@dataclass(frozen=True)
class Trim2(Frame):
    n: int

    def check(self) -> None:
        at_most("n", self.n, N_CTX_MAX)


@also(ATTENTION)
@frame(
    RESIDUAL,
    "ERR2",
    "u64 answers, u32 code, u32 n_valid",
    size=16,
    rest="text",
    rest_bytes_max=ERROR_TEXT_BYTES_MAX,
)
@dataclass(frozen=True)
class Err2(Frame):
    """`n_valid` is where the mirror stands after the failure: as before the operation, or 0 when it was emptied. On
    the attention channel: the keys that every layer holds."""

    answers: int
    code: int
    n_valid: int
    text: str

    def check(self) -> None:
        at_most("n_valid", self.n_valid, N_CTX_MAX)

    @classmethod
    def of(cls, answers: int, code: int, n_valid: int, detail: str) -> Err2:
        """The text begins with the code, as in "E402 position 512 asked, 256 expected"; it is cut to its bound."""
        return cls(answers, code, n_valid, bounded_text(f"E{code} {detail}"))
