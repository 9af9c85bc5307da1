"""Aim: the decisions of frozen pages: order of building, budget, share, dropping, truncation.

Method: tables of cases for what was published, properties for the rest.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import SettingError
from device.coreml.frozen import plan
from device.coreml.frozen.plan import PageId

ids = st.builds(PageId, page=st.integers(0, 20), layer=st.integers(0, 60))


def test_the_oldest_page_of_every_layer_comes_before_the_second_of_any():
    order = sorted(PageId(page, layer) for layer in (31, 3, 7) for page in (1, 0))
    assert [(i.page, i.layer) for i in order] == [(0, 3), (0, 7), (0, 31), (1, 3), (1, 7), (1, 31)]


@pytest.mark.parametrize(
    ("n_tokens", "share"), [(0, 0.22), (1, 0.22), (2, 0.22), (7, 0.22), (8, 0.43), (256, 0.43)]
)
def test_published_shares_by_query_size(n_tokens, share):
    assert plan.share_of(n_tokens) == share


@pytest.mark.parametrize(
    ("n_keys", "n_tokens", "n_pages"), [(140_000, 1, 2), (140_000, 8, 4), (65_536, 1, 1), (16_384, 1, 0)]
)
def test_pages_of_a_share(n_keys, n_tokens, n_pages):
    assert plan.pages_to_ask(range(8), n_keys, n_tokens, 16_384) == tuple(range(n_pages))


@given(st.sets(st.integers(0, 20)), st.integers(0, 400_000), st.integers(1, 300))
def test_only_complete_ready_pages_are_asked_oldest_first(ready, n_keys, n_tokens):
    asked = plan.pages_to_ask(ready, n_keys, n_tokens, 16_384)
    assert list(asked) == sorted(ready)[: len(asked)]
    assert all((page + 1) * 16_384 <= n_keys for page in asked)
    assert len(asked) <= 0.43 * n_keys / 16_384 + 0.5


@given(st.integers(0, 10**12), st.integers(1, 10**9), st.integers(0, 64))
def test_the_budget_is_even_and_never_passed(budget, page, layers):
    per_layer = plan.budget_pages(budget, page, layers)
    assert per_layer * page * layers <= budget
    assert layers == 0 or budget < (per_layer + 1) * page * layers


def test_pages_wanted_by_keys_budget_and_share():
    assert plan.pages_wanted(16_383, 16_384, 9) == 0
    assert plan.pages_wanted(10 * 16_384, 16_384, 9) == 4
    assert plan.pages_wanted(10 * 16_384, 16_384, 2) == 2
    assert plan.pages_wanted(10 * 16_384, 16_384, 99, ((1, 1.0),)) == 10


@given(st.sets(ids))
def test_the_highest_page_is_dropped_first(ready):
    order = plan.drop_order(ready)
    assert set(order) == ready and [i.page for i in order] == sorted((i.page for i in ready), reverse=True)


@given(st.sets(ids), st.integers(0, 22 * 256))
def test_truncation_forgets_what_holds_a_later_key(present, n_keys):
    gone = plan.truncated(present, n_keys, 256)
    assert all((i.page + 1) * 256 > n_keys for i in gone)
    assert all((i.page + 1) * 256 <= n_keys for i in present - set(gone))


def test_a_dropped_page_waits_for_ample_memory():
    assert not plan.may_rebuild(1000, 800, 100)
    assert plan.may_rebuild(1200, 800, 100)


@pytest.mark.parametrize(
    "shares", [(), ((2, 0.5),), ((1, 0.5), (1, 0.6)), ((1, 1.5),), ((1, 0.2), (8, -0.1))]
)
def test_bad_shares_are_refused(shares):
    with pytest.raises(SettingError, match="frozen shares"):
        plan.check_shares(shares)
