"""The one thread that uses the engine: it takes requests in order of arrival and sends each answer itself.

Readers of connections put work in (`submit`), nobody waits for it. A request whose client has gone is skipped, and so
is a chunk past the point that a waiting TRIM2 goes back to; when a client leaves, the mirror is emptied behind its last
request. Knows sessions only by what they promise here.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from common.crash_note import Slot
from common.errors import EngineError, LinkDownError, OutriggerError
from common.limits import CHUNK_WINDOW_MAX, WORKER_CLIENTS_MAX
from common.log import get_log
from common.wire import base_frames as base
from common.wire import extension_frames as ext
from common.wire.frames import Frame
from common.wire.link import Refused
from device.service import TailService

log = get_log()

BEAT_S = 0.5
"""Longest sleep between two beats."""
QUEUE_MAX = (CHUNK_WINDOW_MAX + 4) * WORKER_CLIENTS_MAX


class Client(Protocol):
    """What the compute thread needs of a connection."""

    peer: str
    closed: bool

    def reply(self, frame: Frame) -> None: ...

    def fail(self, error: OutriggerError, n_valid: int) -> None: ...


@dataclass(frozen=True)
class Work:
    """A request that arrived whole at `arrived_at`; `frame` is a Refused when its hash was wrong."""

    client: Client
    frame: Frame | Refused
    seq: int
    arrived_at: float


class ComputeThread:
    """`service` and its engine are used by this thread only, from `start` to `stop`."""

    def __init__(
        self,
        service: TailService,
        clock: Callable[[], float] = time.monotonic,
        crash_slot: Slot | None = None,
    ) -> None:
        """crash_slot: where the thread says what it is about to compute."""
        self.beat = 1
        """Grows with every turn of the thread, and at least twice a second while it has nothing to do."""
        self._crash_slot = crash_slot or Slot()
        self._service = service
        self._clock = clock
        self._queue: queue.Queue[Work | Client | None] = queue.Queue(QUEUE_MAX)
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)
        self._served: Client | None = None
        self._trim: Work | None = None
        """A TRIM2 that waits; set by the reader's thread."""
        self.busy = False

    def start(self) -> None:
        self._thread.start()

    def submit(self, work: Work) -> None:
        """Queue a request. The link's window keeps the queue short; a client beyond it was refused before."""
        if isinstance(work.frame, ext.Trim2):
            self._trim = work
        self._queue.put(work)

    def release(self, client: Client) -> None:
        """The client is gone: once its requests are skipped, empty the mirror."""
        self._queue.put(client)

    def stop(self, timeout_s: float) -> bool:
        """Stop after the request at hand; False when that takes longer than timeout_s."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._next()) is not None:
            if isinstance(item, Work):
                if not item.client.closed:
                    self.busy = True
                    self._served = item.client
                    self._perform(item)
                    self.busy = False
                    self._crash_slot.clear()
            elif item is self._served:  # a newer client may be served already: then the mirror is its
                self._service.mirror.empty()
                self._served = None

    def _next(self) -> Work | Client | None:
        """The next item, as soon as there is one."""
        while True:
            self.beat += 1
            with suppress(queue.Empty):
                return self._queue.get(timeout=BEAT_S)

    def _perform(self, work: Work) -> None:
        """Answer one request. Whatever goes wrong becomes an answer: this thread must outlive every client."""
        service, client, frame = self._service, work.client, work.frame
        if isinstance(frame, Refused):
            client.reply(service.failure(None, work.seq, frame.error))
            return
        try:
            self._crash_slot.write(f"answering {described(frame)} of {client.peer}")
            waited_s = self._clock() - work.arrived_at
            if work is self._trim:
                self._trim = None
            if self._unwanted(work):
                raise LinkDownError("nobody waits for this chunk any more; it was not run")
            answer = service.answer(frame, work.seq, waited_s, gone=lambda: self._unwanted(work))
        except OutriggerError as error:
            self._refuse(work, frame, error)
        except Exception as error:
            log.exception("request failed", peer=client.peer, request=frame.NAME)
            service.mirror.empty()
            self._refuse(work, frame, EngineError(f"{type(error).__name__}: {error}"))
        else:
            client.reply(answer.frame)
            if answer.closing is not None:
                client.fail(answer.closing, 0)

    def _unwanted(self, work: Work) -> bool:
        """The client has gone, or has said that it will go back to before the end of this chunk."""
        if work.client.closed:
            return True
        trim, chunk = self._trim, work.frame
        if trim is None or trim.client is not work.client or not isinstance(chunk, (base.Chunk, ext.Chunk2)):
            return False
        assert isinstance(trim.frame, ext.Trim2)
        return trim.frame.n < chunk.pos0 + chunk.n_tok

    def _refuse(self, work: Work, frame: Frame, error: OutriggerError) -> None:
        n_valid = self._service.mirror.n_valid
        values = {"peer": work.client.peer, "request": frame.NAME, "n_valid": n_valid}
        tell = log.info if isinstance(error, LinkDownError) else log.warning
        tell("request refused", **values, error=str(error))
        if work.seq == 0:  # a greeting: there is nothing to go on with
            work.client.fail(error, n_valid)
        else:
            work.client.reply(self._service.failure(frame, work.seq, error))


def described(frame: Frame) -> str:
    """A request in words, with its positions when it has some."""
    if isinstance(frame, (base.Chunk, ext.Chunk2)):
        return f"{frame.NAME} at positions {frame.pos0}-{frame.pos0 + frame.n_tok - 1}"
    return frame.NAME
