"""Packed little-endian records written as one line of text, and payloads that travel in pieces.

A `Layout` is built from the same line that docs/protocol.md prints ("u32 proto, i32 taps[4], char desc[128]"), so that
document, codec and contract test speak one grammar. A `Payload` is the long part of a frame: some buffers that are
sent, hashed and compared one after the other and never joined on the way. Knows nothing of frames or sockets; the
codec in `common.wire.frames` is its only caller of weight.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Buffer

SCALARS = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q", "i32": "i", "f32": "f"}
_FIELD = re.compile(r"^(char|u8|u16|u32|u64|i32|f32) ([a-z_][a-z0-9_]*)(?:\[(\d+)\])?$")


class FieldError(ValueError):
    """A value does not fit its field; the codec turns it into a ProtocolError that says whose fault it is."""


@dataclass(frozen=True)
class Field:
    """One field of a layout: `kind` is a key of SCALARS or "char"; `count` is None for a plain scalar."""

    kind: str
    name: str
    count: int | None

    @property
    def code(self) -> str:
        """The field's piece of a struct format."""
        if self.kind == "char" or (self.kind == "u8" and self.count is not None):
            return f"{self.count}s"
        return f"{self.count or ''}{SCALARS[self.kind]}"

    def __str__(self) -> str:
        return f"{self.kind} {self.name}" + (f"[{self.count}]" if self.count is not None else "")


class Layout:
    """A packed record. `size` is in bytes; `pack` and `unpack` take and give one value per field, in order.

    char[n] is text (UTF-8, zero-padded), u8[n] is bytes of exactly n, other arrays are tuples.
    """

    def __init__(self, line: str) -> None:
        self.line = line
        self.fields = tuple(_parse_field(piece) for piece in line.split(", ")) if line else ()
        self._struct = struct.Struct("<" + "".join(field.code for field in self.fields))
        self.size = self._struct.size
        self._plain = all(field.count is None for field in self.fields)

    def pack(self, values: Iterable[Any]) -> bytes:
        """Raises FieldError when a value is out of its field's range."""
        if self._plain:
            try:
                return self._struct.pack(*values)
            except struct.error as error:
                raise self._misfit(error) from None
        flat: list[Any] = []
        for field, value in zip(self.fields, values, strict=True):
            if field.kind == "char":
                flat.append(_pack_text(field, value))
            elif field.code.endswith("s"):
                flat.append(_pack_bytes(field, value))
            elif field.count is not None:
                flat.extend(value)
            else:
                flat.append(value)
        try:
            return self._struct.pack(*flat)
        except struct.error as error:
            raise self._misfit(error) from None

    def _misfit(self, error: struct.error) -> FieldError:
        return FieldError(f"{error} in ({self.line})")

    def unpack(self, view: memoryview) -> list[Any]:
        """Reads the first `size` bytes of `view`, which must be that long."""
        if self._plain:
            return list(self._struct.unpack_from(view))
        flat: Iterator[Any] = iter(self._struct.unpack_from(view))
        values: list[Any] = []
        for field in self.fields:
            if field.kind == "char":
                values.append(_unpack_text(field, next(flat)))
            elif field.count is not None and not field.code.endswith("s"):
                values.append(tuple(next(flat) for _ in range(field.count)))
            else:
                values.append(next(flat))
        return values


def _parse_field(piece: str) -> Field:
    match = _FIELD.match(piece)
    if match is None or (match[1] == "char" and match[3] is None):
        raise ValueError(f"not a field of a layout: {piece!r}")
    return Field(match[1], match[2], int(match[3]) if match[3] else None)


def _pack_text(field: Field, text: str) -> bytes:
    data = text.encode()
    if len(data) > (field.count or 0) or b"\0" in data:
        raise FieldError(
            f"{field.name} is {len(data)} bytes of text, at most {field.count} without zero bytes"
        )
    return data


def _pack_bytes(field: Field, data: bytes) -> bytes:
    if len(data) != field.count:
        raise FieldError(f"{field.name} has {len(data)} bytes, not {field.count}")
    return data


def _unpack_text(field: Field, data: bytes) -> str:
    try:
        return data.split(b"\0", 1)[0].decode()
    except UnicodeDecodeError:
        raise FieldError(f"{field.name} is not UTF-8") from None


class Payload:
    """Bytes in one or more pieces; equal to another payload with the same bytes, however either is cut."""

    __slots__ = ("n_bytes", "parts")

    def __init__(self, *buffers: Buffer) -> None:
        """Takes anything with a C-contiguous buffer (bytes, memoryview, ndarray of any shape). Copies nothing."""
        self.parts: tuple[memoryview, ...] = ()
        self.n_bytes = 0
        for buffer in buffers:
            view = memoryview(buffer)
            if view.nbytes:
                self.parts += (view.cast("B"),)
                self.n_bytes += view.nbytes

    def joined(self) -> memoryview:
        """One view of everything. Free when there is one piece, as in every received frame; else it copies."""
        if len(self.parts) == 1:
            return self.parts[0]
        return memoryview(b"".join(self.parts))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Payload):
            return NotImplemented
        return self.n_bytes == other.n_bytes and self.joined() == other.joined()

    def __hash__(self) -> int:
        return hash(self.n_bytes)

    def __repr__(self) -> str:
        return f"Payload({self.n_bytes} bytes in {len(self.parts)})"


EMPTY = Payload()
