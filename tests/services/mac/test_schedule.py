"""Aim: the order of decisions for a request, from the first ubatch to its end; the lanes' shares; the choices' turns.
Method: hypothesis draws whole states and whole histories of steps; each outcome is checked against its rule."""

from __future__ import annotations

import itertools
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from services.mac.schedule import (
    CHOICE_SLICE_TOKENS,
    SHORT_SHARE,
    Balance,
    RequestView,
    Step,
    next_choice,
    next_step,
)

views = st.builds(
    RequestView,
    n_prompt=st.integers(1, 50),
    n_ctx=st.integers(50, 80),
    n_room=st.just(80),
    max_tokens=st.integers(1, 60),
    has_logits=st.booleans(),
    n_generated=st.just(0),
    credit=st.integers(0, 5),
    stopped=st.just(False),
    cancelled=st.just(False),
    expired=st.just(False),
)


@given(views)
def test_endings_come_first(view):
    assert next_step(replace(view, cancelled=True, stopped=True, expired=True)) is Step.CANCELLED
    assert next_step(replace(view, stopped=True, expired=True)) is Step.STOP
    assert next_step(replace(view, expired=True)) is Step.EXPIRED


@given(views)
def test_a_request_reads_then_writes_until_it_ends_and_never_passes_a_bound(view):
    view = replace(view, has_logits=False)
    assert next_step(view) is Step.READ
    view = replace(view, has_logits=True)
    while (step := next_step(view)) in (Step.DECODE, Step.WAIT):
        if step is Step.WAIT:
            assert view.credit == 0
            view = replace(view, credit=3)
        else:
            assert view.credit > 0
            view = replace(view, credit=view.credit - 1, n_generated=view.n_generated + 1)
    assert step is Step.LENGTH
    # The token after the last one would need a cell past the context, or was not asked for.
    assert view.n_generated == min(view.max_tokens, view.n_ctx - view.n_prompt + 1)


@given(views, st.integers(1, 60))
def test_a_request_that_outgrows_its_sequence_waits_for_room_and_only_then(view, n_generated):
    view = replace(view, has_logits=True, n_generated=n_generated, max_tokens=100, credit=1)
    roomy = next_step(replace(view, n_room=view.n_ctx))
    cramped = next_step(replace(view, n_room=view.n_prompt))
    assert roomy in (Step.DECODE, Step.LENGTH)
    assert cramped is (Step.MOVE if roomy is Step.DECODE else roomy)


steps_s = st.lists(st.floats(1e-3, 3.0), min_size=1, max_size=60)


def alternate(balance, seconds):
    """Both lanes want to compute all the time; returns what each had and the account."""
    main_s = short_s = 0.0
    for step_s in seconds:
        if short := balance.short_first:
            short_s += step_s
        else:
            main_s += step_s
        balance = balance.ran(short=short, seconds=step_s, contended=True)
    return main_s, short_s, balance


@given(steps_s)
def test_while_both_compute_each_gets_its_share_less_one_step(seconds):
    main_s, short_s, _ = alternate(Balance(), seconds)
    longest_s, total_s = max(seconds), sum(seconds)
    assert main_s >= (1 - SHORT_SHARE) * total_s - longest_s
    assert short_s >= SHORT_SHARE * total_s - longest_s


@given(st.lists(st.tuples(st.sampled_from(["both", "main", "short"]), steps_s), max_size=8))
def test_no_history_lets_one_lane_save_up_against_the_other(history):
    """Short requests come and go in any pattern: while both want to compute, the long one still gets its share."""
    balance, main_s, contended_s, longest_s, n_periods = Balance(), 0.0, 0.0, 0.0, 0
    for who, seconds in history:
        longest_s = max(longest_s, *seconds)
        if who == "both":
            had_s, _, balance = alternate(balance, seconds)
            main_s, contended_s, n_periods = main_s + had_s, contended_s + sum(seconds), n_periods + 1
            continue
        for step_s in seconds:
            balance = balance.ran(short=who == "short", seconds=step_s, contended=False)
        assert abs(balance.debt_s) <= longest_s
    assert main_s >= (1 - SHORT_SHARE) * contended_s - longest_s * n_periods - 1e-9
    assert abs(balance.debt_s) <= longest_s


def test_a_short_request_that_meets_no_debt_is_next():
    assert Balance().short_first
    after = Balance().ran(short=True, seconds=2.0, contended=True)
    assert not after.short_first
    assert after.ran(short=False, seconds=9.0, contended=False).short_first, (
        "the long one computed alone meanwhile"
    )


@given(st.integers(1, 4), st.lists(st.integers(0, 40), min_size=4, max_size=4))
def test_choices_take_turns_of_a_slice_until_all_have_ended(n_choices, lengths):
    left = dict(enumerate(lengths[:n_choices]))
    open_choices = [choice for choice in left if left[choice]]
    written, current, n_in_slice = [], 0, 0
    while open_choices:
        chosen = next_choice(open_choices, current, n_in_slice)
        n_in_slice = 0 if chosen != current else n_in_slice
        current = chosen
        written.append(current)
        n_in_slice += 1
        left[current] -= 1
        open_choices = [choice for choice in left if left[choice]]
    assert [written.count(choice) for choice in range(n_choices)] == lengths[:n_choices]
    for choice in range(n_choices):
        turns = [place for place, who in enumerate(written) if who == choice]
        gaps = [after - before - 1 for before, after in itertools.pairwise(turns)]
        assert max([*gaps, *turns[:1]], default=0) <= CHOICE_SLICE_TOKENS * (n_choices - 1)
