"""The bridge's data thread: requests of the mac process to the cable, answers back, and the life of the link.

One thread owns the bus socket of route "residual" and the connection to the worker, so nothing here is locked: it
waits for either (or for a command of the bridge's loop), moves what can be moved, and looks at the clock. Every request
is answered exactly once: by the worker, or by LinkFailed the moment the link is lost. It knows no tensors; what a frame
means is translate's and greeting's business, what the socket does is cable's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from common.errors import (
    LinkDeadlineError,
    LinkDownError,
    LinkError,
    OutriggerError,
    StaleEpochError,
    WorkerRefusedError,
)
from common.log import get_log
from common.metrics import Metrics
from common.wire import base_frames as base
from common.wire import extension_frames as ext
from common.wire import messages as m
from common.wire.deadlines import AckClock
from common.wire.frames import Frame
from common.wire.layout import Payload
from common.wire.link import Arrived
from services.bridge import greeting, translate
from services.bridge.cable import Cable
from services.bridge.commanded import CommandedThread
from services.bridge.errands import Errands
from services.bridge.opening import PING_DATA, Opening, Paces
from services.bridge.places import Place, Places
from services.bridge.retry import REFUSED_S, Backoff
from services.runtime.bus import BlockingOwner
from services.runtime.conversation import Received

log = get_log()

GREETING_S_MAX = 20.0
"""The worker greets on its compute thread, maybe behind the last chunk of a host that left."""
PING_EVERY_S = 5.0
PONG_S_MAX = 3.0
TURN_S_MAX = 1.0
"""Longest sleep of the thread: that it takes turns is the process's sign of life."""


