"""The weight file of a Core ML package (weights/weight.bin): read, verify, patch, write.

The format (see `blob_format`) has no checksums, so a damaged file is found only by its structure: every size and offset
is compared with the file before anything is read.
Knows no protobuf and no Core ML; needs NumPy alone. Called by the interpreter and the page writer.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import BlobError
from device.coreml.blob_format import (
    ALIGN_BYTES,
    BLOB_COUNT_MAX,
    FILE_BYTES_MAX,
    HEADER,
    METADATA,
    SENTINEL,
    VERSION,
    Blob,
    BlobEntry,
    BlobType,
    aligned,
    decode,
    layout,
    parse_entry,
)

__all__ = [
    "Blob",
    "BlobEntry",
    "BlobType",
    "WeightFile",
    "layout",
    "patch",
    "read_entries",
    "verify",
    "write",
]

WRITEV_BUFFERS_MAX = 512


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
        entry = parse_entry(file.read(METADATA.size), index, offset, f"{path}: blob {index}")
        end = entry.data_offset + entry.n_bytes
        if end > file_bytes:
            raise BlobError(
                f"{path}: truncated: blob {index} needs bytes up to {end}, file ends at {file_bytes}"
            )
        yield entry
        offset = aligned(end)
    if file_bytes not in (end, aligned(end)):
        raise BlobError(
            f"{path}: {file_bytes - end} bytes follow the last of {count} blobs; the file was not written whole"
        )


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
        values = decode(raw, entry)
        return values if shape is None else values.reshape(tuple(shape))

    def close(self) -> None:
        """Unmap the file; where arrays still look into it, the last of them unmaps it."""
        with contextlib.suppress(BufferError):
            self._map.close()

    def __enter__(self) -> WeightFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
