"""A byte stream cut into frames, and frames laid out for a byte stream. No socket, no clock, no thread.

`FrameReader` lends the caller a writable buffer for recv_into and reports the frames that became whole, however the
stream is cut. Long payloads are received straight into their final place. `FrameWriter` is its mirror image for
sendmsg: buffers go out in order, partial sends are remembered, nothing is joined.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import xxhash

from common.errors import RemoteProtocolError
from common.limits import FRAME_BYTES_MAX
from common.wire.frames import EXT_HDR, EXTENSION_TYPE_MIN, HEADER, stamp_hasher

STAGING_BYTES = 16 * 1024
"""Frames up to about this size cost one recv and one small copy; longer ones are received in place."""
KEPT_BUFFERS_MAX = 4
KEPT_BYTES_MIN, KEPT_BYTES_MAX = 256 * 1024, 32 * 1024 * 1024
"""Payloads of such sizes are received into memory that was used before: fresh pages cost a tenth of a chunk's time."""
UNUSED_REFERENCES = 3
"""What sys.getrefcount says of an array that only `_Buffers` knows: its list, a local name, the call itself."""
PIECE_BYTES = 1024 * 1024
"""A long payload is received and hashed in pieces that a processor's second cache holds: twice as fast as later."""
SEND_BUFFERS_MAX = 512
"""Buffers handed to one sendmsg (the kernel's own limit, IOV_MAX, is 1024)."""


class RawFrame(NamedTuple):
    """A frame as it came off the wire: its type and its whole payload, unchecked but for its length.

    digest: the hash of a stamped frame, when it was taken piece by piece while the bytes were still in the cache.
    """

    type: int
    payload: memoryview
    digest: int | None = None


class FrameReader:
    """Collects frames of the channel with this magic.

    `bytes_max(type)` is asked for the longest payload acceptable now, before anything is allocated; it raises
    RemoteProtocolError for a type that may not come. A reader that has raised must not be used again.
    """

    def __init__(self, magic: int, bytes_max: Callable[[int], int]) -> None:
        self._magic = magic
        self._bytes_max = bytes_max
        self._staging = memoryview(bytearray(STAGING_BYTES))
        self._staged = 0  # bytes of the staging buffer that are filled
        self._long: RawFrame | None = None  # a payload that is received in place
        self._long_filled = 0
        self._hasher: xxhash.xxh3_64 | None = None  # of the long payload, if it is stamped
        self._buffers = _Buffers()

    @property
    def in_payload(self) -> bool:
        """Whether all of `buffer()` belongs to a frame whose end is still to come: one may wait until it is full."""
        return self._long is not None

    def buffer(self) -> memoryview:
        """Where the next bytes belong; never empty."""
        if self._long is not None:
            return self._long.payload[self._long_filled : self._long_filled + PIECE_BYTES]
        return self._staging[self._staged :]

    def advance(self, n_bytes: int) -> Iterable[RawFrame]:
        """Account for n_bytes just written to `buffer()` and yield each frame that is now whole.

        Consume it wholly before asking for the next buffer. Raises RemoteProtocolError on a wrong magic, an unknown
        type or a payload over its bound.
        """
        if self._long is None and not self._staged and n_bytes >= HEADER.size:
            frame_type, n_payload = self._read_header(self._staging)
            if n_bytes == HEADER.size + n_payload:  # one short frame, which is what mostly comes
                return (RawFrame(frame_type, memoryview(bytearray(self._staging[HEADER.size : n_bytes]))),)
        return self._cut(n_bytes)

    def _cut(self, n_bytes: int) -> Iterator[RawFrame]:
        if self._long is not None:
            if (whole := self._lengthen(self._long, n_bytes)) is not None:
                yield whole
            return
        self._staged += n_bytes
        start = 0
        while self._staged - start >= HEADER.size:
            frame_type, n_payload = self._read_header(self._staging[start:])
            start += HEADER.size
            payload = self._buffers.take(n_payload)
            here = min(n_payload, self._staged - start)
            payload[:here] = self._staging[start : start + here]
            start += here
            if here < n_payload:
                self._long, self._long_filled = RawFrame(frame_type, payload), here
                self._hasher = _hasher_of(frame_type, payload[:here])
                break
            yield RawFrame(frame_type, payload)
        self._staging[: self._staged - start] = self._staging[start : self._staged]
        self._staged -= start

    def _lengthen(self, long: RawFrame, n_bytes: int) -> RawFrame | None:
        """Account for n_bytes of the payload that is received in place; the frame when that was the last of it."""
        start = self._long_filled
        self._long_filled += n_bytes
        if self._hasher is not None:
            self._hasher.update(long.payload[start : self._long_filled])
        if self._long_filled < len(long.payload):
            return None
        self._long = None
        return long if self._hasher is None else long._replace(digest=self._hasher.intdigest())

    def _read_header(self, view: memoryview) -> tuple[int, int]:
        magic, frame_type, n_payload = HEADER.unpack(view)
        if magic != self._magic:
            raise RemoteProtocolError(f"magic {magic:#010x}, expected {self._magic:#010x}")
        bound = min(self._bytes_max(frame_type), FRAME_BYTES_MAX)
        if n_payload > bound:
            raise RemoteProtocolError(
                f"frame type {frame_type} announces {n_payload} bytes, at most {bound} now"
            )
        return frame_type, n_payload


