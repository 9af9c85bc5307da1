"""PageReader: the thread that reads pages from the journal's files ahead of the cable, and hashes them while warm.

The page pump never waits for a disk: a query is not held up by one, and the next piece is read while this one is on its
way. Pages are read in the order in which they were asked for, in ordinary reads one after the other, because the
system's own reading ahead is then at its best. Files are read, not mapped: one that shrinks under a mapping would kill
the process. What is read ahead is bounded by the buffers there are. Knows no frames; used by page_pieces.
"""

from __future__ import annotations

import os
import stat
import threading
from contextlib import suppress
from queue import SimpleQueue
from typing import Protocol

import numpy as np
import xxhash

from common.errors import HashMismatchError, OutriggerError, ServiceError
from common.limits import APPEND_PIECE_BYTES
from common.wire import held as h

BUFFERS = 8
"""Pieces that are read and not answered: two are on the cable, the others make up for a disk that hesitates."""
ALIGNMENT = 4096
"""Pages lie at multiples of this in the journal."""


class Reading(Protocol):
    """A page that somebody wants read."""

    place: h.PagePlace
    form: h.PageForm

    @property
    def closed(self) -> bool:
        """Whether nobody wants it any more."""

    def read(self, piece: memoryview, buffer: np.ndarray) -> bool:
        """On the reader's thread: take the next piece, which lies in `buffer`; False: not wanted."""

    def failed(self, error: OutriggerError) -> None:
        """On the reader's thread: there are no more pieces."""


class PageReader:
    """`ask` and `give_back` may be called by any thread. The thread begins with the first page."""

    def __init__(self) -> None:
        self._asked: SimpleQueue[Reading | None] = SimpleQueue()
        self._free: SimpleQueue[np.ndarray] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._file = _File()

    def ask(self, reading: Reading) -> None:
        """Have a page read, after those that were asked for before."""
        if self._thread is None:
            for _ in range(BUFFERS):
                self._free.put(np.zeros(APPEND_PIECE_BYTES, np.uint8))
            self._thread = threading.Thread(target=self._run, name="page reader", daemon=True)
            self._thread.start()
        self._asked.put(reading)

    def give_back(self, buffer: np.ndarray) -> None:
        """The piece in it was answered, or will not leave any more."""
        self._free.put(buffer)

    def stop(self) -> None:
        """End the thread once it has done what was asked before. Close every page first."""
        self._asked.put(None)

    def _run(self) -> None:
        while (reading := self._asked.get()) is not None:
            if reading.closed:
                continue
            try:
                self._read(reading)
            except OutriggerError as error:
                self._file.close()
                reading.failed(error)
            except OSError as error:
                self._file.close()
                reading.failed(ServiceError(f"cannot read {reading.place.path}: {error.strerror or error}"))
        self._file.close()

    def _read(self, reading: Reading) -> None:
        """All pieces of a page; the last one only if the whole has its hash. Raises OutriggerError, OSError."""
        place, n_bytes = reading.place, reading.form.image_bytes
        fd, hasher = self._file.open(place, reading.form), xxhash.xxh3_64()
        for offset in range(0, n_bytes, APPEND_PIECE_BYTES):
            buffer = self._free.get()
            if reading.closed:
                self._free.put(buffer)
                return
            piece = memoryview(buffer)[: min(APPEND_PIECE_BYTES, n_bytes - offset)]
            try:
                read_whole(fd, piece, place.offset + offset, place.path)
                hasher.update(piece)
                if offset + len(piece) == n_bytes and hasher.intdigest() != place.xxh3:
                    raise HashMismatchError(
                        f"page {place.page} of layer {place.layer} at {place.offset} of {place.path} does not have "
                        f"its hash"
                    )
            except BaseException:
                self._free.put(buffer)
                raise
            if not reading.read(piece, buffer):
                self._free.put(buffer)
                return


def read_whole(fd: int, piece: memoryview, offset: int, path: str) -> None:
    """Fill `piece` from the file's byte `offset` on. Raises OSError, ServiceError when the file ends before."""
    done = 0
    while done < len(piece):
        n = os.preadv(fd, [piece[done:]], offset + done)
        if not n:
            raise ServiceError(f"{path} ends in the middle of a page")
        done += n


class _File:
    """The file that was read last stays open: the system reads ahead for those who go on where they were."""

    def __init__(self) -> None:
        self._fd, self._path, self._inode = -1, "", (0, 0)

    def open(self, place: h.PagePlace, form: h.PageForm) -> int:
        """Its descriptor. Raises ServiceError when it does not hold such a page, OSError."""
        if place.layer not in form.layers or place.offset % ALIGNMENT or place.offset < 0:
            raise ServiceError(
                f"page {place.page} of layer {place.layer} at {place.offset} is no page of these"
            )
        if place.path != self._path or inode(os.lstat(place.path)) != self._inode:
            self.close()
            self._fd = os.open(place.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            self._path, self._inode = place.path, inode(os.fstat(self._fd))
        found = os.fstat(self._fd)
        if not stat.S_ISREG(found.st_mode) or place.offset + form.image_bytes > found.st_size:
            raise ServiceError(
                f"{place.path} has {found.st_size} bytes; a page of {form.image_bytes} at {place.offset} is not in it"
            )
        return self._fd

    def close(self) -> None:
        """Calling it again does nothing."""
        if self._fd >= 0:
            with suppress(OSError):
                os.close(self._fd)
        self._fd, self._path = -1, ""


def inode(found: os.stat_result) -> tuple[int, int]:
    """Which file it is, whatever it is called."""
    return found.st_dev, found.st_ino
