"""The frame: 16 bytes of header, then a payload. Channels, the class every frame derives from, encode and decode.

docs/protocol.md draws what is written here and tests/contract/test_protocol.py compares the two. The frames of the
residual channel are in `base_frames` (what the published app speaks) and `extension_frames` (ours), those of the
attention channel in `attention_base_frames` and `attention_extension_frames`; this file does not know them. Who may say
what when is `link`'s business; cutting a byte stream into frames is `stream`'s.

A decoder trusts nothing: sizes, counts and types are compared with their bounds before anything is built, and every
complaint is a RemoteProtocolError of bounded length.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, TypeVar

import xxhash

from common.errors import LocalProtocolError, RemoteProtocolError
from common.limits import FRAME_BYTES_MAX
from common.wire.layout import EMPTY, FieldError, Layout, Payload

HEADER = Layout("u32 magic, u32 type, u64 payload_bytes")
EXT_HDR = Layout("u64 epoch, u64 seq, u64 xxh3")
EXTENSION_TYPE_MIN = 64
"""Frame types from here on begin with EXT_HDR."""

STAMPED_HEADER = Layout(f"{HEADER.line}, {EXT_HDR.line}")
"""Both, as an extension frame begins."""
_HASHED_FIRST = struct.Struct("<IQQ")

assert HEADER.size == 16
assert EXT_HDR.size == 24


class Stamp(NamedTuple):
    """What EXT_HDR carries: the life of the link, the sender's count of frames (from 1), the hash of all of it."""

    epoch: int
    seq: int
    xxh3: int


@dataclass(frozen=True)
class Frame:
    """One message of a channel. Fields are the layout's, in order; a field after them takes the rest of the payload.

    `rest` says what that field is: "" none, "text" (UTF-8 str) or "payload" (Payload).
    """

    TYPE: ClassVar[int]
    NAME: ClassVar[str]
    LAYOUT: ClassVar[Layout]
    REST: ClassVar[str]
    BYTES_MAX: ClassVar[int]
    FIELD_NAMES: ClassVar[tuple[str, ...]]
    values_of: ClassVar[Callable[[Any], tuple[Any, ...]]]
    """The values of a message of this class, in the order of FIELD_NAMES"""
    stamped: ClassVar[bool]
    """Whether it is an extension's, and begins with EXT_HDR"""

    def check(self) -> None:
        """Raise FieldError when values that fit their fields make no sense together."""


@dataclass(frozen=True, eq=False)
class Channel:
    """One binary TCP connection of the cable. `frames` maps a type number to its classes (two: told apart by size),
    `longest` to the bytes of its longest payload."""

    name: str
    magic: int
    port: int
    types: dict[str, int]
    frames: dict[int, list[type[Frame]]] = field(default_factory=dict)
    longest: dict[int, int] = field(default_factory=dict)

    def bytes_max(self, frame_type: int) -> int:
        """Longest payload of this type; RemoteProtocolError when the type is unknown."""
        longest = self.longest.get(frame_type)
        if longest is None:
            raise self.unknown(frame_type)
        return longest

    def unknown(self, frame_type: int) -> RemoteProtocolError:
        """What is wrong with a type that no frame has."""
        return RemoteProtocolError(f"unknown {self.name} frame type {frame_type}")


def _types(first: int, names: str) -> dict[str, int]:
    return {name: number for number, name in enumerate(names.split(), first)}


RESIDUAL = Channel(
    "residual",
    0x4C545053,
    50060,
    _types(
        1,
        "HELLO HELLO_OK RESET RESET_OK CHUNK CHUNK_ACK STATE STATE_DATA BYE ERR PING PONG TRIM SYNC OK STATE_RANGE",
    )
    | _types(64, "HELLO3 HELLO3_OK CHUNK2 CHUNK2_ACK SYNC2 OK2 STATE_RANGE2 STATE_DATA2 SNAPSHOT TRIM2")
    | {"ERR2": 79},
)
ATTENTION = Channel(
    "attention",
    0x4E544150,
    50062,
    _types(1, "HELLO HELLO_OK CONFIG APPEND TRUNCATE ATTN ATTN_OK STATS OK ERR BYE PING ATTN_BIG FETCH")
    | _types(64, "HELLO3 HELLO3_OK CONFIG2 CONFIG2_OK APPEND2 OK2 ATTN2 ATTN2_OK TRUNCATE2 FETCH2")
    | {"ERR2": 79},
)
CONTROL_PORT = 50061

F = TypeVar("F", bound=type[Frame])


def frame(
    channel: Channel, name: str, line: str, *, size: int, rest: str = "", rest_bytes_max: int | None = None
) -> Callable[[F], F]:
    """Class decorator that enters a frame into its channel. `size` is the layout's, asserted here, at import."""

    def enter(cls: F) -> F:
        cls.NAME, cls.TYPE, cls.LAYOUT, cls.REST = name, channel.types[name], Layout(line), rest
        names = [each.name for each in fields(cls)]
        known = [each.name for each in cls.LAYOUT.fields]
        assert cls.LAYOUT.size == size, f"{name}: the layout has {cls.LAYOUT.size} bytes, not {size}"
        assert names == known + ([names[-1]] if rest else []), (
            f"{name}: fields {names} are not the layout's {known}"
        )
        fixed = size + (EXT_HDR.size if cls.TYPE >= EXTENSION_TYPE_MIN else 0)
        longest = FRAME_BYTES_MAX if rest_bytes_max is None else fixed + rest_bytes_max
        cls.BYTES_MAX = longest if rest else fixed
        cls.FIELD_NAMES = tuple(names)
        cls.stamped = cls.TYPE >= EXTENSION_TYPE_MIN
        cls.values_of = (
            attrgetter(*names) if len(names) > 1 else lambda m: tuple(getattr(m, n) for n in names)
        )
        return _entered(channel, cls)

    return enter


