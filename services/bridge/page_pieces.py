"""Pieces: a page on its way from the journal to the worker, a piece at a time.

The reader's thread puts pieces in, hashed; the page pump's takes them out as frames. The last one comes only if the
whole page has the hash that the broker named. A buffer is the cable's until the worker has answered the piece in it.
Used by page_errands.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from common.errors import OutriggerError
from common.wire import attention_extension_frames as ext
from common.wire import held as h
from common.wire.layout import Payload
from services.bridge.page_reader import PageReader


@dataclass(eq=False)
class Pieces:
    """One page of one layer. Take with `next` until `done`; `close` when it is over, however it ended.

    came: called on the reader's thread when there is something that `next` did not find.
    """

    place: h.PagePlace
    form: h.PageForm
    reader: PageReader
    came: Callable[[], None]
    offset: int = 0
    """Of the next piece."""
    closed: bool = False
    _ready: deque[tuple[memoryview, np.ndarray] | OutriggerError] = field(default_factory=deque)
    _awaited: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.reader.ask(self)

    # --- the pump's thread

    @property
    def done(self) -> bool:
        """Whether every piece was taken."""
        return self.offset == self.form.image_bytes

    def next(self) -> tuple[ext.Append2, np.ndarray] | None:
        """The next piece and the buffer that it lies in; None: it is not read yet.

        Raises ServiceError when it cannot be read, HashMismatchError when the page is damaged.
        """
        with self._lock:
            self._awaited = not self._ready
            if self._awaited:
                return None
            found = self._ready.popleft()
        if isinstance(found, OutriggerError):
            raise found
        piece, buffer = found
        place = self.place
        frame = ext.Append2(
            place.layer, place.page, self.form.page_tokens, self.offset, place.xxh3, Payload(piece)
        )
        self.offset += len(piece)
        return frame, buffer

    def close(self) -> None:
        """Let go of what was read and not taken. Calling it again does nothing."""
        with self._lock:
            self.closed = True
            left = [found for found in self._ready if not isinstance(found, OutriggerError)]
            self._ready.clear()
        for _, buffer in left:
            self.reader.give_back(buffer)

    # --- the reader's thread

    def read(self, piece: memoryview, buffer: np.ndarray) -> bool:
        """See Reading."""
        return self._put((piece, buffer))

    def failed(self, error: OutriggerError) -> None:
        """See Reading."""
        self._put(error)

    def _put(self, found: tuple[memoryview, np.ndarray] | OutriggerError) -> bool:
        with self._lock:
            if self.closed:
                return False
            self._ready.append(found)
            awaited, self._awaited = self._awaited, False
        if awaited:
            self.came()
        return True
