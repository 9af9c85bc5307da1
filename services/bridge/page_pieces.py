"""A page on its way from the journal to the worker, a piece at a time.

The file is read, not mapped: a file that shrinks under a mapping would kill the process. Each piece is hashed as it
leaves, and the last one leaves only if the whole has the hash that the broker named. Used by page_errands.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from dataclasses import dataclass, field

import xxhash

from common.errors import HashMismatchError, ServiceError
from common.limits import APPEND_PIECE_BYTES
from common.wire import attention_extension_frames as ext
from common.wire import held as h
from common.wire.layout import Payload

ALIGNMENT = 4096
"""Pages lie at multiples of this in the journal."""


@dataclass
class Pieces:
    """One page of one layer. `next` reads pieces until `done`; `close` when it is over, however it ended."""

    place: h.PagePlace
    form: h.PageForm
    offset: int = 0
    _fd: int = -1
    _hasher: xxhash.xxh3_64 = field(default_factory=xxhash.xxh3_64)

    def __post_init__(self) -> None:
        """Opens the file. Raises ServiceError when it does not hold such a page."""
        place, n_bytes = self.place, self.form.image_bytes
        if place.layer not in self.form.layers or place.offset % ALIGNMENT or place.offset < 0:
            raise ServiceError(
                f"page {place.page} of layer {place.layer} at {place.offset} is no page of these"
            )
        try:
            self._fd = os.open(place.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            found = os.fstat(self._fd)
            if not stat.S_ISREG(found.st_mode) or place.offset + n_bytes > found.st_size:
                raise ServiceError(
                    f"{place.path} has {found.st_size} bytes; a page of {n_bytes} at {place.offset} is not in it"
                )
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._fd, place.offset, n_bytes, os.POSIX_FADV_WILLNEED)
        except OSError as error:
            self.close()
            raise ServiceError(f"cannot read {place.path}: {error.strerror or error}") from error
        except ServiceError:
            self.close()
            raise

    @property
    def done(self) -> bool:
        """Whether every piece was read."""
        return self.offset == self.form.image_bytes

    def next(self) -> ext.Append2:
        """The next piece. Raises ServiceError when it cannot be read, HashMismatchError when the page is damaged."""
        place, n_bytes = self.place, min(APPEND_PIECE_BYTES, self.form.image_bytes - self.offset)
        try:
            data = os.pread(self._fd, n_bytes, place.offset + self.offset)
        except OSError as error:
            raise ServiceError(f"cannot read {place.path}: {error.strerror or error}") from error
        if len(data) != n_bytes:
            raise ServiceError(f"{place.path} ends in the middle of a page")
        self._hasher.update(data)
        piece = ext.Append2(
            place.layer, place.page, self.form.page_tokens, self.offset, place.xxh3, Payload(data)
        )
        self.offset += n_bytes
        if self.done and self._hasher.intdigest() != place.xxh3:
            raise HashMismatchError(
                f"page {place.page} of layer {place.layer} at {place.offset} of {place.path} does not have its hash"
            )
        return piece

    def close(self) -> None:
        """Close the file. Calling it again does nothing."""
        if self._fd >= 0:
            with suppress(OSError):
                os.close(self._fd)
            self._fd = -1
