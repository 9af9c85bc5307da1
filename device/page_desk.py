"""The one place where requests about pages are worked on: on the thread of the connection that brought them.

A query is on the critical path of a token, and handing it to a computing thread would cost more than sending it over a
cable. So it is answered by the thread that read it, under a lock. The tail's computing thread is another one, with an
engine and threads of its own: neither waits for the other, and what they share is the processor.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable

from common.crash_note import Slot
from common.errors import EngineError, OutriggerError
from common.log import get_log
from common.wire import attention_extension_frames as ext
from common.wire.frames import Frame
from common.wire.link import Refused
from device.compute import Client, Work
from device.page_service import PageService

log = get_log()

BEAT_S = 0.5


class PageDesk:
    """`service` is used under the desk's lock only. In the place of a ComputeThread for a LinkServer."""

    def __init__(
        self,
        service: PageService,
        clock: Callable[[], float] = time.monotonic,
        crash_slot: Slot | None = None,
    ) -> None:
        self.service = service
        self._clock, self._crash_slot = clock, crash_slot or Slot()
        self._lock = threading.RLock()
        self._served: Client | None = None
        self._began_at: float | None = None

    @property
    def beat(self) -> int:
        """Grows as long as no request is stuck."""
        began_at = self._began_at
        return int((self._clock() if began_at is None else began_at) / BEAT_S)

    def submit(self, work: Work) -> None:
        """Answer a request now. Whatever goes wrong becomes an answer."""
        with self._lock:
            if work.client.closed:
                return
            self._served, self._began_at = work.client, self._clock()
            try:
                self._perform(work, self._began_at - work.arrived_at)
            finally:
                self._began_at = None
                self._crash_slot.clear()

    def release(self, client: Client) -> None:
        """The client is gone."""
        with self._lock:
            if client is self._served:  # a newer one may be served already: then the pages are its
                self._served = None
                self.service.client_gone()

    def restart(self, change: Callable[[PageService], None]) -> None:
        """Drop everything and let `change` make another worker of it: what an emulated restart does."""
        with self._lock:
            self.service.drop()
            change(self.service)

    def stop(self, timeout_s: float) -> bool:
        """Drop everything, once the request at hand is answered; False when that takes longer than timeout_s."""
        if not self._lock.acquire(timeout=timeout_s):
            return False
        self.service.drop()
        return True  # the lock is kept: nothing is answered any more

    def _perform(self, work: Work, queue_s: float) -> None:
        service, client, frame = self.service, work.client, work.frame
        if isinstance(frame, Refused):
            client.reply(service.failure(None, work.seq, frame.error))
            return
        try:
            self._crash_slot.write(_doing(described(frame), client.peer))
            answer = service.answer(frame, work.seq, queue_s)
        except OutriggerError as error:
            self._refuse(work, frame, error)
        except Exception as error:
            log.exception("request failed", peer=client.peer, request=frame.NAME)
            service.drop()
            self._refuse(work, frame, EngineError(f"{type(error).__name__}: {error}"))
        else:
            client.reply(answer)

    def _refuse(self, work: Work, frame: Frame, error: OutriggerError) -> None:
        log.warning("request refused", peer=work.client.peer, request=frame.NAME, error=str(error))
        if work.seq == 0:  # a greeting: there is nothing to go on with
            work.client.fail(error, self.service.n_keys)
        else:
            work.client.reply(self.service.failure(frame, work.seq, error))


def described(frame: Frame) -> str:
    """A request in words, with its layer and groups when it has some."""
    if isinstance(frame, ext.Attn2):
        return _described_query(frame.layer, frame.group_first, frame.group_end)
    return frame.NAME


@functools.lru_cache(256)
def _described_query(layer: int, group_first: int, group_end: int) -> str:
    return f"{ext.Attn2.NAME}, layer {layer}, groups {group_first}-{group_end - 1}"


@functools.lru_cache(256)
def _doing(what: str, peer: str) -> str:
    return f"answering {what} of {peer}"