def also(channel: Channel) -> Callable[[F], F]:
    """Class decorator above `frame`: this channel has the same frame under the same name and number."""
    return lambda cls: _entered(channel, cls)


def _entered(channel: Channel, cls: F) -> F:
    assert channel.types[cls.NAME] == cls.TYPE, f"{cls.NAME} has another number on channel {channel.name}"
    channel.frames.setdefault(cls.TYPE, []).append(cls)
    channel.longest[cls.TYPE] = max(cls.BYTES_MAX, channel.longest.get(cls.TYPE, 0))
    return cls


def stamp_hasher(frame_type: int, epoch: int, seq: int) -> xxhash.xxh3_64:
    """Begins the hash of a stamped frame: u32 type, u64 epoch, u64 seq; update it with all that follows EXT_HDR."""
    return xxhash.xxh3_64(_HASHED_FIRST.pack(frame_type, epoch, seq))


def stamp_hash(frame_type: int, epoch: int, seq: int, parts: tuple[memoryview, ...]) -> int:
    """xxh3-64 over u32 type, u64 epoch, u64 seq and then every part, as one stream of bytes."""
    hasher = stamp_hasher(frame_type, epoch, seq)
    for part in parts:
        hasher.update(part)
    return hasher.intdigest()


def encode(channel: Channel, message: Frame, *, epoch: int = 0, seq: int = 0) -> list[memoryview]:
    """Buffers to send, in order: header with all fixed fields first, then the payload's own pieces, uncopied.

    `epoch` and `seq` stamp extension frames and are ignored by base frames. Raises LocalProtocolError.
    """
    cls = type(message)
    values, rest = cls.values_of(message), EMPTY
    try:
        message.check()
        if cls.REST:
            last, values = values[-1], values[:-1]
            rest = last if cls.REST == "payload" else Payload(last.encode())
        body = cls.LAYOUT.pack(values)
    except FieldError as error:
        raise LocalProtocolError(f"{cls.NAME}: {error}") from None
    payload_bytes = len(body) + rest.n_bytes + (EXT_HDR.size if cls.stamped else 0)
    if payload_bytes > cls.BYTES_MAX:
        raise LocalProtocolError(f"{cls.NAME} of {payload_bytes} bytes, at most {cls.BYTES_MAX}")
    if cls.stamped:
        digest = stamp_hash(cls.TYPE, epoch, seq, (memoryview(body), *rest.parts))
        header = STAMPED_HEADER.pack((channel.magic, cls.TYPE, payload_bytes, epoch, seq, digest))
    else:
        header = HEADER.pack((channel.magic, cls.TYPE, payload_bytes))
    return [memoryview(header + body), *rest.parts]


def split_stamp(frame_type: int, payload: memoryview) -> tuple[Stamp | None, memoryview]:
    """The extension header, if this type has one, and the rest. Raises RemoteProtocolError when it is cut short."""
    if frame_type < EXTENSION_TYPE_MIN:
        return None, payload
    if len(payload) < EXT_HDR.size:
        raise RemoteProtocolError(
            f"frame type {frame_type} has {len(payload)} bytes, too short for its header"
        )
    return Stamp(*EXT_HDR.unpack(payload)), payload[EXT_HDR.size :]


def decode(channel: Channel, frame_type: int, body: memoryview) -> Frame:
    """The message in `body` (what follows the extension header, where there is one). Payloads stay views of it.

    Raises RemoteProtocolError. Checks no hash: the link does, before it calls this.
    """
    classes = channel.frames.get(frame_type)
    if classes is None:
        raise channel.unknown(frame_type)
    cls = _class_of_size(classes, len(body))
    if len(body) > cls.BYTES_MAX:
        raise RemoteProtocolError(f"{cls.NAME} of {len(body)} bytes, at most {cls.BYTES_MAX}")
    try:
        values: list[Any] = cls.LAYOUT.unpack(body)
        if cls.REST:
            values.append(_decode_rest(cls, body[cls.LAYOUT.size :]))
        message = cls(*values)
        message.check()
    except FieldError as error:
        raise RemoteProtocolError(f"{cls.NAME}: {error}") from None
    return message


def _class_of_size(classes: list[type[Frame]], n_bytes: int) -> type[Frame]:
    for cls in classes:
        if n_bytes == cls.LAYOUT.size or (cls.REST and n_bytes > cls.LAYOUT.size):
            return cls
    sizes = " or ".join(str(cls.LAYOUT.size) for cls in classes)
    more = " and more" if classes[0].REST else ""
    raise RemoteProtocolError(f"{classes[0].NAME} of {n_bytes} bytes; it has {sizes}{more}")


def _decode_rest(cls: type[Frame], rest: memoryview) -> str | Payload:
    if cls.REST == "payload":
        return Payload(rest)
    return bytes(rest).decode(errors="replace")
