"""The ROWS blob: rows of K and V, and recurrent states, of some layers, in a form that needs no knowledge of ggml.

    u32 'ROWS', u32 n_sections, then per section:
    u32 layer, u32 kind, u32 ggml_type, i32 p0, i32 p1, u32 row_bytes, then the rows

Layers are global, positions absolute. Rows of K and V are token-major, heads side by side, for positions [p0, p1).
A state (kinds 2 and 3) is one row; p0 = p1 = the number of tokens it has seen. Neither direction copies a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.errors import LocalProtocolError, RemoteProtocolError
from common.limits import FRAME_BYTES_MAX, N_CTX_MAX, N_LAYER_MAX, ROW_SECTIONS_MAX
from common.wire.layout import FieldError, Layout, Payload

if TYPE_CHECKING:
    from typing_extensions import Buffer

KIND_K, KIND_V, KIND_CONV, KIND_RECURRENT = range(4)
KIND_NAMES = ("K", "V", "conv", "recurrent")
GGML_TYPE_MAX = 63

ROWS_MAGIC = 0x53574F52
ROWS_HEAD = Layout("u32 magic, u32 n_sections")
ROWS_SECTION = Layout("u32 layer, u32 kind, u32 ggml_type, i32 p0, i32 p1, u32 row_bytes")

assert ROWS_HEAD.size == 8
assert ROWS_SECTION.size == 24
assert ROWS_MAGIC.to_bytes(4, "little") == b"ROWS"


@dataclass(frozen=True)
class RowSection:
    """Rows of one layer and kind. `data` is a C-contiguous buffer of exactly n_rows * row_bytes bytes."""

    layer: int
    kind: int
    ggml_type: int
    p0: int
    p1: int
    row_bytes: int
    data: Buffer

    @property
    def n_rows(self) -> int:
        return self.p1 - self.p0 if self.kind in (KIND_K, KIND_V) else 1

    @property
    def n_bytes(self) -> int:
        return self.n_rows * self.row_bytes

    def __str__(self) -> str:
        kind = KIND_NAMES[self.kind] if self.kind < len(KIND_NAMES) else self.kind
        return f"layer {self.layer} {kind} [{self.p0}, {self.p1}) of {self.row_bytes} bytes a row"


def _check(section: RowSection) -> None:
    """Raise FieldError unless every number is within its bound."""
    state = section.kind in (KIND_CONV, KIND_RECURRENT)
    if section.layer >= N_LAYER_MAX or section.kind > KIND_RECURRENT or section.ggml_type > GGML_TYPE_MAX:
        raise FieldError(
            f"layer {section.layer}, kind {section.kind}, type {section.ggml_type} is out of bounds"
        )
    if not 0 <= section.p0 <= section.p1 <= N_CTX_MAX or (state and section.p0 != section.p1):
        raise FieldError(f"positions [{section.p0}, {section.p1}) of kind {section.kind}")
    if section.n_bytes > FRAME_BYTES_MAX:
        raise FieldError(f"{section.n_bytes} bytes in one section, at most {FRAME_BYTES_MAX}")


def encode_rows(sections: Sequence[RowSection]) -> Payload:
    """The blob as a payload of pieces: small headers between the sections' own buffers. Raises LocalProtocolError."""
    if len(sections) > ROW_SECTIONS_MAX:
        raise LocalProtocolError(f"{len(sections)} sections, at most {ROW_SECTIONS_MAX}")
    pieces: list[Buffer] = [ROWS_HEAD.pack((ROWS_MAGIC, len(sections)))]
    for section in sections:
        try:
            _check(section)
            head = ROWS_SECTION.pack(
                (section.layer, section.kind, section.ggml_type, section.p0, section.p1, section.row_bytes)
            )
        except FieldError as error:
            raise LocalProtocolError(f"ROWS: {error}") from None
        if memoryview(section.data).nbytes != section.n_bytes:
            raise LocalProtocolError(f"ROWS: {memoryview(section.data).nbytes} bytes for {section}")
        pieces += [head, section.data]
    return Payload(*pieces)


def decode_rows(blob: Buffer) -> list[RowSection]:
    """The sections of a blob; their data are views of it. Raises RemoteProtocolError unless it ends where it says."""
    view = memoryview(blob).cast("B")
    if len(view) < ROWS_HEAD.size:
        raise RemoteProtocolError(f"ROWS blob of {len(view)} bytes")
    magic, n_sections = ROWS_HEAD.unpack(view)
    if magic != ROWS_MAGIC or n_sections > ROW_SECTIONS_MAX:
        raise RemoteProtocolError(
            f"ROWS blob begins {magic:#010x}, {n_sections} sections (at most {ROW_SECTIONS_MAX})"
        )
    sections: list[RowSection] = []
    at = ROWS_HEAD.size
    for _ in range(n_sections):
        if len(view) - at < ROWS_SECTION.size:
            raise RemoteProtocolError(f"ROWS blob ends in section {len(sections)} of {n_sections}")
        numbers = ROWS_SECTION.unpack(view[at:])
        at += ROWS_SECTION.size
        section = RowSection(*numbers, data=b"")  # type: ignore[misc]
        try:
            _check(section)
        except FieldError as error:
            raise RemoteProtocolError(f"ROWS: {error}") from None
        if section.n_bytes > len(view) - at:
            raise RemoteProtocolError(
                f"ROWS blob ends {section.n_bytes - len(view) + at} bytes early in {section}"
            )
        sections.append(RowSection(*numbers, data=view[at : at + section.n_bytes]))  # type: ignore[misc]
        at += section.n_bytes
    if at != len(view):
        raise RemoteProtocolError(f"ROWS blob has {len(view) - at} bytes after its last section")
    return sections
