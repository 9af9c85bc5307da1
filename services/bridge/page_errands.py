"""What mac and broker want of the worker's pages: waiting, on the cable, and answered exactly once.

Queries go first and overtake pages, which leave in pieces: a query waits for two pieces at most. What changes the pages
as a whole (room, cuts) waits until nothing is unanswered, and lets no query pass. Knows the bus and the cable's window;
whether there is a link is services.bridge.page_pump's business, whose thread alone calls this.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from common.errors import (
    LinkDownError,
    LinkError,
    LocalProtocolError,
    OutriggerError,
    RemoteProtocolError,
    StaleEpochError,
    WorkerRefusedError,
)
from common.limits import BUS_HWM_DATA_MESSAGES
from common.log import get_log
from common.metrics import Metrics
from common.wire import attention_extension_frames as ext
from common.wire import held as h
from common.wire.frames import Frame
from common.wire.link import Arrived
from services.bridge import page_translate as translate
from services.bridge.cable import Cable
from services.bridge.pace import Pace
from services.bridge.page_pieces import Pieces
from services.bridge.page_reader import PageReader
from services.bridge.translate import CAUSES, cause_of
from services.runtime.bus import BlockingOwner
from services.runtime.conversation import Received

log = get_log()

QUERIES_OUT_MAX, PIECES_OUT_MAX = 4, 2
QUERIES_WAITING_MAX = BUS_HWM_DATA_MESSAGES
JOBS_WAITING_MAX = 1024
PUSHES_OPEN_MAX = 2
"""The page that leaves, and the next one: it is read meanwhile."""


@dataclass(eq=False)
class Push:
    """A page that leaves in pieces, the first of them at `began_s`; `over` once the broker was answered."""

    received: Received
    pieces: Pieces
    began_s: float = 0.0
    over: bool = False


@dataclass(frozen=True)
class Piece:
    """What is remembered of a piece that is not answered yet."""

    push: Push
    last: bool
    buffer: np.ndarray
    """What it lies in: the cable's until the answer."""


