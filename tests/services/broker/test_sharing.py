"""Aim: each worker has one run of groups by speed and room, runs are moved seldom, and what a worker is said to hold is
what it holds, whatever comes, goes, grows and is cut.

Method: the pure plan over random workers; then a state machine of workers that only note which pages they were given,
driven through Workers and Pushing by every event there is.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.wire import held as h
from services.broker.ledger import Held
from services.broker.pushing import Pushing, Said
from services.broker.sharing import WorkerRoom, plan_shares, shares
from services.broker.workers import AWAY_S, MOVE_EVERY_S, OLD_S, Workers
from tests.services.broker.pages import FORM

GROUP = FORM.group_tokens
ROOMS = st.lists(st.tuples(st.floats(0, 10) | st.just(0.0), st.integers(0, 9000)), max_size=4)


def counts(made) -> list[int]:
    return [share.group_end - share.group_first for share in made]


@given(st.integers(0, 60), ROOMS)
def test_shares_are_one_run_each_and_leave_nothing_out_that_fits(n_groups, rooms):
    workers = [WorkerRoom(number, pace, room) for number, (pace, room) in enumerate(rooms)]
    made = shares(n_groups, workers, GROUP)
    ends = [0, *(share.group_end for share in made)]
    assert [share.group_first for share in made] == ends[:-1] and ends == sorted(ends)
    assert all(share.group_end - share.group_first <= rooms[share.worker][1] // GROUP for share in made)
    assert ends[-1] == min(n_groups, sum(room // GROUP for _, room in rooms))


def test_shares_follow_speed():
    workers = [WorkerRoom(0, 0.1, 10**6), WorkerRoom(1, 0.3, 10**6), WorkerRoom(2, 0.0, 10**6)]
    assert counts(shares(50, workers, GROUP)) == [30, 10, 10]


@pytest.mark.parametrize(("wait_s", "far"), [(0.0, 20), (0.5, 15), (2.0, 0), (9.0, 0)])
def test_a_long_way_is_worth_its_time_only_for_much_work(wait_s, far):
    workers = [WorkerRoom(0, 0.05, 10**6), WorkerRoom(1, 0.05, 10**6, wait_s=wait_s)]
    assert counts(shares(40, workers, GROUP)) == [40 - far, far]


def test_a_worker_alone_is_given_what_it_has_room_for_however_long_its_way_is():
    """What nobody holds the host attends from its disk; measured on small pages, that may look quick."""
    for group_first in (None, 0):
        alone = WorkerRoom(0, 1e-5, 4 * GROUP, group_first, wait_s=0.5)
        assert counts(plan_shares(6, [alone], GROUP)) == [4]


@given(st.integers(1, 40), st.lists(st.tuples(st.floats(0.01, 1), st.floats(0, 5)), min_size=2, max_size=3))
def test_no_other_cut_is_done_earlier(n_groups, measured):
    workers = [WorkerRoom(i, pace, 10**9, None, wait) for i, (pace, wait) in enumerate(measured)]

    def done_s(cut) -> float:
        return max(each.done_s(count) for each, count in zip(workers, cut, strict=True))

    chosen = counts(shares(n_groups, workers, GROUP))
    for giver in range(len(workers)):
        for taker in range(len(workers)):
            other = list(chosen)
            other[giver] -= 1
            other[taker] += 1
            assert chosen[giver] == 0 or done_s(chosen) <= done_s(other) * (1 + 1e-9)


@given(st.integers(0, 60), ROOMS, st.data(), st.booleans())
def test_a_plan_is_runs_in_order_within_what_was_granted(n_groups, rooms, data, may_move):
    firsts = [data.draw(st.none() | st.integers(0, 60)) for _ in rooms]
    workers = [
        WorkerRoom(number, pace, room, first)
        for number, ((pace, room), first) in enumerate(zip(rooms, firsts, strict=True))
    ]
    made = plan_shares(n_groups, workers, GROUP, may_move=may_move)
    assert {share.worker for share in made} == set(range(len(rooms)))
    taken = [group for share in made for group in range(share.group_first, share.group_end)]
    assert taken == sorted(set(taken)) and all(group < n_groups for group in taken)
    assert all(share.group_end - share.group_first <= rooms[share.worker][1] // GROUP for share in made)
    if not may_move:
        for share in made:
            if share.group_end > share.group_first and firsts[share.worker] is not None:
                assert share.group_first == firsts[share.worker]


def test_a_conversation_that_grows_moves_runs_a_few_times_only_and_is_even_enough():
    firsts: list[int | None] = [None, None]
    moves = 0
    for n_groups in range(1, 200):
        workers = [WorkerRoom(number, 0.5, 10**9, first) for number, first in enumerate(firsts)]
        made = sorted(plan_shares(n_groups, workers, GROUP), key=lambda share: share.worker)
        assert sum(counts(made)) == n_groups
        assert max(counts(made)) <= max(1, 1.5 * -(-n_groups // 2))
        for share in made:
            if share.group_end > share.group_first:
                moves += firsts[share.worker] not in (None, share.group_first)
                firsts[share.worker] = share.group_first
    assert moves <= 10


def test_what_has_room_is_used_however_much_is_left_over():
    made = plan_shares(30, [WorkerRoom(0, 0.0, GROUP)], GROUP, may_move=False)
    assert counts(made) == [1]


def test_a_worker_that_comes_late_takes_the_newest_and_nobody_begins_anew():
    made = plan_shares(8, [WorkerRoom(1, 0.1, 10**6, 0), WorkerRoom(0, 0.0, 10**6)], GROUP, may_move=False)
    assert [(share.worker, share.group_first, share.group_end) for share in made] == [(1, 0, 4), (0, 4, 8)]


def test_a_worker_that_was_slow_once_is_tried_again_though_its_bridge_repeats_itself():
    """Its pace was measured in a busy moment; since then it holds nothing, and nobody measures it."""
    now, held = 0.0, Held(1, FORM, 512)
    pushings = [Pushing(number) for number in range(2)]
    workers = Workers(pushings, clock=lambda: now)
    for page in range(8 * FORM.group_pages):
        for layer in FORM.layers:
            held.places[page, layer] = h.PagePlace(layer, page, "/j", 0, page)
    slow = h.PagesPaced(30.0, 1.0, 1)

    def has_runs() -> list[bool]:
        for pushing in pushings:
            pushing.paced(slow if pushing.worker else h.PagesPaced(0.0, 0.001, 1))
        for pushing, said in workers.share(held):
            for message in said:
                if isinstance(message, h.HoldPages):
                    pushing.granted(h.PagesGranted(message.ticket, 1 + pushing.worker, 1, 1, 100 * GROUP, 0))
        return [pushing.has_run for pushing in pushings]

    for pushing in pushings:
        pushing.up(h.PagesUp(1, "x", 0))
    has_runs()  # asks for room
    assert has_runs() == [True, False]
    now += OLD_S - 1
    assert has_runs() == [True, False]
    now += 1
    assert has_runs() == [True, True]
    now += 1
    assert has_runs() == [True, True], "what was said before must not count as a new measurement"


class FarEnd:
    """One worker and its bridge: notes the pages it was given, and keeps them under a session's name."""

    def __init__(self) -> None:
        self.up = True
        self.session = 0
        self.epoch = 0
        self.pages: dict[int, list[tuple[int, int]]] = {}
        """layer -> (page of the conversation, its version) in the order of the worker's own numbers."""


