"""The journal by conversations: token ids become the names of contents here. Called on the journal's thread."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from common.wire.held import PageForm, PagePlace
from services.broker.chain import Ids, Key, form_key, next_key, page_keys, state_key
from services.broker.journal import Journal
from services.broker.journal_files import JournalError
from services.broker.ledger import Held


class Keeping:
    """A journal, and of each open conversation the names of its pages so far."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self._keys: dict[int, list[Key]] = {}
        self._numbers = itertools.count(1)

    def new_number(self) -> int:
        """For the next conversation."""
        return next(self._numbers)

    def find(
        self, number: int, form: PageForm, ids: Ids
    ) -> tuple[list[PagePlace], tuple[int, PagePlace, int] | None]:
        """What the journal has of these tokens: pages, and the newest state that they reach up to."""
        self._keys[number] = list(page_keys(form, ids))
        places = self.journal.find_pages(form, ids)
        n_tokens = len(places) // len(form.layers) * form.page_tokens
        return places, self.journal.find_state(form, ids, n_tokens)

    def keep_page(
        self, held: Held, layer: int, page: int, ids: Ids, parts: Sequence[memoryview]
    ) -> PagePlace:
        """Keep a page of one layer. Raises JournalError; out of order means that its content has no name yet."""
        keys, form = self._keys[held.number], held.form
        n_bytes = tuple(part.nbytes for part in parts)
        if (
            layer not in form.layers
            or len(ids) != form.page_tokens
            or n_bytes != (form.key_bytes, form.value_bytes)
        ):
            raise JournalError(
                f"a page of {n_bytes} bytes of layer {layer} is not of its conversation's form", "form"
            )
        if page > len(keys):
            raise JournalError(
                f"page {page} came before page {len(keys)}: its place is not known yet", "order"
            )
        key = next_key(keys[page - 1] if page else form_key(form), ids)
        if keys[page:] and keys[page] != key:
            del keys[page:]  # other tokens than the conversation was opened with
        if page == len(keys):
            keys.append(key)
        return self.journal.keep_page(held.number, form, layer, page, key, ids, parts)

    def keep_state(self, held: Held, ids: Ids, blob: memoryview) -> None:
        """Keep the state behind `ids`. Raises JournalError."""
        self.journal.keep_state(held.form, state_key(held.form, ids), ids, blob)

    def cut(self, held: Held, n_tokens: int, void: Sequence[PagePlace], others: set[PagePlace]) -> None:
        """Positions from n_tokens on are void; pages that other conversations have, too, stay for them."""
        del self._keys[held.number][n_tokens // held.form.page_tokens :]
        self.journal.void(void, others.__contains__)

    def end(self, number: int) -> None:
        """Nothing more comes for it."""
        self._keys.pop(number, None)
        self.journal.end_conversation(number)