class Pump(CommandedThread):
    """Serves one worker at a time. `attach`, `detach`, `offer`, `suspended` and `stop` may be called by any thread.

    On this thread it calls tell with each LinkUp and LinkDown, gone when the mac process cannot be reached any more,
    and ended at its end.
    """

    def __init__(
        self,
        owner: BlockingOwner,
        places: Places,
        metrics: Metrics,
        *,
        boot_id: int,
        tell: Callable[[m.LinkUp | m.LinkDown], None],
        gone: Callable[[], None],
        ended: Callable[[], None],
        make_clock: Callable[[], AckClock] = AckClock,
    ) -> None:
        super().__init__("pump", ended)
        self._owner, self._places, self._metrics = owner, places, metrics
        self._boot_id, self._tell, self._gone = boot_id, tell, gone
        self._make_clock = make_clock
        self._hello: m.LinkHello | None = None
        self._cable: Cable | None = None
        self._opening: Opening | None = None
        self._peer: tuple[m.LinkHello, int] | None = None  # the worker's half of the greeting, and its boot
        self._paces = Paces()
        self._up = False
        self._epoch = 0
        self._lives = 0
        self._greet_by = 0.0
        self._retry_at: float | None = None
        self._backoff = Backoff()
        self._told = ""
        self._errands = Errands(owner, self._mac_gone)
        self._pinged_at: float | None = None
        self._next_ping = 0.0

    # --- from other threads

    def attach(self, hello: m.LinkHello) -> None:
        """Open the link for this model and keep it open; an earlier one is closed."""
        self._command(lambda: self._attach(hello))

    def detach(self) -> None:
        """Close the link and stay closed."""
        self._command(lambda: self._attach(None))

    def offer(self, places: list[Place], why: str) -> None:
        """These are the places where a worker may be now; `why` says what to tell when there is none."""
        self._command(lambda: self._offered(places, why))

    def suspended(self) -> None:
        """The worker said that its system puts it to sleep: what it was asked will not be answered in time."""
        error = LinkError("the worker's system suspends it", cause="suspended")
        self._command(lambda: self._lose(error) if self._cable is not None else None)

    @property
    def place(self) -> Place | None:
        """The place of the link that is up, or the one tried next."""
        return self._places.current

    # --- the loop

    def _close_sockets(self) -> None:
        self._owner.close()

    def _step(self) -> None:
        now = time.monotonic()
        due = [at for at in (self._retry_at, self._due_at()) if at is not None]
        timeout_s = max(0.0, min([TURN_S_MAX, *(at - now for at in due)]))
        cable = self._cable
        sockets = [self._wake] if cable is None else [self._wake, cable]
        ready = self._owner.wait(timeout_s, *sockets, writers=[cable] if cable and cable.wants_write else [])
        self._obey(woken=self._wake in ready)
        if cable is not None and cable is self._cable:
            self._guarded(lambda: self._serve_cable(cable, cable in ready))
        while (received := self._owner.recv(0)) is not None:
            self._ask(received)
        if self._cable is None and self._retry_at is not None and time.monotonic() >= self._retry_at:
            self._connect()

    def _due_at(self) -> float | None:
        """When the link needs attention although nothing arrives."""
        if self._cable is None:
            return None
        due = [at for at in (self._cable.due_at(),) if at is not None]
        if self._cable.connected and self._opening is None:
            due.append(self._greet_by)
        if self._pinged_at is not None:
            due.append(self._pinged_at + PONG_S_MAX)
        elif self._up and self._cable.link.idle:
            due.append(self._next_ping)
        return min(due, default=None)

    def _guarded(self, do: Callable[[], None]) -> None:
        """Run `do`; whatever goes wrong with the link ends this life of it."""
        try:
            do()
        except OutriggerError as error:
            self._lose(error)

    def _serve_cable(self, cable: Cable, ready: bool) -> None:
        now = time.monotonic()
        was_connected = cable.connected
        if ready:
            for event in cable.turn(now):
                self._take(event, now)
                if self._cable is not cable:
                    return  # the mac process vanished while it was answered
        if cable.connected and not was_connected:
            self._greet_by = now + GREETING_S_MAX
            assert self._hello is not None, "a cable is there for a host"
            cable.send(greeting.greeting(self._hello, self._boot_id), now, epoch=self._epoch)
        cable.check(now)
        if cable.connected and self._opening is None and now > self._greet_by:
            raise LinkDeadlineError(f"the worker did not greet within {GREETING_S_MAX:g} s")
        if self._pinged_at is not None and now > self._pinged_at + PONG_S_MAX:
            raise LinkDeadlineError(f"the worker did not answer a PING within {PONG_S_MAX:g} s")
        self._go_on_opening(cable, now)
        self._ping_if_idle(cable, now)
        self._send_waiting()

    # --- what arrives from the worker

    def _take(self, event: Arrived, now: float) -> None:
        frame, cable = event.frame, self._cable
        assert cable is not None, "frames come over a cable"
        if event.request is not None and not self._up:
            assert self._opening is not None, "nothing else asks before the link is up"
            self._opening.took(frame, now - event.request.sent_at)
        elif event.request is not None:
            received: Received = event.request.tag
            answer, arrays = translate.to_answer(received.message, frame, now - event.request.sent_at)
            self._errands.answer(received, answer, arrays)
        elif isinstance(frame, ext.Hello3Ok):
            self._greeted(cable, frame)
        elif isinstance(frame, base.Pong):
            self._took_pong(frame, now)
        elif isinstance(frame, base.Ping):
            cable.send(base.Pong(Payload(bytes(min(frame.reply_len, 4096)))), now)
        elif isinstance(frame, base.Bye):
            raise LinkDownError("the worker said goodbye")
        elif isinstance(frame, (ext.Err2, base.Err)):
            raise self._complaint(frame)

    def _complaint(self, frame: Frame) -> OutriggerError:
        """The worker speaks of the connection as a whole and will close it."""
        if isinstance(frame, base.Err):
            return greeting.base_peer(frame.text)
        assert isinstance(frame, ext.Err2)
        error = WorkerRefusedError(f"the worker says {frame.text}", cause=translate.CAUSES.get(frame.code))
        error.code = frame.code
        return error

    def _greeted(self, cable: Cable, answer: ext.Hello3Ok) -> None:
        """The worker greeted. If it is one that was timed before, its pace is known."""
        assert self._hello is not None, "it answers a greeting"
        self._peer = greeting.accepted(self._hello, answer), answer.boot_id
        token_ms = cable.link.clock.token_ms = self._paces.of(answer.boot_id, self._n_tail)
        self._opening = Opening(self._hello.n_embd, min(answer.n_ctx, self._hello.n_ctx), token_ms)

    def _go_on_opening(self, cable: Cable, now: float) -> None:
        """Say the next of the first words, or let the link be up when all were answered."""
        opening = self._opening
        if self._up or opening is None or not cable.link.idle or self._pinged_at is not None:
            return
        frame = opening.next()
        if frame is None:
            self._link_up(opening)
            return
        if isinstance(frame, base.Ping):
            self._pinged_at = now
        cable.send(frame, now)

    def _took_pong(self, pong: base.Pong, now: float) -> None:
        assert self._pinged_at is not None, "the link knows of a PING that this answers"
        round_trip_s, self._pinged_at = now - self._pinged_at, None
        self._metrics.observe("link_rtt_seconds", round_trip_s)
        self._next_ping = now + PING_EVERY_S
        if not self._up and self._opening is not None:
            self._opening.took(pong, round_trip_s)

    def _ping_if_idle(self, cable: Cable, now: float) -> None:
        """Measure the round trip now and then when nothing runs."""
        if not self._up or not cable.link.idle or self._pinged_at is not None or self._errands:
            return
        if now >= self._next_ping:
            self._pinged_at = now
            cable.send(base.Ping(len(PING_DATA), Payload(PING_DATA)), now)

    @property
    def _n_tail(self) -> int:
        """Layers that the worker runs for us."""
        assert self._hello is not None, "somebody wants a worker"
        return self._hello.n_layer_full - self._hello.split_layer

    # --- what arrives from the mac process

    def _ask(self, received: Received) -> None:
        message = received.message
        if self._up and message.link_epoch == self._epoch and not self._errands.full:
            self._errands.add(received)
            self._guarded(self._send_waiting)
            return
        if not self._up:
            error: LinkError = LinkDownError(self._told or "no worker is attached")
        elif message.link_epoch != self._epoch:
            self._metrics.add("link_frames_dropped_total", reason="stale_epoch")
            error = StaleEpochError(
                f"the request is of link epoch {message.link_epoch}; now it is {self._epoch}"
            )
        else:
            error = LinkError(f"{len(self._errands)} requests wait already", cause="order")
        self._errands.refuse(received, error)

    def _send_waiting(self) -> None:
        if self._up and self._cable is not None:
            self._errands.send(self._cable)

    def _mac_gone(self) -> None:
        """The mac process cannot be reached any more: nobody wants this link."""
        self._attach(None)
        self._gone()

    # --- the life of the link

    def _attach(self, hello: m.LinkHello | None) -> None:
        if self._cable is not None:
            self._close(LinkDownError("the link was closed" if hello is None else "the link was opened anew"))
        self._hello, self._told = hello, ""
        self._backoff.reset()
        self._retry_at = None if hello is None else time.monotonic()

    def _offered(self, places: list[Place], why: str) -> None:
        news = self._places.offer(places, why)
        if news and self._cable is None and self._hello is not None:
            self._backoff.reset()
            self._retry_at = time.monotonic()

    def _connect(self) -> None:
        self._retry_at = None
        place = self._places.current
        if place is None:
            self._down(LinkDownError(self._places.why), final=True)
            return
        self._epoch = max(self._epoch + 1, time.time_ns())
        try:
            address = place.host, place.port
            self._cable = Cable(address, self._metrics, time.monotonic(), self._make_clock())
        except OutriggerError as error:
            self._lose(error)

    def _link_up(self, opening: Opening) -> None:
        assert self._peer is not None and opening.token_ms is not None, "all was said"
        (hello, _), rtt_us, token_ms = self._peer, opening.rtt_us, opening.token_ms
        self._up, self._told = True, ""
        self._places.met()
        self._lives += 1
        self._backoff.reset()
        self._metrics.set("worker_up", 1)
        self._metrics.set("worker_epoch", self._lives)
        times = {"rtt_us": round(rtt_us, 1), "token_ms": round(token_ms, 3)}
        log.info("link up", epoch=self._epoch, place=str(self.place), device=hello.device, **times)
        self._tell(m.LinkUp(self._epoch, hello, rtt_us, token_ms))

    def _lose(self, error: OutriggerError) -> None:
        """This life of the link ended by `error`: answer everything, tell it, and plan the next attempt."""
        final, was_up = not self._up and greeting.is_final(error), self._up
        self._close(error)
        if self._hello is None:
            return
        if not was_up and self._places.failed():
            self._retry_at = time.monotonic()  # try the next place before saying anything
            return
        wait_s = REFUSED_S if final else self._backoff.next_s()
        self._retry_at = time.monotonic() + wait_s
        self._down(error, final=final)

    def _down(self, error: OutriggerError, *, final: bool) -> None:
        if str(error) == self._told:
            return  # the same complaint again: one line is enough
        self._told = str(error)
        log.warning(
            "link down", epoch=self._epoch, cause=translate.cause_of(error), final=final, error=self._told
        )
        self._tell(m.LinkDown(self._epoch, translate.cause_of(error), self._told, final))

    def _close(self, error: OutriggerError) -> None:
        """Drop the connection; every request that is in flight or waits is answered with LinkFailed now."""
        cable, self._cable, self._up, self._pinged_at = self._cable, None, False, None
        self._opening = None
        self._metrics.set("worker_up", 0)
        if cable is None:
            return
        if self._peer is not None and self._hello is not None:
            self._paces.keep(self._peer[1], self._n_tail, cable.link.clock.token_ms)
        counts = cable.link.counts
        for reason in ("stale_epoch", "bad_hash"):
            self._metrics.add("link_frames_dropped_total", counts[reason], reason=reason)
        if cable.connected:
            with suppress(OutriggerError):
                cable.send(base.Bye(), time.monotonic())
        in_flight = [pending.tag for pending in cable.abandon()]
        self._errands.fail_all((each for each in in_flight if each is not None), error)

    def _end(self) -> None:
        self._attach(None)
        self._running = False
