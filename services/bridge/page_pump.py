"""The bridge's second data thread: queries of the mac process and pages of the broker to the worker, answers back.

One thread owns the bus sockets of routes "attention" and "pages" and the connection of the attention channel, so
nothing here is locked. After a query it stays awake for a moment, because the next one is near; else it sleeps until
something arrives. A lost connection fails everything at once, and is tried again for as long as a broker wants pages.
What is said is page_errands' and page_translate's business, what the socket does is cable's. Made by bridge.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from common.errors import LinkDeadlineError, LinkDownError, OutriggerError, WorkerRefusedError
from common.log import get_log
from common.metrics import Metrics
from common.wire import attention_base_frames as base
from common.wire import attention_extension_frames as ext
from common.wire import held as h
from common.wire.attention_link import AttentionLink
from common.wire.deadlines import AckClock
from common.wire.link import Arrived
from services.bridge import page_translate as translate
from services.bridge.cable import Cable
from services.bridge.commanded import CommandedThread
from services.bridge.page_errands import PageErrands
from services.bridge.retry import Backoff
from services.bridge.translate import cause_of
from services.runtime.bus import BlockingOwner

log = get_log()

GREETING_S_MAX = 5.0
PING_EVERY_S = 4.0
"""The worker keeps the place of a host that it heard of within 10 s."""
TURN_S_MAX = 1.0
HOT_S = 0.0005
"""How long the thread stays awake after a query's answer, or while one is with the worker."""

AWAKE_TURNS = 16
"""So many turns without sleep before the broker is looked at: queries without a pause would keep pages out."""


@dataclass(frozen=True)
class PagesPlace:
    """Where a worker's attention channel is, and the memory that it said it has (0: it did not say)."""

    host: str
    port: int
    avail_bytes: int = 0


