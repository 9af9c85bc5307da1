"""Aim: the order of decisions for a request, from the first ubatch to its end.
Method: hypothesis draws whole states; each ending is checked against the rule it stands for."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from services.mac.schedule import RequestView, Step, next_step

views = st.builds(
    RequestView,
    n_prompt=st.integers(1, 50),
    n_ctx=st.integers(50, 80),
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