def _hasher_of(frame_type: int, begun: memoryview) -> xxhash.xxh3_64 | None:
    """The hash of a stamped frame of which `begun` has come; None when that is too little to begin with."""
    if frame_type < EXTENSION_TYPE_MIN or len(begun) < EXT_HDR.size:
        return None
    epoch, seq, _ = EXT_HDR.unpack(begun)
    hasher = stamp_hasher(frame_type, epoch, seq)
    hasher.update(begun[EXT_HDR.size :])
    return hasher


class _Buffers:
    """Memory for payloads. Long ones get an array again that nobody looks at any more, as its references tell."""

    def __init__(self) -> None:
        self._kept: list[np.ndarray] = []

    def take(self, n_bytes: int) -> memoryview:
        """A writable view of n_bytes, not zeroed. It stays the caller's as long as anything refers to it."""
        if n_bytes <= STAGING_BYTES:
            return memoryview(bytearray(n_bytes))
        if not KEPT_BYTES_MIN <= n_bytes <= KEPT_BYTES_MAX:
            return memoryview(np.empty(n_bytes, np.uint8))
        for kept in self._kept:
            if n_bytes <= len(kept) <= 2 * n_bytes and sys.getrefcount(kept) == UNUSED_REFERENCES:
                return memoryview(kept)[:n_bytes]
        made = np.empty(n_bytes, np.uint8)
        self._kept.append(made)
        del self._kept[:-KEPT_BUFFERS_MAX]
        return memoryview(made)


class FrameWriter:
    """Buffers waiting to be sent. `while writer: writer.advance(sock.sendmsg(writer.buffers()))` sends them all."""

    def __init__(self) -> None:
        self._waiting: deque[memoryview] = deque()
        self.n_bytes = 0

    def add(self, buffers: Iterable[memoryview]) -> None:
        """Queue one frame's buffers, in order. They must not change until they are sent."""
        for buffer in buffers:
            if len(buffer):
                self._waiting.append(buffer)
                self.n_bytes += len(buffer)

    def __bool__(self) -> bool:
        return self.n_bytes > 0

    def buffers(self) -> list[memoryview]:
        """What to hand to sendmsg next."""
        return [buffer for buffer, _ in zip(self._waiting, range(SEND_BUFFERS_MAX), strict=False)]

    def advance(self, n_bytes: int) -> None:
        """Account for n_bytes that the transport took."""
        self.n_bytes -= n_bytes
        while n_bytes:
            first = self._waiting.popleft()
            if n_bytes < len(first):
                self._waiting.appendleft(first[n_bytes:])
                return
            n_bytes -= len(first)