class PagePump(CommandedThread):
    """`offer` and `stop` may be called by any thread; `wants_place` is read by any."""

    def __init__(
        self,
        attention: BlockingOwner,
        pages: BlockingOwner,
        metrics: Metrics,
        *,
        boot_id: int,
        ended: Callable[[], None],
        make_clock: Callable[[], AckClock] = AckClock,
    ) -> None:
        super().__init__("page pump", ended)
        self._attention, self._pages, self._metrics = attention, pages, metrics
        self._boot_id, self._make_clock = boot_id, make_clock
        self._errands = PageErrands(attention, pages, metrics, came=self._came)
        self._place: PagesPlace | None = None
        self._cable: Cable | None = None
        self._up, self._device = False, ""
        self._why = "no worker that holds pages was found yet"
        self._greet_by = 0.0
        self._retry_at: float | None = None
        self._backoff = Backoff()
        self._said_at = self._hot_until = 0.0

    # --- from other threads

    @property
    def wants_place(self) -> bool:
        """Whether somebody wants pages held and no worker is connected: say where one is."""
        return self._errands.broker is not None and not self._up

    @property
    def trouble(self) -> str:
        """Why no worker holds pages now; empty while one is connected."""
        return "" if self._up else self._why

    def offer(self, place: PagesPlace) -> None:
        """A worker's attention channel is there."""
        self._command(lambda: self._offered(place))

    def suspended(self) -> None:
        """The worker said that its system puts it to sleep."""
        error = LinkDownError("the worker's system suspends it", cause="suspended")
        self._command(lambda: self._lose(error) if self._cable is not None else None)

    def _came(self) -> None:
        self._command(self._send_waiting)

    # --- the loop

    def _close_sockets(self) -> None:
        self._attention.close()
        self._pages.close()
        self._errands.close()

    def _step(self) -> None:
        now = time.monotonic()
        if now < self._hot_until and self._cable is not None and not self._commands:
            self._step_awake(self._cable, now)
            return
        timeout_s = max(0.0, min([TURN_S_MAX, *(at - now for at in self._due())]))
        cable = self._cable
        others = [self._pages, self._wake] if cable is None else [self._pages, self._wake, cable]
        writers = [cable] if cable is not None and cable.wants_write else []
        ready = self._attention.wait(timeout_s, *others, writers=writers)
        if self._attention in ready:  # first: a token waits for it
            self._serve_mac()
        self._obey(woken=self._wake in ready)
        if cable is not None and cable is self._cable:
            self._serve_cable(cable, cable in ready)
        if self._pages in ready:
            self._serve_broker()
        if self._cable is None and self._retry_at is not None and time.monotonic() >= self._retry_at:
            self._connect()

    def _step_awake(self, cable: Cable, now: float) -> None:
        """Look without sleeping at what a query waits for, and now and then at the broker."""
        try:
            events = cable.turn(now)
            for event in events:
                self._take(event, now)
        except OutriggerError as error:
            self._lose(error)
            return
        if events:
            self._send_waiting()
        if self._attention.has_mail:
            self._serve_mac()
        elif self.turns % AWAKE_TURNS:
            os.sched_yield()
        else:
            self._serve_cable(cable, False)
            self._serve_broker()

    def _due(self) -> list[float]:
        """When something needs attention although nothing arrives."""
        due = [at for at in (self._retry_at,) if at is not None and self._cable is None]
        if self._cable is not None:
            due += [at for at in (self._cable.due_at(),) if at is not None]
            if self._up:
                due.append(self._said_at + PING_EVERY_S)
            elif self._cable.connected:
                due.append(self._greet_by)
        return due

    def _serve_mac(self) -> None:
        """Take one query and put it on its way. The next is looked for in the next turn, after answers."""
        if (received := self._attention.recv(0)) is not None:
            self._errands.ask(received)
            self._send_waiting()
            self._hot_until = time.monotonic() + HOT_S

    def _serve_broker(self) -> None:
        taken = False
        while (received := self._pages.recv(0)) is not None:
            taken = True
            if self._errands.broker != received.peer:
                self._errands.broker = received.peer
                if self._cable is None:
                    self._retry_at = self._retry_at or time.monotonic()
            if not isinstance(received.message, h.WatchPages):
                self._errands.order(received, up=self._up, why=self._why)
            elif self._up:
                self._tell_up()
            else:
                self._errands.tell(h.PagesDown(self._errands.connection, "down", self._why))
        if taken:
            self._send_waiting()

    def _serve_cable(self, cable: Cable, ready: bool) -> None:
        now = time.monotonic()
        try:
            was_connected = cable.connected
            if ready:
                for event in cable.turn(now):
                    self._take(event, now)
            if cable.connected and not was_connected:
                self._greet_by = now + GREETING_S_MAX
                cable.send(translate.greeting(self._boot_id), now, epoch=self._errands.connection)
            cable.check(now)
            if self._up:
                self._send_waiting()
                self._ping_if_silent(cable, now)
            elif cable.connected and now > self._greet_by:
                raise LinkDeadlineError(f"the worker did not greet within {GREETING_S_MAX:g} s")
        except OutriggerError as error:
            self._lose(error)

    def _send_waiting(self) -> None:
        if not self._up or self._cable is None:
            return
        try:
            self._errands.send(self._cable)
        except OutriggerError as error:
            self._lose(error)

    def _ping_if_silent(self, cable: Cable, now: float) -> None:
        if cable.link.pending:
            self._said_at = now
        elif now > self._said_at + PING_EVERY_S and cable.link.idle:
            self._said_at = now
            cable.send(translate.ping(), now)

    def _take(self, event: Arrived, now: float) -> None:
        frame = event.frame
        if event.request is not None:
            self._errands.took(event, now)
            if event.request.request is ext.Attn2:
                self._hot_until = now + HOT_S
        elif isinstance(frame, ext.Hello3Ok):
            translate.check_greeting(frame)
            self._up, self._why, self._device = True, "", frame.device
            self._said_at = now
            self._backoff.reset()
            self._metrics.set("pages_up", 1)
            log.info("pages up", connection=self._errands.connection, device=frame.device)
            self._tell_up()
        elif isinstance(frame, base.Bye):
            raise LinkDownError("the worker said goodbye")
        elif isinstance(frame, (ext.Err2, base.Err)):
            raise WorkerRefusedError(f"the worker says {frame.text}")

    # --- the life of the link

    def _tell_up(self) -> None:
        avail_bytes = self._place.avail_bytes if self._place else 0
        self._errands.tell(h.PagesUp(self._errands.connection, self._device, avail_bytes))
        if (paced := self._errands.pace.told()) is not None:
            self._errands.tell(paced)

    def _offered(self, place: PagesPlace) -> None:
        moved = self._place is None or (place.host, place.port) != (self._place.host, self._place.port)
        self._place = place
        if moved and self._cable is None:
            self._backoff.reset()
            self._retry_at = time.monotonic()

    def _connect(self) -> None:
        self._retry_at = None
        if self._place is None or self._errands.broker is None:
            return  # `offer`, or the broker's first word, sets it anew
        self._errands.connection = max(self._errands.connection + 1, time.time_ns())
        try:
            self._cable = Cable(
                (self._place.host, self._place.port),
                self._metrics,
                time.monotonic(),
                self._make_clock(),
                make_link=AttentionLink,
                kind_of=translate.byte_kind,
            )
        except OutriggerError as error:
            self._lose(error)

    def _lose(self, error: OutriggerError) -> None:
        """This life of the link ended by `error`: answer everything, tell it, try again later."""
        self._close(error)
        self._retry_at = time.monotonic() + self._backoff.next_s()
        if str(error) != self._why:
            self._why = str(error)
            log.warning("pages down", cause=cause_of(error), error=self._why)
            self._errands.tell(h.PagesDown(self._errands.connection, cause_of(error), self._why))

    def _close(self, error: OutriggerError) -> None:
        cable, self._cable, self._up, self._hot_until = self._cable, None, False, 0.0
        self._metrics.set("pages_up", 0)
        if cable is None:
            return
        for reason in ("stale_epoch", "bad_hash"):
            self._metrics.add("link_frames_dropped_total", cable.link.counts[reason], reason=reason)
        if cable.connected:
            with suppress(OutriggerError):
                cable.send(base.Bye(), time.monotonic())
        self._errands.fail_all([pending.tag for pending in cable.abandon()], error)

    def _end(self) -> None:
        self._close(LinkDownError("the bridge stops"))
        self._retry_at, self._running = None, False
