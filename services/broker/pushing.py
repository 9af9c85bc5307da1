"""What one worker is given, and what it said of it. Pure: messages of route PAGES in, messages out; one a worker.

Pages are given in order, page by page, in every layer, as many at once as PUSHES_MAX. A worker numbers pages from its
first one, so that each of several holds a run of groups that begins at 0 for it. Whatever goes wrong, nothing is lost:
the journal has every page, and the host attends what no worker holds.
"""

from __future__ import annotations

import itertools
import secrets

import msgspec

from common.limits import N_CTX_MAX
from common.wire import held as h
from services.broker.ledger import Held

PUSHES_MAX = 8
"""Pages given and not answered: enough to fill the cable, few enough to cut a sequence at once."""
RETRIES_MAX = 3
"""Failures in a row after which a worker is left alone until it comes anew."""
BYTES_WEIGHT = 0.3
"""Of the newest push in the measured speed."""

Said = h.HoldPages | h.PushPage | h.CutPages


class Pushing:
    """One worker. Every method returns what is to be said to its bridge."""

    def __init__(self, worker: int) -> None:
        self.worker = worker
        self.epoch = 0
        """Of the grant; 0: nothing is granted."""
        self.is_up = False
        self.quarantined = False
        self.tokens_max = 0
        self.n_rows = 0
        """Of the newest query that was measured; 0: none was."""
        self.wait_s = 0.0
        """Seconds of the way to it and back."""
        self.pace_s = 0.0
        """Seconds that it took of late to attend a group, for each row of a query; 0: not measured."""
        self._paced: h.PagesPaced | None = None
        """What the bridge said last."""
        self.bytes_per_s = 0.0
        self.n_pushes = 0
        self.n_mismatches = 0
        self.n_repushed = 0
        """Pages of the same conversation that were given more than once."""
        self.group_first = self.group_end = 0
        """The groups that are for this worker."""
        self.has_run = False
        """Whether it was given groups of this conversation."""
        self.granted_tokens = 0
        """What was granted last, also while it is away."""
        self.relief: Pushing | None = None
        """Whose run begins where this one ends."""
        self.answers_beyond = False
        """Whether it answers for all it holds, beyond its run, until the next one is filled."""
        self._held: Held | None = None
        self._keys: dict[int, int] = {}
        """layer -> keys the worker said it holds, counted from its first group."""
        self._flying: dict[int, tuple[int, int]] = {}
        """ticket -> (page, layer)."""
        self._asked = 0
        """Ticket of the grant that is awaited; 0: none."""
        self._cuts: set[int] = set()
        """Tickets of cuts that it did not confirm yet: until then what it keeps of this conversation may be void."""
        self._failures = 0
        self._given: set[tuple[int, int]] = set()
        """(page, layer) of this conversation that were given before."""
        self._sessions: dict[tuple[int, int], int] = {}
        """(conversation, first group) -> name of what a worker keeps of it: other pages under another name."""
        self._tickets = itertools.count(1)

    @property
    def conversation(self) -> int:
        """Whose pages the worker is for; 0: nobody's."""
        return self._held.number if self._held else 0

    def place_of(self, ticket: int) -> h.PagePlace | None:
        """The page that was given with this ticket and not answered."""
        if self._held is None or ticket not in self._flying:
            return None
        return self._held.places.get(self._flying[ticket])

    @property
    def groups_placed(self) -> tuple[int, int]:
        """[first, end) of the groups that the worker holds in every layer."""
        if self._held is None or not self.epoch or self.quarantined:
            return self.group_first, self.group_first
        end = self.group_first + self._groups_held if self.has_run else 0
        return self.group_first, max(
            self.group_first, end if self.answers_beyond else min(end, self.group_end)
        )

    @property
    def is_filled(self) -> bool:
        """Whether it holds all of its run that is kept."""
        if self._held is None or not self.epoch:
            return False
        return self.group_first + self._groups_held >= min(self.group_end, self._held.groups_kept)

    @property
    def _groups_held(self) -> int:
        assert self._held is not None, "it holds pages of a conversation"
        return min(self._keys.values(), default=0) // self._held.form.group_tokens

    # --- what happens

    def serve(self, held: Held | None) -> list[Said]:
        """The worker is for this conversation from now on."""
        if held is self._held:
            return self.go_on()
        self._forget()
        self._given.clear()
        self._held, self.has_run, self.granted_tokens = held, False, 0
        return self._ask()

    def assign(self, group_first: int, group_end: int) -> list[Said]:
        """These groups are for this worker. Another first group means that it begins anew."""
        self.has_run = group_end > group_first
        anew = self.has_run and group_first != self.group_first
        self.group_first = group_first if self.has_run else self.group_first
        self.group_end = max(self.group_first, group_end if self.has_run else 0)
        if anew:
            self._forget()
            return self._ask()
        return self.go_on()

    def up(self, message: h.PagesUp) -> list[Said]:
        """A worker is there."""
        if self.is_up and (self.epoch or self._asked):
            return []  # said again: WatchPages is repeated
        self.is_up, self._failures = True, 0
        self._forget()
        return self._ask()

    def down(self, message: h.PagesDown) -> None:
        """Its pages are lost to us; the next one that comes is another chance."""
        self.is_up, self.quarantined = False, False
        self._forget()

    def paced(self, message: h.PagesPaced) -> None:
        """The bridge measured how long its answers take; it says so again and again, also when there were no more."""
        if message == self._paced:
            return
        self._paced = message
        self.wait_s, self.pace_s, self.n_rows = message.wait_s, message.row_s, message.n_rows

    def forget_pace(self) -> None:
        """What was measured is too old to go by."""
        self.wait_s = self.pace_s = 0.0

    def erred(self, message: h.WorkerErred) -> None:
        """The host could not use an answer. Quarantine ends when another worker, or a new life, comes up."""
        self.quarantined = self.quarantined or message.quarantine

    def granted(self, message: h.PagesGranted) -> list[Said]:
        """It made room, and may hold pages from before."""
        if message.ticket != self._asked or self._held is None:
            return []
        form, self._asked = self._held.form, 0
        self.epoch, self.tokens_max = message.epoch, message.tokens_max
        self.granted_tokens = message.tokens_max
        here = (self._held.pages_kept - self.group_first * form.group_pages) * form.page_tokens
        keys = max(0, min(message.n_keys, here))
        keys -= keys % form.page_tokens
        self._keys = dict.fromkeys(form.layers, keys)
        cut = [self._cut(keys)] if keys < message.n_keys else []
        return [*cut, *self.go_on()]

    def pushed(self, message: h.PagePushed, seconds_min: float = 1e-6) -> list[Said]:
        """It holds a page, and no more keys of that layer than it was given, whatever it says."""
        if message.epoch != self.epoch or not self._held:
            return []
        if (at := self._flying.pop(message.ticket, None)) is None:
            return []
        (page, layer), form = at, self._held.form
        given = (page + 1 - self.group_first * form.group_pages) * form.page_tokens
        self._keys[layer] = min(message.n_keys, given)
        self._failures = 0
        self.n_pushes += 1
        speed = self._held.form.image_bytes / max(message.seconds, seconds_min)
        old = self.bytes_per_s or speed
        self.bytes_per_s = old + BYTES_WEIGHT * (speed - old)
        return self.go_on()

    def failed(self, message: h.PushFailed) -> list[Said]:
        """It has not carried something out. Memory short: it holds what it holds. Else it begins anew, a few times."""
        if message.ticket == self._asked:
            self._asked = 0
        elif self._flying.pop(message.ticket, None) is None:
            return []
        self._failures += 1
        self.n_mismatches += message.cause == "damaged"
        if message.cause == "memory" and self._held is not None and self.epoch:
            keys = min(self._keys.values(), default=0)
            self.tokens_max = min(self.tokens_max, keys - keys % self._held.form.group_tokens)
            self.granted_tokens = self.tokens_max
            return []
        self._forget()
        return self._ask() if self._failures < RETRIES_MAX else []

    def cut(self, n_tokens: int) -> list[Said]:
        """Positions from n_tokens on are void, here too, and so is what flies behind them."""
        if self._held is None:
            return []
        form = self._held.form
        page_end = n_tokens // form.page_tokens
        keys = max(0, page_end - self.group_first * form.group_pages) * form.page_tokens
        self._flying = {ticket: at for ticket, at in self._flying.items() if at[0] < page_end}
        self._given = {at for at in self._given if at[0] < page_end}
        if not self.epoch:
            self.drop_sessions(self.conversation)  # what a worker kept from before may be void
            return []
        self._keys = {layer: min(held, keys) for layer, held in self._keys.items()}
        return [self._cut(keys), *self.go_on()]

    def drop_sessions(self, conversation: int) -> None:
        """What a worker still keeps of this conversation must not be taken for it."""
        for at in [at for at in self._sessions if at[0] == conversation]:
            del self._sessions[at]

    def was_cut(self, message: h.PagesCut) -> None:
        """It forgot what is void."""
        self._cuts.discard(message.ticket)

    def go_on(self) -> list[Said]:
        """Give it the next pages that are kept, in order."""
        if self._held is None or not self.epoch or self.quarantined:
            return []
        form = self._held.form
        said: list[Said] = []
        first = self.group_first * form.group_pages
        room = first + self.tokens_max // form.group_tokens * form.group_pages
        end = min(self._held.groups_kept, self.group_end) * form.group_pages
        flying = set(self._flying.values())
        for page in range(first + min(self._keys.values(), default=0) // form.page_tokens, min(end, room)):
            for layer in form.layers:
                if len(self._flying) >= PUSHES_MAX:
                    return said
                if (page, layer) in flying or (page - first) * form.page_tokens < self._keys[layer]:
                    continue
                ticket = self._ticket()
                self._flying[ticket] = (page, layer)
                self.n_repushed += (page, layer) in self._given
                self._given.add((page, layer))
                place = msgspec.structs.replace(self._held.places[page, layer], page=page - first)
                said.append(h.PushPage(ticket, self.epoch, self.conversation, place))
        return said

    # --- inside

    def _ask(self) -> list[Said]:
        """Ask for room for everything the sequence may become: what is granted is what there is."""
        if self._held is None or not self.is_up or self.quarantined:
            return []
        form, number = self._held.form, self._held.number
        session = self._sessions.setdefault((number, self.group_first), secrets.randbits(62) | 1)
        self._asked = self._ticket()
        wanted = N_CTX_MAX // form.page_tokens * form.image_bytes * len(form.layers)
        return [h.HoldPages(self._asked, number, form, wanted, session)]

    def _cut(self, keys: int) -> h.CutPages:
        ticket = self._ticket()
        self._cuts.add(ticket)
        return h.CutPages(ticket, self.epoch, keys)

    def _forget(self) -> None:
        self.epoch, self._asked, self.tokens_max = 0, 0, 0
        if self._cuts:
            self.drop_sessions(self.conversation)
            self._cuts.clear()
        self._flying.clear()
        self._keys.clear()

    def _ticket(self) -> int:
        return next(self._tickets)
