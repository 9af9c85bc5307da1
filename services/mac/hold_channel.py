"""HoldChannel: what the mac process and the broker say to each other about the pages of the main sequence.

Keeps one conversation open, knows which pages the journal has and where, and what was heard of workers and of room. A
broker that is gone costs nothing that was kept: places stay valid, for their files stay; a new one is told anew.
Nothing here waits except `open`. Knows no memory; used by holding.py, on the compute thread.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from common.errors import OutriggerError
from common.limits import MIB
from common.log import get_log
from common.wire import held as h
from common.wire.message import Message
from common.wire.routes import HOLD
from services.runtime.conversation import Received

IN_FLIGHT_BYTES_MAX = 64 * MIB
IN_FLIGHT_PAGES_MAX = HOLD.hwm // 2
"""So that the pipe is never full of pages, and there is room for what else is to be said."""
RETRY_S = 1.0
"""Between two tries to say something to a broker that cannot be reached, or refused."""

log = get_log()


class Asks(Protocol):
    """The asking end of route "hold", for a thread."""

    def send(self, message: Message, *arrays: object, wait_s: float = ...) -> None: ...
    def recv(self, timeout_s: float | None, *, hot_s: float = ...) -> Received | None: ...
    def losses(self) -> int: ...
    def close(self) -> None: ...


@dataclass
class Standing:
    """What was heard last, and counts for us."""

    room: h.Room | None = None
    release: h.ReleaseGroups | None = None
    """Not obeyed yet."""
    refused: str = ""
    """Why the last page was not kept; empty once one was."""
    lost: list[tuple[int, int]] = field(default_factory=list)
    """(layer, page) that the journal has no more: its bytes are not those that were kept. Not seen to yet."""


class HoldChannel:
    """One conversation at a time."""

    def __init__(
        self,
        asker: Asks,
        form: h.PageForm,
        on_placed: Callable[[h.Placed], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """on_placed: told which groups of this conversation a worker holds now."""
        self.form, self.standing = form, Standing()
        self.places: dict[tuple[int, int], h.PagePlace] = {}
        """Where the journal has a page, by (layer, page): of what the sequence holds now."""
        self.conversation = 0
        self.opened: h.ConversationOpened | None = None
        self._asker, self._on_placed, self._clock = asker, on_placed, clock
        self._tickets = itertools.count(1)
        self._opening = 0
        self._open_at_s = float("-inf")
        self._in_flight: dict[int, tuple[int, int, int]] = {}
        """ticket -> (layer, page, bytes)"""
        self._kept: set[tuple[int, int]] = set()
        """Pages that this conversation has, or was handed."""
        self._owed: list[Message] = []
        """What the broker must hear of, and could not be told yet."""
        self._losses, self._try_at_s, self._is_heard = asker.losses(), 0.0, True

    @property
    def bytes_in_flight(self) -> int:
        """Bytes of pages handed over and not answered."""
        return sum(n_bytes for _, _, n_bytes in self._in_flight.values())

    @property
    def n_in_flight(self) -> int:
        """Pages of one layer handed over and not answered."""
        return len(self._in_flight)

    @property
    def is_open(self) -> bool:
        """The broker knows what we speak of."""
        return self.conversation != 0

    # --- a conversation begins and ends

    def open(self, ids: NDArray[np.int32], timeout_s: float = 0.0) -> bool:
        """Have a conversation of the tokens ids i32 [n]; waits up to timeout_s for the answer. True when it is open.

        A broker that is not there yet, because it was started again with us, is awaited, too.
        """
        until_s = self._clock() + timeout_s
        while not self.is_open:
            now = self._clock()
            if not self._opening and now >= self._try_at_s:
                self._opening, self._open_at_s = next(self._tickets), now
                if not self._say(h.OpenConversation(self._opening, self.form, len(ids)), ids):
                    self._opening = 0
            if (left_s := until_s - now) <= 0:
                break
            self.hear(min(left_s, RETRY_S / 4))
        if self._opening and self._clock() - self._open_at_s > 30 * RETRY_S:
            self._opening = 0
        return self.is_open

    def close(self) -> None:
        """The sequence is given up."""
        self._give_up()
        self.places.clear()
        self.opened = None

    def cut(self, n_tokens: int) -> None:
        """Positions from n_tokens on are void."""
        page = n_tokens // self.form.page_tokens
        self.places = {key: place for key, place in self.places.items() if key[1] < page}
        self._kept = {key for key in self._kept if key[1] < page}
        self._in_flight = {t: what for t, what in self._in_flight.items() if what[1] < page}
        self.standing.release = None
        if self.is_open and not self._say(h.CutConversation(self.conversation, n_tokens)):
            self._give_up()  # what it does not know it must not go on with

    def leave(self) -> None:
        """Leave the bus."""
        self._asker.close()

    # --- saying things

    def wants(self, layer: int, page: int) -> bool:
        """Whether the page is not handed over yet."""
        return (layer, page) not in self._kept

    def keep(
        self, layer: int, page: int, image: tuple[np.ndarray, np.ndarray], ids: NDArray[np.int32]
    ) -> bool:
        """Hand over a full page and its token ids i32 [page_tokens]; False: later."""
        n_bytes = self.form.image_bytes
        if not self.is_open or self._clock() < self._try_at_s:
            return False
        n_pages = len(self._in_flight)
        if n_pages and ((n_pages + 1) * n_bytes > IN_FLIGHT_BYTES_MAX or n_pages >= IN_FLIGHT_PAGES_MAX):
            return False
        ticket, form = next(self._tickets), self.form
        value_bytes = form.value_bytes
        what = h.KeepPage(
            ticket, self.conversation, layer, page, form.page_tokens, form.key_bytes, value_bytes
        )
        if not self._say(what, *image, ids):
            return False
        self._in_flight[ticket] = (layer, page, n_bytes)
        self._kept.add((layer, page))
        return True

    def keep_state(self, position: int, blob: np.ndarray, ids: NDArray[np.int32]) -> None:
        """Hand over the recurrent state at `position`; lost when it cannot be said now."""
        if self.is_open:
            ticket = next(self._tickets)
            self._say(h.KeepState(ticket, self.conversation, position, blob.nbytes), blob, ids)

    def holds(self, group_first: int, n_tokens: int) -> bool:
        """What is in memory now; False: it could not be said."""
        return self.is_open and self._say(h.HostHolds(self.conversation, group_first, n_tokens))

    def released(self, asked: h.ReleaseGroups, group_first: int) -> None:
        """Answers ReleaseGroups; what cannot be said now stays to be answered."""
        answer = h.GroupsReleased(asked.ticket, asked.conversation, group_first)
        if asked.conversation != self.conversation or self._say(answer):
            self.standing.release = None

    def erred(self, worker: int, epoch: int, cause: str, detail: str, *, quarantine: bool) -> None:
        """A worker's answer was late, wrong or damaged."""
        self._owe(h.WorkerErred(worker, epoch, cause, detail, quarantine))

    def _give_up(self) -> None:
        if self.is_open:
            self._owe(h.CloseConversation(self.conversation))
        self._drop()

    def _owe(self, message: Message) -> None:
        """Say it now, or as soon as it can be said: a conversation nobody closes keeps its files for ever."""
        self._owed.append(message)
        self._pay()

    def _pay(self) -> None:
        while self._owed and self._say(self._owed[0]):
            self._owed.pop(0)

    def _say(self, message: Message, *arrays: object) -> bool:
        try:
            self._asker.send(message, *arrays, wait_s=0.0)
        except OutriggerError as error:
            if self._is_heard:
                log.info("broker cannot be told", error=str(error), about=type(message).__name__)
            self._try_at_s, self._is_heard = self._clock() + RETRY_S, False
            return False
        self._is_heard = True
        return True

    # --- hearing things

    def hear(self, timeout_s: float = 0.0) -> None:
        """Take in what has come; wait up to timeout_s for the first."""
        if (losses := self._asker.losses()) != self._losses:
            self._losses = losses
            self._owed.clear()
            log.warning("broker lost; pages kept so far stay in the journal")
            self._drop()
        if self._owed and self._clock() >= self._try_at_s:
            self._pay()
        while (received := self._asker.recv(timeout_s)) is not None:
            timeout_s = 0.0
            self._take(received.message)

    def _take(self, message: Message) -> None:
        match message:
            case h.ConversationOpened() if message.ticket == self._opening:
                self._opening, self.conversation, self.opened = 0, message.conversation, message
                self._kept = {(place.layer, place.page) for place in message.places}
                self.places |= {(place.layer, place.page): place for place in message.places}
            case h.PageKept():
                if (what := self._in_flight.pop(message.ticket, None)) is not None:
                    self.places[what[:2]] = message.place
                    self.standing.refused = ""
            case h.ReleaseGroups() if message.conversation == self.conversation:
                self.standing.release = message
            case h.Placed() if message.conversation == self.conversation:
                self._on_placed(message)
            case h.PageLost() if message.conversation == self.conversation:
                at = message.layer, message.page
                self.places.pop(at, None)
                self._kept.discard(at)
                self.standing.lost.append(at)
            case h.Room():
                self.standing.room = message
            case h.HoldFailed():
                self._failed(message)
            case _:
                pass  # of a conversation that is over

    def _failed(self, failed: h.HoldFailed) -> None:
        if failed.ticket == self._opening:
            self._opening = 0
        what = self._in_flight.pop(failed.ticket, None)
        if what is not None:
            self._kept.discard(what[:2])
        self.standing.refused = failed.detail or failed.cause
        self._try_at_s = self._clock() + RETRY_S
        log.warning("broker refused", cause=failed.cause, detail=failed.detail)
        if failed.cause == "unknown_conversation":
            self._drop()

    def _drop(self) -> None:
        """The conversation is void at the far end; what the journal has stays where it is."""
        self.conversation = self._opening = 0
        self._in_flight.clear()
        self._kept.clear()
        self.standing.lost.clear()
        self.standing.release = None
