"""One file of the journal: what it holds, how it is read after the life that wrote it, how bytes get in and out.

Used by journal.py alone, which says which files there are.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from common.errors import OutriggerError
from common.wire.held import PageForm, PagePlace
from services.broker import records
from services.broker.chain import Ids, Key
from services.broker.records import BLOCK, Head, RecordError, decode_head

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
PIECE_BYTES = 4 << 20
"""Hashed at once."""


class JournalError(OutriggerError):
    """Something was not kept; nothing of it is in the journal. `cause` is one word."""

    code = 703

    def __init__(self, message: str, cause: str) -> None:
        super().__init__(message)
        self.cause = cause


@dataclass
class File:
    """One file. `n_bytes` is where the next record goes."""

    path: Path
    form: bytes
    n_bytes: int
    last_use: float
    fd: int = -1
    """Open while it takes records."""
    keys: set[tuple[Key, int]] = field(default_factory=set)
    """Contents whose newest copy is here."""
    dirty: bool = False

    @property
    def is_in_its_folder(self) -> bool:
        """False once somebody removed it: what is written to it now, nobody else could read."""
        try:
            mine, there = os.fstat(self.fd), os.stat(self.path)
        except OSError:
            return False
        return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)


@dataclass(frozen=True)
class Kept:
    """Where one content is."""

    file: File
    offset: int
    head: Head

    def place(self) -> PagePlace:
        """As mac and bridge are told."""
        at = self.offset + self.head.image_offset
        return PagePlace(self.head.layer, self.head.page, str(self.file.path), at, self.head.image_xxh3)


def read_file(path: Path) -> tuple[File, list[Kept], list[str]]:
    """A file of an earlier life: itself, its records, and what of it is damaged and not used.

    Records of a page file have one size, so that a damaged head loses one page and not all behind it.
    Raises RecordError or OSError when nothing of the file can be used.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        status = os.fstat(fd)
        head = decode_head(os.pread(fd, BLOCK, 0))
        if head.kind != records.FILE:
            raise RecordError("it does not begin with a file's head")
        try:
            form = msgspec.msgpack.decode(head.text, type=PageForm)
        except msgspec.DecodeError as error:
            raise RecordError(f"its form cannot be read: {error}") from error
        file = File(path, head.form, status.st_size, status.st_mtime)
        return file, *_read_records(fd, file, form)
    finally:
        os.close(fd)


def _read_records(fd: int, file: File, form: PageForm) -> tuple[list[Kept], list[str]]:
    found: list[Kept] = []
    damage: list[str] = []
    stride = BLOCK + records.padded(4 * form.page_tokens) + records.padded(form.image_bytes)
    offset = BLOCK
    while offset < file.n_bytes:
        try:
            head = decode_head(os.pread(fd, BLOCK, offset))
            if head.form != file.form or head.kind not in (records.PAGE, records.STATE, records.VOID):
                raise RecordError("a record is of another form than its file")
            if offset + head.record_bytes > file.n_bytes:
                raise RecordError("the last record was not written to its end")
            found.append(Kept(file, offset, head))
            offset += head.record_bytes
        except RecordError as error:
            damage.append(f"at {offset}: {error}")
            offset += stride
    return found, damage


def bytes_of(ids: Ids) -> bytes:
    """Token ids as they lie in a record."""
    return np.ascontiguousarray(ids, dtype="<i4").tobytes()


def write(fd: int, data: bytes | memoryview, offset: int) -> None:
    """All of it: one call may write less."""
    view = memoryview(data).cast("B")
    while view.nbytes:
        n = os.pwrite(fd, view, offset)
        view, offset = view[n:], offset + n


def hash_of(path: Path, offset: int, n_bytes: int) -> int:
    """xxh3-64 of a piece of a file; -1 when the file ends before. Raises OSError."""
    hasher, left = xxhash.xxh3_64(), n_bytes
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        while left and (piece := file.read(min(left, PIECE_BYTES))):
            hasher.update(piece)
            left -= len(piece)
    return hasher.intdigest() if not left else -1


def reason_of(error: OSError, path: Path) -> JournalError:
    """The system's error, for people."""
    if error.errno in FULL_DISK:
        return JournalError(
            f"no room on the disk of {path.parent}: {error.strerror}; free some, or choose another folder "
            f"(OUTRIGGER_JOURNAL_DIR)",
            "disk_full",
        )
    return JournalError(f"cannot write {path}: {error.strerror}", "io")
