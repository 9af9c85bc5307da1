"""The weight file of a Core ML package (weights/weight.bin): read, verify, patch, write.

MIL blob storage, version 2, little-endian (apple/coremltools, mlmodel/src/MILBlob/Blob/StorageFormat.hpp):

    0     header     u32 count, u32 version = 2, 56 reserved bytes
    64    metadata   u32 0xDEADBEEF, u32 type, u64 bytes, u64 data offset, u64 padding bits, 32 reserved bytes
    128   data       then zeros up to the next multiple of 64, the next metadata, ...; nothing after the last blob

A program names a blob by the offset of its *metadata*. The format has no checksums, so a damaged file is found only by
its structure: every size and offset is compared with the file before anything is read.

This file knows no protobuf and no Core ML; it needs NumPy alone. Called by the interpreter and the page writer.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import mmap
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
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
WRITEV_BUFFERS_MAX = 512
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


def read_entries(path: Path | str) -> tuple[BlobEntry, ...]:
    """Every blob of a weight file, after checking header, metadata, bounds, alignment and that nothing follows.

    Raises:
        BlobError: naming the file, the blob and what is wrong with it.
    """
    try:
        with open(path, "rb") as file:
            return tuple(_walk(file, os.fstat(file.fileno()).st_size, Path(path)))
    except OSError as error:
        raise BlobError(f"{path}: cannot be read: {error.strerror}") from error


def _walk(file: Any, file_bytes: int, path: Path) -> Iterator[BlobEntry]:
    if not HEADER.size <= file_bytes <= FILE_BYTES_MAX:
        raise BlobError(f"{path}: {file_bytes} bytes; a weight file has {HEADER.size} to {FILE_BYTES_MAX}")
    count, version = HEADER.unpack(file.read(HEADER.size))
    if version != VERSION:
        raise BlobError(f"{path}: blob storage version {version}; only version {VERSION} is understood")
    if count > BLOB_COUNT_MAX:
        raise BlobError(f"{path}: claims {count} blobs; at most {BLOB_COUNT_MAX} are accepted")
    offset = end = HEADER.size
    for index in range(count):
        if offset + METADATA.size > file_bytes:
            raise BlobError(
                f"{path}: truncated: metadata of blob {index} of {count} at byte {offset}, file ends at {file_bytes}"
            )
        file.seek(offset)
        entry = _entry(file.read(METADATA.size), index, offset, f"{path}: blob {index}")
        end = entry.data_offset + entry.n_bytes
        if end > file_bytes:
            raise BlobError(
                f"{path}: truncated: blob {index} needs bytes up to {end}, file ends at {file_bytes}"
            )
        yield entry
        offset = _aligned(end)
    if file_bytes not in (end, _aligned(end)):
        raise BlobError(
            f"{path}: {file_bytes - end} bytes follow the last of {count} blobs; the file was not written whole"
        )


def _entry(raw: bytes, index: int, offset: int, where: str) -> BlobEntry:
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


def verify(path: Path | str) -> tuple[BlobEntry, ...]:
    """`read_entries`, and that every padding byte between blobs is zero (a torn write leaves old bytes there)."""
    entries = read_entries(path)
    with open(path, "rb") as file:
        for entry, following in itertools.pairwise(entries):
            end = entry.data_offset + entry.n_bytes
            file.seek(end)
            if any(file.read(following.offset - end)):
                raise BlobError(
                    f"{path}: bytes after blob {entry.index} (at {end}) are not zero; the file was torn or shifted"
                )
    return entries


class WeightFile:
    """A weight file opened for reading; arrays are read-only views of the mapped file. Close it, or use `with`."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.entries = {entry.offset: entry for entry in read_entries(path)}
        with open(path, "rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def entry(self, offset: int) -> BlobEntry:
        try:
            return self.entries[offset]
        except KeyError:
            raise BlobError(f"{self.path}: no blob has its metadata at byte {offset}") from None

    def array(self, offset: int, shape: Sequence[int] | None = None) -> np.ndarray:
        """The elements of one blob; sub-byte types unpacked to u8 (int4 to i8), bfloat16 widened to f32."""
        entry = self.entry(offset)
        n_elements = entry.n_elements if shape is None else int(np.prod(shape, dtype=np.int64))
        if n_elements != entry.n_elements:
            need = f"shape {shape} needs {n_elements}"
            raise BlobError(f"{self.path}: blob at {offset} holds {entry.n_elements} elements, {need}")
        raw = np.frombuffer(self._map, np.uint8, entry.n_bytes, entry.data_offset)
        values = _decode(raw, entry)
        return values if shape is None else values.reshape(tuple(shape))

    def close(self) -> None:
        """Unmap the file; where arrays still look into it, the last of them unmaps it."""
        with contextlib.suppress(BufferError):
            self._map.close()

    def __enter__(self) -> WeightFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _decode(raw: np.ndarray, entry: BlobEntry) -> np.ndarray:
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
        offset = _aligned(offset + METADATA.size + n_bytes)
    return offsets


def write(path: Path | str, blobs: Sequence[Blob], *, reuse: bool = False) -> list[int]:
    """Write a whole weight file with as few copies as the kernel allows; returns the metadata offsets.

    With `reuse` an existing file of the same size is overwritten where it lies, which spares the kernel finding fresh
    pages and blocks (three times as fast); the bytes are the same. Raises BlobError before anything is written where a
    bound is passed, OSError when the disk does not take it (the partial file is removed).
    """
    offsets = layout([len(blob.data) for blob in blobs])
    buffers: list[Any] = [HEADER.pack(len(blobs), VERSION)]
    for blob, offset in zip(blobs, offsets, strict=True):
        n_bytes, data_offset = len(blob.data), offset + METADATA.size
        metadata = METADATA.pack(SENTINEL, blob.type.code, n_bytes, data_offset, blob.padding_bits)
        buffers += [metadata, blob.data, bytes(-n_bytes % ALIGN_BYTES)]
    if blobs:
        buffers.pop()  # nothing follows the last blob
    file_bytes = sum(map(len, buffers))
    if len(blobs) > BLOB_COUNT_MAX or file_bytes > FILE_BYTES_MAX:
        bounds = f"{BLOB_COUNT_MAX} blobs and {FILE_BYTES_MAX} bytes"
        raise BlobError(f"{path}: {len(blobs)} blobs of {file_bytes} bytes pass the bounds ({bounds})")
    fd = _open_for_writing(path, file_bytes, reuse)
    try:
        _write_all(fd, buffers)
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(fd)
    return offsets


def _open_for_writing(path: Path | str, file_bytes: int, reuse: bool) -> int:
    if reuse and os.path.exists(path) and os.path.getsize(path) == file_bytes:
        return os.open(path, os.O_WRONLY)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        if hasattr(
            os, "posix_fallocate"
        ):  # not on macOS. Faster, and a full disk is told before the first byte
            os.posix_fallocate(fd, 0, file_bytes)
    except OSError:
        os.close(fd)
        os.unlink(path)
        raise
    return fd


def patch(path: Path | str, blobs: Mapping[int, Blob]) -> None:
    """Overwrite blobs of an existing file in place, by metadata offset. All are checked before the first is written."""
    entries = {entry.offset: entry for entry in read_entries(path)}
    for offset, blob in blobs.items():
        entry = entries.get(offset)
        if entry is None:
            raise BlobError(f"{path}: no blob has its metadata at byte {offset}")
        if (entry.type, entry.n_bytes, entry.padding_bits) != (blob.type, len(blob.data), blob.padding_bits):
            raise BlobError(
                f"{path}: blob {entry.index} is {entry.type.name} of {entry.n_bytes} bytes, "
                f"the patch is {blob.type.name} of {len(blob.data)}"
            )
    with open(path, "r+b", buffering=0) as file:
        for offset, blob in blobs.items():
            file.seek(entries[offset].data_offset)
            _write_all(file.fileno(), [blob.data])


def _write_all(fd: int, buffers: Sequence[Any]) -> None:
    """writev until everything is written: one call takes a bounded number of buffers and may write a part."""
    pending = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
    while pending:
        written = os.writev(fd, pending[:WRITEV_BUFFERS_MAX])
        taken = 0
        while taken < len(pending) and written >= len(pending[taken]):
            written -= len(pending[taken])
            taken += 1
        del pending[:taken]
        if written:
            pending[0] = pending[0][written:]


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // ALIGN_BYTES) * ALIGN_BYTES


def _names(types: Any) -> str:
    return ", ".join(t.name.lower() for t in types)
