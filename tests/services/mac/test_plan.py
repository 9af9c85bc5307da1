"""Aim: the worker gets what it may get and nothing else, and the grid does not depend on it.
Method: hypothesis over read ranges and worker standings; the rules are restated as assertions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from common.limits import SPLIT_TOKENS_MIN, UBATCH_TOKENS
from services.mac.grid import cut_read
from services.mac.plan import plan_read, plan_without_worker

starts = st.integers(0, 20).map(lambda k: k * UBATCH_TOKENS)
standings = st.sampled_from(["ready", "off", "absent", "refused", "rested"])


@given(starts, st.integers(1, 6000), standings)
def test_the_plan_follows_its_rules(start, n_new, worker):
    plan = plan_read(start, start + n_new, worker=worker, split_tokens_min=SPLIT_TOKENS_MIN)
    assert plan.ubatches == cut_read(start, start + n_new)
    assert (plan.start, plan.end) == (start, start + n_new)
    assert (plan.n_remote == 0) == (plan.bypass_reason != "")
    if worker != "ready":
        assert plan.bypass_reason == worker
    elif n_new <= 512:
        assert plan.bypass_reason == "small"
    else:
        assert plan.n_remote == len(plan.ubatches) - 1 >= 1
        assert plan.tokens_worker == plan.ubatches[-1].position - start


@given(starts, st.integers(1, 6000))
def test_a_read_redone_without_the_worker_keeps_its_grid(start, n_new):
    plan = plan_read(start, start + n_new, worker="ready", split_tokens_min=2)
    again = plan_without_worker(plan)
    assert again.ubatches == plan.ubatches and again.n_remote == 0 and again.tokens_worker == 0


def test_one_ubatch_never_goes_to_the_worker():
    assert plan_read(0, 200, worker="ready", split_tokens_min=2).bypass_reason == "small"
