"""The broker process: what mac and bridge say, put to ledger, journal and pushes, and what these want said.

One event loop; the journal's reads and writes run on one thread beside it, in the order in which they were asked. No
policy here: release.py and ledger.py decide what may go, pushing.py what a worker is given.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from common.config import Settings
from common.config.page_workers import worker_numbers
from common.errors import LinkDownError, OutriggerError, ServiceError
from common.limits import MIB
from common.log import get_log
from common.metrics import Metrics
from common.wire import held as h
from common.wire.routes import HOLD, PAGES
from services.broker.journal import Journal
from services.broker.journal_lock import check_claim, claim
from services.broker.keeping import Keeping
from services.broker.ledger import Held, Ledger, LedgerError
from services.broker.looking import Looking
from services.broker.pushing import Pushing, Said
from services.broker.tally import Tally
from services.broker.workers import Workers
from services.runtime.bus import Asker, BusEvent, Owner
from services.runtime.endpoints import route_endpoint

WATCH_S = 2.0
"""How often a bridge is told that we are here: one that was started anew knows nobody."""
SYNC_S = 1.0
REST_S = 2.0
"""How long a worker rests that erred; a late answer of a busy one is no reason to do without it for long."""

log = get_log()


class Broker:
    """Made inside the loop. `start`, then run `parts`, then `close`."""

    def __init__(
        self, settings: Settings, metrics: Metrics, run_dir: Path, on_event: Callable[[BusEvent], None]
    ) -> None:
        self._settings, self._run_dir = settings, run_dir
        self._on_event = on_event
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self.ledger = Ledger()
        self._owner = Owner(HOLD, route_endpoint(run_dir, HOLD), on_event=on_event)
        self._mac: bytes | None = None
        self._bridges: list[tuple[Pushing, Asker]] = []
        self._workers = Workers(())
        self._sharing = asyncio.Lock()
        self._placed: dict[tuple[int, int], h.Placed] = {}
        """(conversation, worker) -> what the host was told last."""
        self._used: Held | None = None
        self._ticket = 0
        self._releases: dict[int, int] = {}
        """ticket of ours -> conversation, of releases that were asked for and not answered."""
        self._used_files: set[str] = set()
        self._placed_again: set[int] = set()
        self._tally, self._looking = Tally(metrics), Looking()

    async def start(self) -> None:
        """Look through the journal and connect to the bridges. Raises SettingError when its folder is not to be had."""
        broker = self._settings.broker
        self._lock = claim(Path(broker.journal_dir))
        journal = await self._off_loop(
            lambda: Journal(
                Path(broker.journal_dir),
                broker.journal_mib * MIB,
                broker.fsync,
                in_use=lambda: self._used_files,
            )
        )
        log.info("journal looked through", mib=journal.n_bytes >> 20, damaged=journal.damaged)
        self.keeping = Keeping(journal)
        for worker in worker_numbers(self._settings):
            endpoint = route_endpoint(self._run_dir, PAGES, worker)
            self._bridges.append(
                (Pushing(worker), Asker(PAGES, endpoint, name="broker", on_event=self._on_event))
            )
        self._workers = Workers([pushing for pushing, _ in self._bridges])

    def parts(self) -> dict[str, Coroutine[Any, Any, None]]:
        """What runs side by side until the end."""
        each = {
            f"bridge {pushing.worker}": self._hear_bridge(pushing, asker) for pushing, asker in self._bridges
        }
        return {"mac": self._hear_mac(), "watch": self._watch(), "sync": self._sync(), **each}

    async def close(self) -> None:
        """Force to disk what was not forced yet, and let the sockets go."""
        await self._owner.close()
        for _, asker in self._bridges:
            await asker.close()
        await self._off_loop(self.keeping.journal.close)
        self._thread.shutdown(wait=False)
        os.close(self._lock)

    # --- route HOLD

    async def _hear_mac(self) -> None:
        async for received in self._owner:
            if received.peer != self._mac:
                await self._new_mac(received.peer)
            message = received.message
            try:
                await self._heard(message, received.frames, received.at_s)
            except OutriggerError as error:
                cause = getattr(
                    error, "cause", "unknown_conversation" if self._is_unknown(message) else "order"
                )
                self._tally.failed(cause)
                log.warning("not carried out", what=type(message).__name__, cause=cause, error=str(error))
                if isinstance(
                    message, h.OpenConversation | h.KeepPage | h.KeepState
                ):  # tickets of the host's
                    await self._to_mac(h.HoldFailed(message.ticket, error.code, cause, str(error)))

    def _is_unknown(self, message: Any) -> bool:
        number = getattr(message, "conversation", None)
        return number is not None and number not in self.ledger.open

    async def _heard(self, message: Any, frames: tuple[memoryview, ...], came_s: float) -> None:
        match message:
            case h.OpenConversation():
                await self._open(message, np.frombuffer(frames[0], np.int32))
            case h.KeepPage():
                await self._keep_page(message, frames, came_s)
            case h.KeepState():
                held = self.ledger.of(message.conversation)
                ids = np.frombuffer(frames[1], np.int32)
                await self._off_loop(self.keeping.keep_state, held, ids, frames[0])
                await self._to_mac(h.StateKept(message.ticket, message.conversation, message.position))
            case h.CutConversation():
                await self._cut(message)
            case h.CloseConversation():
                await self._close(message.conversation)
            case h.HostHolds():
                self.ledger.host_holds(message.conversation, message.group_first, message.n_tokens)
                await self._plan(self.ledger.of(message.conversation))
            case h.GroupsReleased():
                await self._released(message)
            case h.WorkerErred():
                await self._worker_erred(message)

    async def _open(self, message: h.OpenConversation, ids: Any) -> None:
        number, form = self.keeping.new_number(), message.form
        limit = self._settings.host
        host_tokens = form.host_tokens(limit.kv_host_tokens, limit.kv_host_bytes)
        places, state = await self._off_loop(self.keeping.find, number, form, ids)
        held = self.ledger.begin(number, form, host_tokens, places)
        self._used_files = self.ledger.files_in_use()
        self._tally.opened(len(places))
        state_at = (state[0], state[1].path, state[1].offset, state[2], state[1].xxh3) if state else ()
        await self._to_mac(h.ConversationOpened(message.ticket, number, len(ids), tuple(places), *state_at))
        self._used = held
        await self._share(held)
        await self._tell_room(held)

    async def _keep_page(self, message: h.KeepPage, frames: tuple[memoryview, ...], came_s: float) -> None:
        held = self.ledger.of(message.conversation)
        ids = np.frombuffer(frames[2], np.int32)
        with self._tally.writing(came_s):
            place = await self._off_loop(
                self.keeping.keep_page, held, message.layer, message.page, ids, frames[:2]
            )
        self.ledger.kept(message.conversation, place)
        self._used_files = self.ledger.files_in_use()
        await self._to_mac(h.PageKept(message.ticket, message.conversation, place))
        if held.pages_kept > message.page:  # it was the last layer's
            await self._plan(held)
            await self._use(held)

    async def _plan(self, held: Held) -> None:
        """Have the host free what is too much."""
        if (end := self.ledger.prepare_release(held.number)) is not None:
            self._ticket += 1
            self._releases[self._ticket] = held.number
            await self._to_mac(h.ReleaseGroups(self._ticket, held.number, end))

    async def _released(self, message: h.GroupsReleased) -> None:
        if self._releases.pop(message.ticket, None) is None:
            return  # asked before a cut, or of an earlier life; HostHolds says what the host did
        try:
            n = self.ledger.complete_release(message.conversation, message.group_first)
        except LedgerError:
            self.ledger.abort_release(message.conversation)  # else none would ever be asked for again
            raise
        self._tally.released(n)
        if n:
            await self._plan(self.ledger.of(message.conversation))

    async def _cut(self, message: h.CutConversation) -> None:
        void = self.ledger.cut(message.conversation, message.n_tokens)
        held = self.ledger.of(message.conversation)
        self._forget_releases(held.number)
        others = {
            place for each in self.ledger.open.values() if each is not held for place in each.places.values()
        }
        for pushing, asker in self._bridges:
            if pushing.conversation == held.number:
                await self._to_bridge(pushing, asker, pushing.cut(message.n_tokens))
            else:
                pushing.drop_sessions(held.number)
        await self._off_loop(self.keeping.cut, held, message.n_tokens, void, others)
        self._used_files = self.ledger.files_in_use()

    async def _close(self, number: int) -> None:
        self.ledger.end(number)
        self._used_files = self.ledger.files_in_use()
        self._forget_releases(number)
        if self._used is not None and self._used.number == number:
            left = max(self.ledger.open.values(), key=lambda held: held.last_use, default=None)
            self._used = left
            for pushing, asker in self._bridges:
                await self._to_bridge(pushing, asker, pushing.serve(left))
        for pushing, _ in self._bridges:
            pushing.drop_sessions(number)
        self._placed = {at: placed for at, placed in self._placed.items() if at[0] != number}
        await self._off_loop(self.keeping.end, number)

    def _forget_releases(self, number: int) -> None:
        self._releases = {ticket: of for ticket, of in self._releases.items() if of != number}

    async def _worker_erred(self, message: h.WorkerErred) -> None:
        for pushing, asker in self._bridges:
            if pushing.worker == message.worker:
                log.warning(
                    "worker erred", worker=message.worker, cause=message.cause, quarantine=message.quarantine
                )
                if message.quarantine and not pushing.quarantined:
                    self._tally.quarantined()
                pushing.erred(message)
                if not message.quarantine:  # the host asks it no more until it is told anew
                    asyncio.get_running_loop().call_later(REST_S, self._placed_again.add, message.worker)
                await self._to_bridge(pushing, asker, ())

    async def _new_mac(self, peer: bytes) -> None:
        """Another life of the mac process: what the earlier one held in memory is gone, and so are its sequences."""
        if self._mac is not None:
            log.info("mac began anew", conversations=len(self.ledger.open))
        self._mac = peer
        self._placed.clear()
        for number in list(self.ledger.open):
            await self._close(number)

    # --- route PAGES

    async def _hear_bridge(self, pushing: Pushing, asker: Asker) -> None:
        async for received in asker:
            message, said = received.message, []
            match message:
                case h.PagesUp():
                    said = pushing.up(message)
                case h.PagesDown():
                    pushing.down(message)
                case h.PagesGranted():
                    said = pushing.granted(message)
                case h.PagePushed():
                    said = pushing.pushed(message)
                case h.PagesCut():
                    pushing.was_cut(message)
                case h.PagesPaced():
                    pushing.paced(message)
                case h.PushFailed():
                    damaged = pushing.place_of(message.ticket) if message.cause == "damaged" else None
                    log.warning("page not given", cause=message.cause, detail=message.detail)
                    said = pushing.failed(message)
                    if damaged is not None:
                        await self._inspect(self.ledger.open.get(pushing.conversation), damaged, counted=True)
            await self._to_bridge(pushing, asker, said)
            if isinstance(message, h.PagesUp | h.PagesDown | h.PagesGranted) and self._used is not None:
                await self._share(self._used)

    async def _use(self, held: Held) -> None:
        """Workers are for the conversation that was used last."""
        self._used = held
        await self._share(held)

    async def _share(self, held: Held) -> None:
        """Say who holds what: one plan at a time, and none any more for a conversation that is given up meanwhile."""
        askers = {pushing.worker: asker for pushing, asker in self._bridges}
        async with self._sharing:
            steps = self._workers.share(held)
            while held is self._used and (step := next(steps, None)) is not None:
                pushing, said = step
                await self._to_bridge(pushing, askers[pushing.worker], said)
        await self._tell_placed()

    async def _to_bridge(self, pushing: Pushing, asker: Asker, said: Iterable[Said]) -> None:
        """Say it, and tell mac where pages are now."""
        try:
            for message in said:
                await asker.send(message, wait_s=0.5)
        except LinkDownError as error:
            log.warning("bridge is gone", worker=pushing.worker, error=str(error))
            pushing.down(h.PagesDown(pushing.epoch, "down", str(error)))
        await self._tell_placed()

    async def _tell_placed(self) -> None:
        """Tell mac where pages are now, where that changed."""
        self._workers.settle()
        for pushing in self._workers.pushings:
            if not pushing.conversation:
                continue
            first, end = pushing.groups_placed
            placed = h.Placed(pushing.conversation, pushing.worker, pushing.epoch, first, end)
            at = pushing.conversation, pushing.worker
            before = self._placed.get(at)
            if placed != before and (end > first or (before and before.group_end > before.group_first)):
                self._placed[at] = placed
                await self._to_mac(placed)

    async def _watch(self) -> None:
        while True:
            for pushing, asker in self._bridges:
                if asker.connected:
                    with suppress(LinkDownError):
                        await asker.send(h.WatchPages(), wait_s=0)
                    if pushing.worker in self._placed_again:
                        self._placed_again.discard(pushing.worker)
                        self._placed.pop((pushing.conversation, pushing.worker), None)
                        await self._to_bridge(pushing, asker, ())
                elif pushing.is_up:
                    pushing.down(h.PagesDown(pushing.epoch, "down", "the bridge is gone"))
                    await self._to_bridge(pushing, asker, ())
            if self._used is not None:
                await self._share(self._used)
            await self._inspect(self._used, self._looking.next_place(self._used))
            self._tally.look(self.ledger, self.keeping.journal, self._workers.pushings)
            await asyncio.sleep(WATCH_S)

    async def _sync(self) -> None:
        while True:
            await asyncio.sleep(SYNC_S)
            check_claim(self.keeping.journal.directory, self._lock)
            try:
                await self._off_loop(self.keeping.journal.sync)
            except OSError as error:
                log.error("journal not forced to disk", error=str(error))

    async def _inspect(self, held: Held | None, place: h.PagePlace | None, *, counted: bool = False) -> None:
        """Hash a page in the journal. One that is not what was kept is offered no more, and the host is told."""
        if held is None or place is None:
            return
        if await self._off_loop(self.keeping.journal.is_intact, place, held.form.image_bytes):
            return
        if held.places.get((place.page, place.layer)) != place or held.number not in self.ledger.open:
            return  # it was voided meanwhile
        if not counted:
            self._tally.mismatched()
        with suppress(LedgerError):  # of a page that only the journal has the host must read the tokens again
            self.ledger.lost(held.number, place)
        await self._off_loop(self.keeping.journal.drop_damaged, place)
        await self._to_mac(h.PageLost(held.number, place.layer, place.page))

    # --- how

    async def _tell_room(self, held: Held) -> None:
        """What of it is in the journal already counts: else it would have less room the longer it is."""
        form = held.form
        token_bytes = form.image_bytes * len(form.layers) / form.page_tokens
        room = await self._off_loop(self.keeping.journal.room_bytes)
        await self._to_mac(h.Room(int(room / token_bytes) + held.pages_kept * form.page_tokens))

    async def _to_mac(self, message: Any) -> None:
        if self._mac is None:
            return
        with suppress(ServiceError):  # it is gone; a new life opens its conversations anew
            await self._owner.send(message, to=self._mac)

    async def _off_loop(self, do: Callable[..., Any], *values: Any) -> Any:
        """On the journal's thread, after what was asked before."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, do, *values)
