"""The format of a Core ML weight file: header, metadata, element types, packed small integers, offsets.

MIL blob storage, version 2, little-endian (apple/coremltools, mlmodel/src/MILBlob/Blob/StorageFormat.hpp):

    0     header     u32 count, u32 version = 2, 56 reserved bytes
    64    metadata   u32 0xDEADBEEF, u32 type, u64 bytes, u64 data offset, u64 padding bits, 32 reserved bytes
    128   data       then zeros up to the next multiple of 64, the next metadata, ...; nothing after the last blob

A program names a blob by the offset of its *metadata*. The format has no checksums.
Opens no file; `blob` does. Needs NumPy alone.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.errors import BlobError

HEADER = struct.Struct("<II56x")
METADATA = struct.Struct("<IIQQQ32x")
SENTINEL = 0xDEADBEEF
VERSION = 2
ALIGN_BYTES = 64
BLOB_COUNT_MAX = 1 << 16
FILE_BYTES_MAX = 1 << 36
"""64 GiB: far above what any device loads (1 GB on iOS), low enough to refuse nonsense before it is added up."""
assert HEADER.size == METADATA.size == ALIGN_BYTES, "header and metadata are one alignment unit each"


class BlobType(enum.Enum):
    """Element type: (code in the file, bits an element, NumPy dtype of whole-byte types)."""

    FLOAT16 = (1, 16, "<f2")
    FLOAT32 = (2, 32, "<f4")
    UINT8 = (3, 8, "u1")
    INT8 = (4, 8, "i1")
    BFLOAT16 = (5, 16, None)
    INT16 = (6, 16, "<i2")
    UINT16 = (7, 16, "<u2")
    INT4 = (8, 4, None)
    UINT1 = (9, 1, None)
    UINT2 = (10, 2, None)
    UINT4 = (11, 4, None)
    UINT3 = (12, 3, None)
    UINT6 = (13, 6, None)
    INT32 = (14, 32, "<i4")
    UINT32 = (15, 32, "<u4")

    def __init__(self, code: int, bits: int, dtype: str | None) -> None:
        self.code = code
        self.bits = bits
        self.dtype = None if dtype is None else np.dtype(dtype)


_TYPE_BY_CODE = {t.code: t for t in BlobType}
_TYPE_BY_DTYPE = {t.dtype: t for t in BlobType if t.dtype is not None}


@dataclass(frozen=True)
class BlobEntry:
    """One blob of a weight file. `offset` (of its metadata) is what a program stores."""

    index: int
    offset: int
    type: BlobType
    data_offset: int
    n_bytes: int
    padding_bits: int

    @property
    def n_elements(self) -> int:
        return (8 * self.n_bytes - self.padding_bits) // self.type.bits


@dataclass(frozen=True)
class Blob:
    """Raw data on its way into a weight file."""

    type: BlobType
    data: memoryview
    padding_bits: int = 0

    @classmethod
    def of(cls, array: np.ndarray) -> Blob:
        """A blob over a C-contiguous array of a whole-byte type, without copying it."""
        blob_type = _TYPE_BY_DTYPE.get(array.dtype)
        if blob_type is None:
            raise BlobError(
                f"arrays of {array.dtype} have no blob type; use one of {_names(_TYPE_BY_DTYPE.values())}"
            )
        if not array.flags.c_contiguous:
            raise BlobError(f"the array of shape {array.shape} is not C-contiguous; copy it first")
        return cls(blob_type, memoryview(array.reshape(-1).view(np.uint8)))

    @classmethod
    def packed(cls, values: np.ndarray, blob_type: BlobType) -> Blob:
        """Pack small integers [any shape] into 1-, 2-, 3-, 4- or 6-bit elements, lowest bits first."""
        data = pack_bits(values, blob_type.bits)
        return cls(blob_type, memoryview(data), 8 * data.size - values.size * blob_type.bits)


def pack_bits(values: np.ndarray, bits: int) -> np.ndarray:
    """Pack integers 0 <= v < 2**bits into u8 [ceil(n * bits / 8)], element 0 in the lowest bits."""
    flat = np.asarray(values).reshape(-1)
    if flat.size and (flat.min() < 0 or flat.max() >= 1 << bits):
        raise BlobError(f"values {flat.min()}..{flat.max()} do not fit {bits} bits (0..{(1 << bits) - 1})")
    shifts = np.arange(bits, dtype=np.uint8)
    planes = (flat.astype(np.uint8)[:, None] >> shifts) & 1
    return np.packbits(planes.reshape(-1), bitorder="little")


def unpack_bits(data: np.ndarray, bits: int, n_elements: int) -> np.ndarray:
    """The inverse of `pack_bits`: u8 [n_elements]."""
    if data.size * 8 < n_elements * bits:
        raise BlobError(
            f"{n_elements} elements of {bits} bits need {-(-n_elements * bits // 8)} bytes, got {data.size}"
        )
    planes = np.unpackbits(data, count=n_elements * bits, bitorder="little").reshape(n_elements, bits)
    return (planes << np.arange(bits, dtype=np.uint8)).sum(axis=1, dtype=np.uint8)


def sign_extend_4(values: np.ndarray) -> np.ndarray:
    """Unpacked 4-bit two's complement as i8: 0..15 becomes 0..7, -8..-1."""
    return (values ^ 8).astype(np.int8) - np.int8(8)


def parse_entry(raw: bytes, index: int, offset: int, where: str) -> BlobEntry:
    """Metadata of one blob, checked by itself; the caller compares it with the size of the file."""
    sentinel, code, n_bytes, data_offset, padding_bits = METADATA.unpack(raw)
    if sentinel != SENTINEL:
        raise BlobError(f"{where} at byte {offset}: sentinel is {sentinel:#x}, not {SENTINEL:#x}")
    blob_type = _TYPE_BY_CODE.get(code)
    if blob_type is None:
        raise BlobError(f"{where}: element type {code} is unknown; supported: {_names(BlobType)}")
    if data_offset != offset + METADATA.size:
        raise BlobError(f"{where}: data at byte {data_offset}, expected {offset + METADATA.size}")
    if n_bytes > FILE_BYTES_MAX or padding_bits > 7 or (8 * n_bytes - padding_bits) % blob_type.bits:
        raise BlobError(
            f"{where}: {n_bytes} bytes less {padding_bits} bits are no whole number of {blob_type.name}"
        )
    return BlobEntry(index, offset, blob_type, data_offset, n_bytes, padding_bits)


def decode(raw: np.ndarray, entry: BlobEntry) -> np.ndarray:
    """The elements of raw bytes u8 [n_bytes]; sub-byte types unpacked to u8 (int4 to i8), bfloat16 widened to f32."""
    if entry.type.dtype is not None:
        return raw.view(entry.type.dtype)
    if entry.type is BlobType.BFLOAT16:
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    values = unpack_bits(raw, entry.type.bits, entry.n_elements)
    return sign_extend_4(values) if entry.type is BlobType.INT4 else values


def layout(sizes: Sequence[int]) -> list[int]:
    """Metadata offsets of blobs of these byte counts, in order: what `write` uses and programs must name."""
    offsets, offset = [], HEADER.size
    for n_bytes in sizes:
        offsets.append(offset)
        offset = aligned(offset + METADATA.size + n_bytes)
    return offsets


def aligned(n_bytes: int) -> int:
    """Round up to where the next metadata may begin."""
    return -(-n_bytes // ALIGN_BYTES) * ALIGN_BYTES


def _names(types: Any) -> str:
    return ", ".join(t.name.lower() for t in types)
