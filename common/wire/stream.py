"""A byte stream cut into frames, and frames laid out for a byte stream. No socket, no clock, no thread.

`FrameReader` lends the caller a writable buffer for recv_into and reports the frames that became whole, however the
stream is cut. Long payloads are received straight into their final place. `FrameWriter` is its mirror image for
sendmsg: buffers go out in order, partial sends are remembered, nothing is joined.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from common.errors import RemoteProtocolError
from common.limits import FRAME_BYTES_MAX
from common.wire.frames import HEADER

STAGING_BYTES = 16 * 1024
"""Frames up to about this size cost one recv and one small copy; longer ones are received in place."""
SEND_BUFFERS_MAX = 512
"""Buffers handed to one sendmsg (the kernel's own limit, IOV_MAX, is 1024)."""


@dataclass(frozen=True)
class RawFrame:
    """A frame as it came off the wire: its type and its whole payload, unchecked but for its length."""

    type: int
    payload: memoryview


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

    def buffer(self) -> memoryview:
        """Where the next bytes belong; never empty."""
        if self._long is not None:
            return self._long.payload[self._long_filled :]
        return self._staging[self._staged :]

    def advance(self, n_bytes: int) -> Iterator[RawFrame]:
        """Account for n_bytes just written to `buffer()` and yield each frame that is now whole.

        Consume it wholly before asking for the next buffer. Raises RemoteProtocolError on a wrong magic, an unknown
        type or a payload over its bound.
        """
        if self._long is not None:
            self._long_filled += n_bytes
            if self._long_filled < len(self._long.payload):
                return
            whole, self._long = self._long, None
            yield whole
            return
        self._staged += n_bytes
        start = 0
        while self._staged - start >= HEADER.size:
            frame_type, n_payload = self._read_header(self._staging[start:])
            start += HEADER.size
            payload = memoryview(np.empty(n_payload, np.uint8))  # np.empty: no zeroing of megabytes
            here = min(n_payload, self._staged - start)
            payload[:here] = self._staging[start : start + here]
            start += here
            if here < n_payload:
                self._long, self._long_filled = RawFrame(frame_type, payload), here
                break
            yield RawFrame(frame_type, payload)
        self._staging[: self._staged - start] = self._staging[start : self._staged]
        self._staged -= start

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
