"""The broker's record of where the copies of every page are. Pure: no files, no sockets, no clock; holds no bytes.

A page is one page of all layers of a conversation. It is on the host, in the journal, or in both; workers may have it,
too, and never count as a copy. Whatever would take a copy away is done in two steps: `prepare` says what may go and
pins the copy that stays, `complete` or `abort` ends it. A step that would leave a page without a copy is a LedgerError.

Called by broker.py; the property that no page is ever without a copy is tests/services/broker/test_ledger.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from common.errors import OutriggerError
from common.wire.held import PageForm, PagePlace
from services.broker.release import release_end


class LedgerError(OutriggerError):
    """What was asked does not fit what the ledger knows; nothing was changed."""

    code = 701


@dataclass
class Held:
    """One conversation's pages."""

    number: int
    form: PageForm
    host_tokens: int
    """The host's limit."""
    n_tokens: int = 0
    """Positions that the host said the sequence has."""
    group_first: int = 0
    """The host has the groups from here on in memory."""
    places: dict[tuple[int, int], PagePlace] = field(default_factory=dict)
    """(page, layer) -> where the journal has it."""
    releasing: int | None = None
    """A release up to this group was prepared and not answered yet."""
    last_use: int = 0

    @property
    def pages_kept(self) -> int:
        """Pages [0, pages_kept) are in the journal in every layer."""
        page = 0
        while all((page, layer) in self.places for layer in self.form.layers):
            page += 1
        return page

    @property
    def groups_kept(self) -> int:
        """Groups [0, groups_kept) are in the journal."""
        return self.pages_kept // self.form.group_pages

    @property
    def pages_needed(self) -> int:
        """Pages [0, pages_needed) have, or may soon have, no copy but the journal's."""
        return max(self.group_first, self.releasing or 0) * self.form.group_pages

    @property
    def files(self) -> set[str]:
        """Journal files that hold pages of this conversation."""
        return {place.path for place in self.places.values()}

    def ordered(self, page_first: int = 0) -> list[PagePlace]:
        """Places of the kept pages from page_first on, page by page, layers in the form's order."""
        pages = range(page_first, self.pages_kept)
        return [self.places[page, layer] for page in pages for layer in self.form.layers]


class Ledger:
    """All conversations that are open."""

    def __init__(self) -> None:
        self.open: dict[int, Held] = {}
        self._uses = 0

    def of(self, conversation: int) -> Held:
        """The conversation of this number, now used last. Raises LedgerError when it is not open."""
        if (held := self.open.get(conversation)) is None:
            raise LedgerError(f"conversation {conversation} is not open")
        self._uses += 1
        held.last_use = self._uses
        return held

    def begin(self, conversation: int, form: PageForm, host_tokens: int, places: Iterable[PagePlace]) -> Held:
        """A conversation is opened; the journal has these pages of it."""
        if conversation in self.open:
            raise LedgerError(f"conversation {conversation} is open already")
        held = self.open[conversation] = Held(conversation, form, host_tokens)
        held.places = {(place.page, place.layer): place for place in places}
        return self.of(conversation)

    def end(self, conversation: int) -> None:
        """The host gave it up: nobody needs its pages any more."""
        self.open.pop(conversation, None)

    def kept(self, conversation: int, place: PagePlace) -> None:
        """The journal has a page of one layer. A page that only the journal has is not written anew."""
        held = self.of(conversation)
        if place.layer not in held.form.layers:
            raise LedgerError(f"conversation {conversation} has no pages of layer {place.layer}")
        if place.page < held.pages_needed and (place.page, place.layer) in held.places:
            raise LedgerError(f"page {place.page} has left the host: nobody can have written it anew")
        held.places[place.page, place.layer] = place

    def host_holds(self, conversation: int, group_first: int, n_tokens: int) -> None:
        """What the host says it has in memory. It cannot have let go what the journal has not."""
        held = self.of(conversation)
        if group_first > held.groups_kept:
            raise LedgerError(
                f"the host says it holds groups from {group_first} on; the journal has {held.groups_kept}"
            )
        if group_first * held.form.group_tokens > n_tokens:
            raise LedgerError(
                f"group {group_first} begins behind the {n_tokens} tokens that the sequence has"
            )
        held.group_first, held.n_tokens = group_first, n_tokens

    def prepare_release(self, conversation: int) -> int | None:
        """The group up to which the host is to free its memory, or None. Pins these pages in the journal."""
        held = self.of(conversation)
        if held.releasing is not None:
            return None
        end = release_end(
            n_tokens=held.n_tokens,
            group_first=held.group_first,
            groups_kept=held.groups_kept,
            group_tokens=held.form.group_tokens,
            host_tokens=held.host_tokens,
        )
        if end == held.group_first:
            return None
        held.releasing = end
        return end

    def complete_release(self, conversation: int, group_first: int) -> int:
        """The host freed what it could: it holds the groups from group_first on. Returns how many groups went."""
        held = self.of(conversation)
        if held.releasing is None or not held.group_first <= group_first <= held.releasing:
            raise LedgerError(
                f"released up to group {group_first}; asked were {held.group_first} to {held.releasing}"
            )
        gone = group_first - held.group_first
        held.group_first, held.releasing = group_first, None
        return gone

    def abort_release(self, conversation: int) -> None:
        """It was not carried out; the host holds what it held."""
        self.of(conversation).releasing = None

    def cut(self, conversation: int, n_tokens: int) -> list[PagePlace]:
        """Positions from n_tokens on are void. What remains of the group that is cut lies in the host's memory: it was
        recalled before. Returns the void pages' places."""
        held = self.of(conversation)
        page_end = n_tokens // held.form.page_tokens
        held.group_first = min(held.group_first, n_tokens // held.form.group_tokens)
        void = [place for (page, _), place in held.places.items() if page >= page_end]
        held.places = {at: place for at, place in held.places.items() if at[0] < page_end}
        held.n_tokens = min(held.n_tokens, n_tokens)
        held.releasing = None
        return void

    def lost(self, conversation: int, place: PagePlace) -> None:
        """The journal's copy turned out damaged. Raises LedgerError when it was the only one: then keep its file."""
        held = self.of(conversation)
        if place.page < held.pages_needed:
            raise LedgerError(f"page {place.page} of layer {place.layer} has no other copy")
        held.places.pop((place.page, place.layer), None)

    def files_in_use(self) -> set[str]:
        """Journal files that must not be dropped: those with pages of an open conversation."""
        return set().union(*(held.files for held in self.open.values()))