class PageErrands:
    """`epoch` is the last grant's: 0 while no pages count. `connection` is the link's own number.

    came: called by another thread when a page that is waited for was read.
    """

    def __init__(
        self,
        attention: BlockingOwner,
        pages: BlockingOwner,
        metrics: Metrics,
        came: Callable[[], None],
    ) -> None:
        self.epoch = self.connection = 0
        self.pace = Pace()
        self.broker: bytes | None = None
        self._attention, self._pages, self._metrics = attention, pages, metrics
        self._form: h.PageForm | None = None
        self._queries: deque[Received] = deque()
        self._jobs: deque[Received] = deque()
        self._reader, self._came = PageReader(), came
        self._pushes: deque[Push] = deque()
        """The page that leaves, and those that are read meanwhile."""
        self._answered: list[np.ndarray] = []
        """Buffers of pieces that were answered: the reader has them again once the next pieces left."""
        self._n_queries_out = self._n_pieces_out = 0
        self._count_kernels = metrics.adder("held_keys_total", by="kernels")
        self._count_programs = metrics.adder("held_keys_total", by="programs")

    # --- what comes from the bus

    def ask(self, received: Received) -> None:
        """A query of the mac process; answered at once when it cannot be put to the worker."""
        message: h.Attend = received.message
        if not self.epoch:
            self._refuse_query(received, LinkDownError("no worker holds pages"))
        elif message.epoch != self.epoch:
            self._metrics.add("link_frames_dropped_total", reason="stale_epoch")
            error = StaleEpochError(f"the query is of epoch {message.epoch}; now it is {self.epoch}")
            self._refuse_query(received, error)
        elif len(self._queries) >= QUERIES_WAITING_MAX:
            self._refuse_query(received, LinkError("too many queries wait already", cause="order"))
        else:
            self._queries.append(received)

    def order(self, received: Received, *, up: bool, why: str) -> None:
        """A request of the broker's other than WatchPages."""
        message = received.message
        if not up:
            self._refuse_job(received, LinkDownError(why or "no worker that holds pages is connected"))
        elif not isinstance(message, h.HoldPages) and message.epoch not in (self.epoch, self.connection):
            error = StaleEpochError(f"the request is of epoch {message.epoch}; now it is {self.epoch}")
            self._refuse_job(received, error)
        elif len(self._jobs) >= JOBS_WAITING_MAX:
            self._refuse_job(received, LinkError("too many requests wait already", cause="order"))
        else:
            self._jobs.append(received)

    # --- to the worker

    def send(self, cable: Cable) -> None:
        """Put on the cable what there is room for, queries first. Raises LinkError."""
        try:
            self._send(cable)
        finally:
            self._give_back()

    def _send(self, cable: Cable) -> None:
        barrier = bool(self._jobs) and not isinstance(self._jobs[0].message, h.PushPage)
        if not (barrier and not self._pushes):
            while self._queries and self._n_queries_out < QUERIES_OUT_MAX and cable.link.room(ext.Attn2):
                self._send_query(cable, self._queries.popleft())
        while self._pushes or self._jobs:
            self._open_pushes()
            if self._pushes:
                full = self._n_pieces_out >= PIECES_OUT_MAX or not cable.link.room(ext.Append2)
                if full or self._queries or not self._send_piece(cable, self._pushes[0]):
                    return
            elif self._jobs and cable.link.idle:
                self._send_whole(cable, self._jobs.popleft())
            else:
                return

    def _send_query(self, cable: Cable, received: Received) -> None:
        try:
            if self._form is None:
                raise LinkDownError("no pages are held")
            frame = translate.attn2(received.message, self._form, received.frames[0])
            cable.send(frame, time.monotonic(), tag=received)
        except (LocalProtocolError, LinkDownError) as error:  # it cannot be said; the link is unharmed
            self._refuse_query(received, error)
        else:
            self._n_queries_out += 1

    def _open_pushes(self) -> None:
        """Have the next pages read, up to what changes the pages as a whole."""
        while (
            self._jobs
            and len(self._pushes) < PUSHES_OPEN_MAX
            and isinstance(self._jobs[0].message, h.PushPage)
        ):
            received = self._jobs.popleft()
            if self._form is None:
                why = "no pages are held: HoldPages comes first"
                self._refuse_job(received, WorkerRefusedError(why, cause="order"))
            else:
                pieces = Pieces(received.message.place, self._form, self._reader, self._came)
                self._pushes.append(Push(received, pieces))

    def _send_piece(self, cable: Cable, push: Push) -> bool:
        """Whether there was something to do: False as long as the next piece is being read."""
        try:
            found = push.pieces.next()
        except OutriggerError as error:
            self._fail_push(push, error)
            return True
        if found is None:
            return False
        (frame, buffer), now = found, time.monotonic()
        push.began_s = push.began_s or now
        try:
            cable.send(frame, now, tag=Piece(push, push.pieces.done, buffer))
        except OutriggerError as error:
            self._reader.give_back(buffer)
            self._fail_push(push, error)
            return True
        self._n_pieces_out += 1
        if push.pieces.done:
            push.pieces.close()
            self._pushes.popleft()
        return True

    def _send_whole(self, cable: Cable, received: Received) -> None:
        message = received.message
        try:
            if isinstance(message, h.HoldPages):
                self.epoch, self._form = 0, None
                frame: Frame = translate.config2(message)
            else:
                frame = ext.Truncate2(message.n_keys)
            cable.send(frame, time.monotonic(), tag=received)
        except LocalProtocolError as error:
            self._refuse_job(received, error)

    # --- from the worker

    def took(self, event: Arrived, now: float) -> None:
        """The answer to something that was sent. Raises RemoteProtocolError when it is not one that could be right."""
        assert event.request is not None, "it answers something"
        tag, frame = event.request.tag, event.frame
        if isinstance(tag, Piece):
            self._n_pieces_out -= 1
            self._answered.append(tag.buffer)
            self._took_piece(tag, frame, now)
        elif isinstance(tag, Received) and isinstance(tag.message, h.Attend):
            self._n_queries_out -= 1
            self._took_attended(tag, frame, now - event.request.sent_at)
        elif isinstance(tag, Received):
            self._took_whole(tag, frame)

    def _took_attended(self, received: Received, frame: Frame, seconds: float) -> None:
        if isinstance(frame, ext.Err2):
            self._refuse_query(received, said(frame))
            return
        assert isinstance(frame, ext.Attn2Ok) and self._form is not None, (
            "the link knows what answers a query"
        )
        try:
            message, arrays = translate.attended(received.message, frame, self._form, seconds)
        except RemoteProtocolError as error:
            self._refuse_query(received, LinkError(str(error), cause="count"))
            raise
        self._answer_mac(received, message, arrays)
        n_groups = message.n_keys // self._form.group_tokens
        self.pace.took(seconds, message.total_ms / 1000, n_groups, message.n_rows)
        self._metrics.observe("held_query_seconds", seconds)
        self._count_kernels(frame.n_keys - frame.n_keys_frozen)
        self._count_programs(frame.n_keys_frozen)

    def _took_piece(self, piece: Piece, frame: Frame, now: float) -> None:
        push = piece.push
        if isinstance(frame, ext.Err2):
            self._fail_push(push, said(frame))
        elif piece.last and not push.over:
            assert isinstance(frame, ext.Ok2), "the link knows what answers a piece"
            push.over = True
            message: h.PushPage = push.received.message
            self._metrics.add("held_pages_pushed_total")
            self._tell_broker(
                h.PagePushed(
                    message.ticket, message.epoch, message.place.layer, frame.n_now, now - push.began_s
                )
            )

    def _took_whole(self, received: Received, frame: Frame) -> None:
        message = received.message
        if isinstance(frame, ext.Err2):
            self._refuse_job(received, said(frame))
        elif isinstance(message, h.HoldPages):
            assert isinstance(frame, ext.Config2Ok), "the link knows what answers CONFIG2"
            self.epoch, self._form = max(time.time_ns(), self.connection + 1), message.form
            self._tell_broker(
                h.PagesGranted(
                    message.ticket,
                    self.epoch,
                    message.conversation,
                    frame.bytes_granted,
                    frame.tokens_max,
                    frame.n_keys,
                )
            )
        else:
            assert isinstance(frame, ext.Ok2), "the link knows what answers TRUNCATE2"
            self._tell_broker(h.PagesCut(message.ticket, message.epoch, frame.n_now))

    # --- ends

    def fail_all(self, on_cable: Iterable[object], error: OutriggerError) -> None:
        """The link is lost: answer everything, what was on the cable first. No pages count any more."""
        self.epoch, self._form = 0, None
        for tag in on_cable:
            if isinstance(tag, Piece):
                self._answered.append(tag.buffer)
                self._fail_push(tag.push, error)
            elif isinstance(tag, Received):
                self._refuse(tag, error)
        self._give_back()
        while self._pushes:
            self._fail_push(self._pushes[0], error)
        waiting = [*self._queries, *self._jobs]
        self._queries.clear()
        self._jobs.clear()
        self._n_queries_out = self._n_pieces_out = 0
        for received in waiting:
            self._refuse(received, error)

    def close(self) -> None:
        """Nothing more is read. `fail_all` comes first."""
        self._reader.stop()

    def tell(self, message: h.PagesUp | h.PagesDown | h.PagesPaced) -> None:
        """Tell the broker how the link stands, if there is one."""
        self._tell_broker(message)

    def _give_back(self) -> None:
        while self._answered:
            self._reader.give_back(self._answered.pop())

    def _fail_push(self, push: Push, error: OutriggerError) -> None:
        push.pieces.close()
        if push in self._pushes:
            self._pushes.remove(push)
        if not push.over:
            push.over = True
            self._refuse_job(push.received, error)

    def _refuse(self, received: Received, error: OutriggerError) -> None:
        if isinstance(received.message, h.Attend):
            self._refuse_query(received, error)
        else:
            self._refuse_job(received, error)

    def _refuse_query(self, received: Received, error: OutriggerError) -> None:
        self._metrics.add("held_failures_total", what="query", cause=cause_of(error))
        self._answer_mac(received, translate.attend_failed(received.message, error))

    def _refuse_job(self, received: Received, error: OutriggerError) -> None:
        message = received.message
        self._metrics.add("held_failures_total", what="push", cause=cause_of(error))
        self._tell_broker(
            translate.push_failed(message.ticket, getattr(message, "epoch", self.connection), error)
        )

    def _answer_mac(
        self,
        received: Received,
        message: h.Attended | h.AttendFailed,
        arrays: tuple[memoryview, ...] = (),
    ) -> None:
        try:
            self._attention.send(message, *arrays, to=received.peer)
        except LinkDownError as error:
            log.warning("mac does not take answers about pages", error=str(error))

    def _tell_broker(self, message: h.BridgeToBroker) -> None:
        if self.broker is None:
            return
        try:
            self._pages.send(message, to=self.broker)
        except LinkDownError as error:
            log.warning("broker is gone", error=str(error))
            self.broker = None


def said(frame: ext.Err2) -> OutriggerError:
    """The worker's refusal of one request as an error of ours."""
    error = WorkerRefusedError(f"the worker says {frame.text}", cause=CAUSES.get(frame.code, "refused"))
    error.code = frame.code
    return error
