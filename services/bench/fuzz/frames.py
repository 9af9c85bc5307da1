"""Frames that are right, wrong, or nearly right: hostile bytes made from a seed.

Every frame says what an honest receiver does with it: answers it, ends the connection, or nothing it could be asked
about. Pure; used by services.bench.fuzz.codec and live, and by tests.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from common.limits import CHUNK_TOKENS_MAX, N_CTX_MAX
from common.wire import base_frames as base
from common.wire import extension_frames as ext
from common.wire.frames import EXT_HDR, HEADER, RESIDUAL, Channel, Frame, encode, stamp_hash
from common.wire.layout import Payload
from common.wire.rows import ROWS_HEAD, ROWS_MAGIC, ROWS_SECTION

Outcome = Literal["answer", "unknown", "never ends"]
"""answer: one answer, and the connection goes on. never ends: the receiver waits for bytes that do not come."""


@dataclass(frozen=True)
class Hostile:
    """Bytes for the wire, and what comes of them. `numbered`: they used up a sequence number."""

    kind: str
    data: bytes
    outcome: Outcome
    numbered: bool


class FrameMaker:
    """Makes what a host might say to a worker whose model is `n_embd` wide, from `rng` alone.

    That is the residual channel; `page_frames` has the other's.
    """

    channel: Channel = RESIDUAL
    wild: tuple[type[Frame], ...] = (ext.Chunk2, ext.Sync2, ext.StateRange2, ext.Snapshot, ext.Trim2)
    """Requests whose fields are filled at random."""
    short: type[Frame] = ext.Trim2
    """A request of one number, for wrong stamps."""
    greetings: tuple[type[Frame], ...] = (base.Hello, base.Hello2)

    def __init__(self, rng: random.Random, n_embd: int) -> None:
        self._rng, self._n_embd = rng, n_embd
        self._kinds: list[tuple[int, Callable[[int, int], Hostile]]] = [
            (60, self._request),
            (10, self._rows),
            (8, self._flipped),
            (6, self._wild_fields),
            (3, self._stale),
            (2, self._gap),
            (3, self._other_type),
            (3, self._liar),
            (3, self._garbage),
            (2, self._unasked_answer),
        ]

    def frame(self, epoch: int, seq: int) -> Hostile:
        """Something to say as frame `seq` of a greeted link."""
        weights = [weight for weight, _ in self._kinds]
        (_, make) = self._rng.choices(self._kinds, weights)[0]
        return make(epoch, seq)

    def bad_greeting(self, greeting: bytes) -> Hostile:
        """A greeting that is not one: changed, cut, of other types, or no frame at all."""
        rng = self._rng
        match rng.randrange(4):
            case 0:
                return self._flip(greeting, HEADER.size, "greeting flipped")
            case 1:
                return Hostile("greeting cut", greeting[: rng.randrange(len(greeting))], "never ends", False)
            case 2:
                layout = rng.choice(self.greetings).LAYOUT
                frame = _framed(self.channel, self.channel.types["HELLO"], rng.randbytes(layout.size))
                return Hostile("greeting wild", frame, "unknown", False)
            case _:
                return self._garbage(0, 0)

    # --- one method a kind

    def _request(self, epoch: int, seq: int) -> Hostile:
        """A request that is well formed and mostly makes no sense where the mirror stands."""
        rng = self._rng
        position, other = sorted(rng.choice((0, 1, 7, 256, 1024, N_CTX_MAX)) for _ in range(2))
        frame: Frame
        match rng.randrange(6):
            case 0:
                n_tok = rng.choice((1, 2, 3, 8))
                dtype = rng.randrange(2)
                data = self._residual(n_tok, base.DTYPE_BYTES[dtype])
                frame = ext.Chunk2(rng.choice((0, position)), n_tok, dtype, rng.randrange(16), Payload(data))
            case 1:
                frame = ext.StateRange2(position, other, rng.randrange(4))
            case 2:
                frame = ext.Snapshot(position)
            case 3:
                frame = ext.Trim2(position)
            case 4:
                frame = ext.Sync2(rng.randrange(4), position, Payload(rng.randbytes(rng.randrange(200))))
            case _:
                ping = base.Ping(rng.randrange(5000), Payload(rng.randbytes(rng.randrange(100))))
                return Hostile("ping", b"".join(encode(RESIDUAL, ping)), "answer", False)
        data = b"".join(encode(RESIDUAL, frame, epoch=epoch, seq=seq))
        return Hostile(frame.NAME.lower(), data, "answer", True)

    def _residual(self, n_tokens: int, element_bytes: int) -> bytes:
        """Numbers, or bits that may be infinite or no number."""
        n = n_tokens * self._n_embd
        if self._rng.random() < 0.5:
            return self._rng.randbytes(n * element_bytes)
        code = "f" if element_bytes == 4 else "e"
        return struct.pack(f"<{n}{code}", *(self._rng.uniform(-2, 2) for _ in range(n)))

    def _rows(self, epoch: int, seq: int) -> Hostile:
        """A ROWS blob whose sections lie about layers, kinds, positions and lengths."""
        rng, blob = self._rng, b""
        n_sections = rng.randrange(4)
        for _ in range(n_sections):
            p0 = rng.choice((0, 0, 1, -1, 256))
            p1 = p0 + rng.choice((0, 1, 3, 2**20))
            row_bytes = rng.choice((0, 2, 64, 2**31))
            numbers = (rng.choice((0, 1, 2, 511, 2**32 - 1)), rng.randrange(6), rng.choice((0, 1, 99)))
            blob += ROWS_SECTION.pack((*numbers, p0, min(p1, 2**31 - 1), row_bytes))
            blob += rng.randbytes(min(4096, max(0, p1 - p0) * row_bytes))
        claimed = rng.choice((n_sections, n_sections, 2**32 - 1))
        blob = ROWS_HEAD.pack((rng.choice((ROWS_MAGIC, ROWS_MAGIC, 7)), claimed)) + blob
        sync = ext.Sync2(rng.randrange(4), rng.choice((0, 1, 3, 256)), Payload(blob))
        return Hostile("rows", b"".join(encode(RESIDUAL, sync, epoch=epoch, seq=seq)), "answer", True)

    def _flipped(self, epoch: int, seq: int) -> Hostile:
        right = self._request(epoch, seq)
        # Not the header: another length there is what _liar is about.
        return self._flip(right.data, HEADER.size, f"{right.kind} flipped", right.numbered)

    def _wild_fields(self, epoch: int, seq: int) -> Hostile:
        """The right hash over fields that are random."""
        cls = self._rng.choice(self.wild)
        body = self._rng.randbytes(cls.LAYOUT.size + (self._rng.randrange(64) if cls.REST else 0))
        return Hostile("wild fields", self._stamped(cls.TYPE, epoch, seq, body), "unknown", True)

    def _stale(self, epoch: int, seq: int) -> Hostile:
        body = self.short.LAYOUT.pack((0,))
        other = self._rng.choice((0, epoch - 1, epoch + 1, 2**64 - 1))
        return Hostile("stale epoch", self._stamped(self.short.TYPE, other, seq, body), "unknown", False)

    def _gap(self, epoch: int, seq: int) -> Hostile:
        body = self.short.LAYOUT.pack((0,))
        other = self._rng.choice((0, seq - 1, seq + 1, 2**64 - 1))
        return Hostile("gap", self._stamped(self.short.TYPE, epoch, other, body), "unknown", False)

    def _other_type(self, epoch: int, seq: int) -> Hostile:
        number = self._rng.choice((0, 2, 5, 13, 17, 63, 64, 65, 74, 78, 80, 2**31, 2**32 - 1))
        body = self._rng.randbytes(self._rng.randrange(80))
        return Hostile("other type", self._stamped(number, epoch, seq, body), "unknown", False)

    def _unasked_answer(self, epoch: int, seq: int) -> Hostile:
        ok = ext.Ok2(self._rng.randrange(5), 0)
        return Hostile("answer", b"".join(encode(RESIDUAL, ok, epoch=epoch, seq=seq)), "unknown", False)

    def _liar(self, _epoch: int, _seq: int) -> Hostile:
        """A header that announces more than may come, or than does come."""
        rng = self._rng
        allowed = CHUNK_TOKENS_MAX * self._n_embd * 4
        n_bytes = rng.choice((1000, allowed, allowed + 41, 2**28, 2**28 + 1, 2**32, 2**63, 2**64 - 1))
        kind = rng.choice(list(self.channel.types.values()))
        data = HEADER.pack((self.channel.magic, kind, n_bytes)) + rng.randbytes(rng.randrange(50))
        return Hostile("liar", data, "never ends", False)

    def _garbage(self, _epoch: int, _seq: int) -> Hostile:
        data = self._rng.randbytes(self._rng.randrange(1, 300))
        return Hostile("garbage", data, "never ends" if len(data) < HEADER.size else "unknown", False)

    def _stamped(self, frame_type: int, epoch: int, seq: int, body: bytes) -> bytes:
        return stamped(frame_type, epoch, seq, body, self.channel)

    def _flip(self, data: bytes, first: int, kind: str, numbered: bool = False) -> Hostile:
        changed = bytearray(data)
        if len(changed) > first:
            changed[self._rng.randrange(first, len(changed))] ^= 1 << self._rng.randrange(8)
        return Hostile(kind, bytes(changed), "unknown", numbered)


def stamped(frame_type: int, epoch: int, seq: int, body: bytes, channel: Channel = RESIDUAL) -> bytes:
    """A frame with a right hash, whatever its body is."""
    seq %= 1 << 64
    digest = stamp_hash(frame_type, epoch, seq, (memoryview(body),))
    return _framed(channel, frame_type, EXT_HDR.pack((epoch, seq, digest)) + body)


def _framed(channel: Channel, frame_type: int, payload: bytes) -> bytes:
    return HEADER.pack((channel.magic, frame_type, len(payload))) + payload