class AnyOrder(RuleBasedStateMachine):
    """Two or three workers; each message that is said waits until the machine lets it arrive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.held = Held(1, FORM, 512)
        self.version = 0
        self.n_pages = 0
        self.pushings = [Pushing(number) for number in range(3)]
        self.ends = [FarEnd() for _ in self.pushings]
        self.workers = Workers(self.pushings, clock=lambda: self.now)
        self.waiting: list[list[Said]] = [[] for _ in self.pushings]
        self.epochs = 0
        for number in range(2):
            self.say(number, self.pushings[number].up(h.PagesUp(1, "x", 0)))
        self.ends[2].up = False
        self.share()

    def say(self, number: int, said: list[Said]) -> None:
        self.waiting[number] += said

    def share(self) -> None:
        for pushing, said in self.workers.share(self.held):
            self.say(pushing.worker, said)

    @rule(n=st.integers(1, 5))
    def pages_are_kept(self, n: int) -> None:
        for page in range(self.n_pages, self.n_pages + n):
            for layer in FORM.layers:
                self.held.places[page, layer] = h.PagePlace(layer, page, "/j", self.version, page)
        self.n_pages += n
        self.share()

    @precondition(lambda self: any(self.waiting))
    @rule(data=st.data(), n=st.integers(1, 40))
    def messages_arrive(self, data, n: int) -> None:
        number = data.draw(st.sampled_from([i for i, said in enumerate(self.waiting) if said]))
        for _ in range(min(n, len(self.waiting[number]))):
            self.arrive(number, self.waiting[number].pop(0))

    def arrive(self, number: int, said: Said) -> None:
        end, pushing = self.ends[number], self.pushings[number]
        match said:
            case h.HoldPages():
                if said.session != end.session:
                    end.pages = {layer: [] for layer in FORM.layers}
                self.epochs += 1
                end.session, end.epoch = said.session, self.epochs
                n_keys = min(map(len, end.pages.values())) * FORM.page_tokens
                for pages in end.pages.values():
                    del pages[n_keys // FORM.page_tokens :]
                granted = h.PagesGranted(said.ticket, end.epoch, 1, 1, (4 + 4 * number) * GROUP, n_keys)
                self.say(number, pushing.granted(granted))
                self.share()
            case h.PushPage() if said.epoch == end.epoch:
                layer, at = said.place.layer, said.place.page
                pages = end.pages[layer]
                assert at <= len(pages), "pages follow each other without gaps"
                del pages[at:]
                pages.append((said.place.xxh3, said.place.offset))
                told = h.PagePushed(said.ticket, said.epoch, layer, len(pages) * FORM.page_tokens, 0.1)
                self.say(number, pushing.pushed(told))
            case h.CutPages() if said.epoch == end.epoch:
                for pages in end.pages.values():
                    del pages[said.n_keys // FORM.page_tokens :]
                pushing.was_cut(h.PagesCut(said.ticket, said.epoch, said.n_keys))
            case _:  # of an epoch that is over
                self.say(number, pushing.failed(h.PushFailed(said.ticket, said.epoch, 1, "stale_epoch", "")))
        self.workers.settle()

    @rule(number=st.integers(0, 2), forgets=st.booleans())
    def a_worker_goes_or_comes(self, number: int, forgets: bool) -> None:
        end, pushing = self.ends[number], self.pushings[number]
        end.up, self.waiting[number] = not end.up, []
        if end.up:
            if forgets:
                end.session, end.pages = 0, {}
            self.say(number, pushing.up(h.PagesUp(1, "x", 0)))
        else:
            pushing.down(h.PagesDown(1, "down", ""))
        self.share()

    @rule(
        seconds=st.sampled_from([1.0, AWAY_S + 1, MOVE_EVERY_S + 1]),
        paces=st.lists(st.floats(0.1, 5), min_size=3),
    )
    def time_passes(self, seconds: float, paces: list[float]) -> None:
        self.now += seconds
        for pushing, pace in zip(self.pushings, paces, strict=False):
            pushing.paced(h.PagesPaced(0.1, pace, 6))
        self.share()

    @precondition(lambda self: self.n_pages > 2)
    @rule(data=st.data())
    def the_end_is_cut_off(self, data) -> None:
        self.n_pages = data.draw(st.integers(0, self.n_pages - 1))
        self.version += 1
        self.held.places = {at: place for at, place in self.held.places.items() if at[0] < self.n_pages}
        for number, pushing in enumerate(self.pushings):
            self.say(number, pushing.cut(self.n_pages * FORM.page_tokens))

    @invariant()
    def what_is_placed_is_held(self) -> None:
        for number, (pushing, end) in enumerate(zip(self.pushings, self.ends, strict=True)):
            first, placed_end = pushing.groups_placed
            if placed_end == first:
                continue
            assert end.up and pushing.epoch == end.epoch and placed_end <= self.held.groups_kept
            for layer in FORM.layers:
                held = end.pages[layer]
                for page in range(first * FORM.group_pages, placed_end * FORM.group_pages):
                    place = self.held.places[page, layer]
                    mine = held[page - first * FORM.group_pages]
                    assert mine == (place.xxh3, place.offset), (number, page, layer)

    def teardown(self) -> None:
        """When everything that was said arrives and nothing more happens, all that has room is placed."""
        for number in (0, 1):
            if not self.ends[number].up:
                self.a_worker_goes_or_comes(number, forgets=True)
        for _ in range(6):
            self.now += MOVE_EVERY_S + AWAY_S
            self.share()
            while any(self.waiting):
                for number, said in enumerate(self.waiting):
                    while said:
                        self.arrive(number, said.pop(0))
            self.what_is_placed_is_held()
        up = [pushing for pushing in self.pushings if pushing.is_up]
        assert all(pushing.is_filled for pushing in up if pushing.has_run)


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_what_a_worker_is_said_to_hold_it_holds = AnyOrder.TestCase


@pytest.mark.parametrize("back_after_s", [AWAY_S / 2, 3 * AWAY_S])
def test_a_worker_that_went_is_waited_for_and_then_done_without(back_after_s):
    machine = AnyOrder()
    machine.n_pages = 0
    machine.pages_are_kept(8)

    def let_arrive() -> None:
        while any(machine.waiting):
            for number, said in enumerate(machine.waiting):
                while said:
                    machine.arrive(number, said.pop(0))

    let_arrive()
    assert [pushing.groups_placed for pushing in machine.pushings[:2]] == [(0, 2), (2, 4)]
    machine.a_worker_goes_or_comes(0, forgets=False)
    machine.now += back_after_s
    machine.share()
    let_arrive()
    here = machine.pushings[1].groups_placed
    assert here == ((2, 4) if back_after_s < AWAY_S else (0, 4))
    machine.a_worker_goes_or_comes(0, forgets=False)
    let_arrive()
    placed = sorted(pushing.groups_placed for pushing in machine.pushings[:2])
    assert placed == [(0, 2), (2, 4)]


def test_a_worker_holds_no_more_than_it_was_given_whatever_it_says():
    held, pushing = Held(1, FORM, 512), Pushing(0)
    held.places = {(page, n): h.PagePlace(n, page, "/j", 0, page) for page in range(4) for n in FORM.layers}
    pushing.serve(held)
    (ask,) = pushing.up(h.PagesUp(1, "x", 0))
    pushing.assign(0, 2)
    said = pushing.granted(h.PagesGranted(ask.ticket, 7, 1, 1, 4 * GROUP, 0))
    for push in said[: len(FORM.layers)]:
        pushing.pushed(h.PagePushed(push.ticket, 7, push.place.layer, 1 << 20, 0.1))
    assert pushing.groups_placed == (0, 0) and not pushing.is_filled


def test_pages_of_another_conversation_are_not_given_again():
    held = [Held(number, FORM, 512) for number in (1, 2)]
    pushing = Pushing(0)
    for each in held:
        each.places = {
            (page, n): h.PagePlace(n, page, "/j", 0, page) for page in range(4) for n in FORM.layers
        }
    pushing.up(h.PagesUp(1, "x", 0))
    for epoch, each in enumerate(held, 1):
        (ask,) = pushing.serve(each)
        pushing.assign(0, 2)
        assert pushing.granted(h.PagesGranted(ask.ticket, epoch, each.number, 1, 4 * GROUP, 0))
    assert pushing.n_repushed == 0
    (ask,) = [said for said in pushing.failed(_failed(pushing)) if isinstance(said, h.HoldPages)]
    again = pushing.granted(h.PagesGranted(ask.ticket, 3, 2, 1, 4 * GROUP, 0))
    assert pushing.n_repushed == len(again) > 0


def _failed(pushing: Pushing) -> h.PushFailed:
    """The oldest page on its way was not taken."""
    ticket = next(number for number in range(1, 99) if pushing.place_of(number))
    return h.PushFailed(ticket, pushing.epoch, 1, "refused", "")
