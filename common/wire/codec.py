"""Bus messages to frames and back: header, body, then the arrays as frames of their own.

    header frame   24 bytes   magic "OTRG", u16 version, u16 route id, u64 epoch, u64 seq   (little-endian)
    body frame     msgpack    one message of the union that the route allows in this direction
    array frames   raw        as many, and as long, as message.frame_bytes says

Knows no socket and no peer: it gets and gives lists of buffers, and never copies an array. What a sequence number or
an epoch means is decided by services.runtime.conversation; both ends of every route call this codec and no other.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from common.errors import LocalProtocolError, RemoteProtocolError
from common.limits import BUS_BODY_BYTES_MAX, BUS_FRAMES_MAX
from common.wire.messages import Message
from common.wire.routes import Route

MAGIC = b"OTRG"
BUS_VERSION = 1
HEADER = struct.Struct("<4sHHQQ")
HEADER_BYTES = 24
assert HEADER.size == HEADER_BYTES, "the header is drawn in docs and must not grow by padding"

Side = Literal["asker", "owner"]
Buffer = bytes | bytearray | memoryview


class Envelope(NamedTuple):
    """One message as it came off the wire, lengths checked. `arrays` are views into the received frames."""

    epoch: int
    seq: int
    message: Message
    arrays: tuple[memoryview, ...]


class BusCodec:
    """Encodes what `side` may say on `route` and decodes what the other side may say."""

    def __init__(self, route: Route, side: Side) -> None:
        says, hears = (route.ask, route.answer) if side == "asker" else (route.answer, route.ask)
        self.route = route
        self.side = side
        self._says = says
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(hears)

    def encode(self, message: Message, arrays: Sequence[Any], *, epoch: int, seq: int) -> list[Buffer]:
        """Frames of one message. Arrays are anything with a C-contiguous buffer; they are viewed, not copied.

        Raises LocalProtocolError when this side may not say this message, or an array has not the length it promises.
        """
        if not isinstance(message, self._says):
            raise LocalProtocolError(
                f"{type(message).__name__} is not something the {self.side} of route {self.route.name} may say"
            )
        views = tuple(map(byte_view, arrays))
        _check_lengths(message, views, LocalProtocolError)
        body = self._encoder.encode(message)
        if len(body) > BUS_BODY_BYTES_MAX:
            raise LocalProtocolError(
                f"{type(message).__name__} takes {len(body)} bytes; a message body holds {BUS_BODY_BYTES_MAX}"
            )
        return [HEADER.pack(MAGIC, BUS_VERSION, self.route.id, epoch, seq), body, *views]

    def decode(self, frames: Sequence[Any]) -> Envelope:
        """The message in `frames`. Raises RemoteProtocolError for anything this route does not allow."""
        if not 2 <= len(frames) <= 2 + BUS_FRAMES_MAX:
            raise RemoteProtocolError(f"{len(frames)} frames; a message has 2 to {2 + BUS_FRAMES_MAX}")
        views = tuple(map(byte_view, frames))
        epoch, seq = self._read_header(views[0])
        if views[1].nbytes > BUS_BODY_BYTES_MAX:
            raise RemoteProtocolError(f"a body of {views[1].nbytes} bytes; at most {BUS_BODY_BYTES_MAX}")
        try:
            message = self._decoder.decode(views[1])
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise RemoteProtocolError(f"not a message of route {self.route.name}: {error}") from error
        _check_lengths(message, views[2:], RemoteProtocolError)
        return Envelope(epoch, seq, message, views[2:])

    def _read_header(self, header: memoryview) -> tuple[int, int]:
        if header.nbytes != HEADER_BYTES:
            raise RemoteProtocolError(f"a header of {header.nbytes} bytes; it has {HEADER_BYTES}")
        magic, version, route_id, epoch, seq = HEADER.unpack(header)
        if magic != MAGIC:
            raise RemoteProtocolError(f"magic {magic!r}; expected {MAGIC!r}")
        if version != BUS_VERSION:
            raise RemoteProtocolError(
                f"bus version {version}; this process speaks {BUS_VERSION}: run one version of outrigger everywhere"
            )
        if route_id != self.route.id:
            raise RemoteProtocolError(
                f"route id {route_id}; this is route {self.route.name} ({self.route.id})"
            )
        return epoch, seq


def byte_view(array: Any) -> memoryview:
    """`array` as a flat view of bytes, without copying. Raises LocalProtocolError when it is not C-contiguous."""
    view = memoryview(array)
    if view.format == "B" and view.ndim == 1 and view.c_contiguous:
        return view
    if not view.c_contiguous:
        raise LocalProtocolError(f"an array of strides {view.strides} cannot be sent without a copy")
    # A view with a zero in its shape cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")


def _check_lengths(message: Message, views: Sequence[memoryview], error: type[Exception]) -> None:
    """Compare the array frames with what the message says of them, before anybody looks inside."""
    expected = message.frame_bytes
    found = tuple(map(len, views))
    if found != expected:
        raise error(f"{type(message).__name__} says its arrays have {expected} bytes; found {found}")
