"""Aim: a prompt that loses rows at hand is told with where it parts, what that costs, and the likely cause.
Method: a chat of random token ids is changed in each way the causes are named after; hypothesis draws the places."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.metrics import SERIES
from services.mac.divergence import AROUND_TOKENS, CAUSES, find_divergence

END = 511
LENGTHS = (60, 200, 300, 250, 180)
"""Tokens of each turn: the system prompt, then user and assistant in turn."""


def turn(n, seed):
    return np.append(np.random.default_rng(seed).integers(0, END, n), END).astype(np.int32)


TURNS = [turn(n, seed) for seed, n in enumerate(LENGTHS)]
CHAT = np.concatenate(TURNS)


def find(prompt, held=CHAT, ends=(END,), n_rows=768, start=0):
    return find_divergence(held, prompt, ends, n_rows=n_rows, start=start)


def replaced(at, n, seed=9):
    """CHAT with n tokens at `at` written anew."""
    changed = CHAT.copy()
    changed[at : at + n] = (changed[at : at + n] + 1 + seed) % END
    return changed


def joined(*turns):
    return np.concatenate(turns)


@pytest.mark.parametrize(
    "prompt, cause",
    [
        (replaced(30, 4), "template_date"),
        (joined(CHAT[:30], turn(5, 8)[:5], CHAT[33:]), "template_date"),
        (joined(turn(60, 50), *TURNS[1:]), "system_prompt"),
        (turn(500, 51), "system_prompt"),
        (joined(TURNS[0], turn(300, 52)), "other_chat"),
        (joined(*TURNS[:2], TURNS[2][40:], *TURNS[3:]), "dropped_text"),
        (joined(TURNS[0], *TURNS[3:]), "dropped_text"),
        (joined(*TURNS[:3], turn(90, 53)), "edited_turn"),
        (joined(*TURNS[:2], turn(300, 54), *TURNS[3:]), "edited_turn"),
    ],
)
def test_each_change_gets_its_cause(prompt, cause):
    assert find(prompt).cause == cause


def test_without_tokens_that_end_turns_only_dropped_text_can_be_told():
    assert find(joined(*TURNS[:3], turn(90, 53)), ends=()).cause == "other_text"
    assert find(joined(TURNS[0], *TURNS[3:]), ends=()).cause == "dropped_text"


@given(st.integers(0, len(CHAT) - 1), st.integers(0, 300))
def test_it_says_where_they_part_and_what_stood_there(at, n_more):
    prompt = joined(replaced(at, 1)[: at + 1], turn(n_more, 60))
    found = find(prompt)
    assert found.position == at and found.lost == 768
    first = max(0, at - AROUND_TOKENS)
    assert found.held_ids == tuple(CHAT[first : at + AROUND_TOKENS])
    assert found.asked_ids == tuple(prompt[first : at + AROUND_TOKENS])


@given(st.integers(1, len(CHAT)), st.integers(0, 40))
def test_to_continue_repeat_or_cut_short_is_no_divergence(n, n_more):
    assert find(CHAT[:n]) is None
    assert find(joined(CHAT, turn(n_more, 61))) is None


def test_nor_is_one_that_costs_nothing():
    assert find(joined(*TURNS[:4], turn(90, 62)), n_rows=768, start=768) is None
    assert find(turn(40, 63), held=np.empty(0, np.int32), n_rows=0) is None


def test_the_metric_knows_every_cause():
    (series,) = [series for series in SERIES if series.name == "prefix_divergence_total"]
    assert series.labels["cause"] == CAUSES
