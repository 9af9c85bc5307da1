"""Aim: whatever the order of events, no page is ever without a copy, and memory is let go as the limit says.

Method: a state machine drives a ledger by every verb, beside a plain set of the copies that exist: the host's memory
and the journal. Workers come and go and count for nothing.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.wire.held import PagePlace
from services.broker.ledger import Ledger, LedgerError
from services.broker.release import release_end
from tests.services.broker.pages import FORM

LIMIT = 512


def place(layer: int, page: int, path: str = "/j/a") -> PagePlace:
    return PagePlace(layer, page, path, 4096 * (1 + page), 7)


class AnyOrder(RuleBasedStateMachine):
    """One host, one conversation; the host frees what it is told to, or less, or dies."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.ledger.begin(1, FORM, LIMIT, ())
        self.n_tokens = 0
        self.group_first = 0
        self.journal: set[tuple[int, int]] = set()
        self.asked: int | None = None

    @rule(n=st.integers(1, 700))
    def the_sequence_grows(self, n: int) -> None:
        self.n_tokens += n
        self.ledger.host_holds(1, self.group_first, self.n_tokens)

    @rule(data=st.data())
    def a_page_is_kept(self, data: st.DataObject) -> None:
        full = self.n_tokens // FORM.page_tokens
        if self.group_first * FORM.group_pages < full:
            page = data.draw(st.integers(self.group_first * FORM.group_pages, full - 1))
            layer = data.draw(st.sampled_from(FORM.layers))
            try:
                self.ledger.kept(1, place(layer, page))
            except LedgerError:
                assert (page, layer) in self.journal
            self.journal.add((page, layer))

    @rule()
    def all_pages_are_kept(self) -> None:
        for page in range(self.n_tokens // FORM.page_tokens):
            for layer in FORM.layers:
                if (page, layer) not in self.journal:
                    self.ledger.kept(1, place(layer, page))
                    self.journal.add((page, layer))

    @rule()
    def memory_is_planned(self) -> None:
        end = self.ledger.prepare_release(1)
        if end is not None:
            assert self.asked is None and end > self.group_first and self.n_tokens >= LIMIT
            self.asked = end

    @precondition(lambda self: self.asked is not None)
    @rule(data=st.data())
    def the_host_frees(self, data: st.DataObject) -> None:
        assert self.asked is not None
        self.group_first = data.draw(st.integers(self.group_first, self.asked))
        self.ledger.complete_release(1, self.group_first)
        self.asked = None

    @rule()
    def the_host_does_not_answer(self) -> None:
        self.ledger.abort_release(1)
        self.asked = None

    @rule(data=st.data())
    def the_sequence_is_cut(self, data: st.DataObject) -> None:
        self.n_tokens = data.draw(st.integers(0, self.n_tokens))
        self.group_first = min(self.group_first, self.n_tokens // FORM.group_tokens)
        self.journal = {at for at in self.journal if at[0] < self.n_tokens // FORM.page_tokens}
        self.ledger.cut(1, self.n_tokens)
        self.asked = None

    @rule(data=st.data())
    def a_lie_is_refused(self, data: st.DataObject) -> None:
        behind = self.ledger.open[1].groups_kept + data.draw(st.integers(1, 3))
        with pytest.raises(LedgerError):
            self.ledger.host_holds(1, behind, self.n_tokens + behind * FORM.group_tokens)

    @rule(data=st.data())
    def a_copy_is_damaged(self, data: st.DataObject) -> None:
        if self.journal:
            page, layer = data.draw(st.sampled_from(sorted(self.journal)))
            on_host = page >= self.group_first * FORM.group_pages
            try:
                self.ledger.lost(1, place(layer, page))
            except LedgerError:
                assert not on_host or self.asked is not None
            else:
                assert on_host
                self.journal.discard((page, layer))

    @rule()
    def the_host_dies_and_comes_back(self) -> None:
        """What the journal has whole is what there is; the host begins anew from it."""
        held = self.ledger.open[1]
        places, pages = held.ordered(), held.pages_kept
        self.ledger.end(1)
        self.ledger.begin(1, FORM, LIMIT, places)
        self.n_tokens, self.group_first, self.asked = pages * FORM.page_tokens, 0, None
        self.journal = {at for at in self.journal if at[0] < pages}
        self.ledger.host_holds(1, 0, self.n_tokens)

    @invariant()
    def every_page_has_a_copy(self) -> None:
        may_go = self.asked if self.asked is not None else self.group_first
        for page in range(may_go * FORM.group_pages):
            for layer in FORM.layers:
                assert (page, layer) in self.journal
                assert (page, layer) in self.ledger.open[1].places
        assert set(self.ledger.open[1].places) == self.journal
        assert not self.journal or self.ledger.files_in_use() == {"/j/a"}


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAnyOrder = AnyOrder.TestCase


@given(
    st.integers(0, 5000), st.integers(0, 40), st.integers(0, 40), st.integers(1, 300), st.integers(256, 2000)
)
def test_a_release_goes_forward_and_never_takes_what_is_not_kept(n_tokens, first, kept, group, limit):
    end = release_end(
        n_tokens=n_tokens, group_first=first, groups_kept=kept, group_tokens=group, host_tokens=limit
    )
    assert end == first or (first < end <= kept and end * group < n_tokens and n_tokens >= limit)


def test_memory_stays_below_the_limit_while_a_sequence_grows():
    first = 0
    for n_tokens in range(0, 8192, 64):
        in_memory = n_tokens - first * 128
        assert in_memory <= 1024
        first = release_end(
            n_tokens=n_tokens, group_first=first, groups_kept=99, group_tokens=128, host_tokens=1024
        )
    assert first > 50
