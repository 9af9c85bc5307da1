"""Aim: further page workers are named by address or number, each gets its own number, and nothing is guessed.

Method: the texts that people write, and hypothesis for what comes back from addresses written out.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config import load_settings
from common.config.page_workers import (
    CONTROL_PORT,
    PageWorkerPlace,
    page_worker_places,
    page_workers_here,
    worker_numbers,
)
from common.errors import SettingError
from common.limits import PAGE_WORKERS_MAX


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("", ()),
        ("2", ()),
        ("169.254.9.1", (("169.254.9.1", CONTROL_PORT),)),
        ("169.254.9.1:7, pc.local:8", (("169.254.9.1", 7), ("pc.local", 8))),
        ("fe80::1%en5", (("fe80::1%en5", CONTROL_PORT),)),
        ("[fe80::1%en5]:9", (("fe80::1%en5", 9),)),
        ("[fe80::1]", (("fe80::1", CONTROL_PORT),)),
    ],
)
def test_addresses_as_people_write_them(text, places):
    assert page_worker_places(text) == places


@pytest.mark.parametrize(
    "text", ["a,", "a:0", "a:70000", "a:b", "[::1", "a b", "a,a", ":5", "-1 2", "8", "[::1]:"]
)
def test_what_is_no_address_is_refused_with_the_forms(text):
    with pytest.raises(SettingError, match=r"bridge\.page_workers = .*HOST:CONTROL_PORT.*from 0 to 7"):
        load_settings(environ={}, flags={"page_workers": text})


@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "10.0.0.1", "fe80::7"]), st.integers(1, 65_535)),
        unique=True,
        max_size=7,
    )
)
def test_written_out_they_come_back(pairs):
    places = tuple(PageWorkerPlace(*pair) for pair in pairs)
    assert page_worker_places(",".join(map(str, places))) == places


@pytest.mark.parametrize(
    ("flags", "numbers"),
    [
        ({}, (0,)),
        ({"page_workers": "2"}, (0, 1, 2)),
        ({"page_workers": "0"}, (0,)),
        ({"page_workers": "a,b:7"}, (0, 1, 2)),
        ({"page_workers": "1", "split": "off"}, (1,)),
        ({"split": "off"}, ()),
    ],
)
def test_worker_0_is_the_links_and_the_others_follow(flags, numbers):
    assert worker_numbers(load_settings(environ={}, flags=flags)) == numbers


def test_a_number_is_how_many_are_started_here():
    assert [page_workers_here(text) for text in ("", " 3 ", "a:3", str(PAGE_WORKERS_MAX))] == [
        0,
        3,
        0,
        PAGE_WORKERS_MAX,
    ]
