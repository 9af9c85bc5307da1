"""Aim: log-probabilities and biases are what their definitions say, in the same order as greedy's choice.
Method: hypothesis draws logits, equal ones included; float64 and a full sort are the oracles."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from common.errors import EngineError
from common.ggml.logits import LogitBias, logprobs

TOLERANCE = 1e-5
"""f32 rounding of a difference of values up to 60 and of its logarithm's sum."""
rows = hnp.arrays(
    np.float32, st.integers(1, 40), elements=st.sampled_from([-30.0, -2.5, 0.0, 1.0, 1.5, 30.0])
)


@given(logits=rows, n_top=st.integers(0, 20), data=st.data())
def test_logprobs_are_the_log_softmax_and_the_top_is_sorted_like_greedy(logits, n_top, data):
    token_id = data.draw(st.integers(0, len(logits) - 1))
    found = logprobs(logits, token_id, n_top)
    exact = logits.astype(np.float64)
    exact = exact - exact.max() - math.log(np.exp(exact - exact.max()).sum())
    assert abs(found.chosen - exact[token_id]) < TOLERANCE
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:n_top]
    assert [i for i, _ in found.top] == order
    assert all(abs(value - exact[i]) < TOLERANCE for i, value in found.top)
    if n_top:
        assert found.top[0][0] == int(np.argmax(logits))


@given(logits=rows, data=st.data())
def test_a_bias_changes_its_own_tokens_only_and_leaves_the_row_alone(logits, data):
    ids = data.draw(st.lists(st.integers(0, len(logits) - 1), unique=True, max_size=5))
    biases = [(i, data.draw(st.sampled_from([-100.0, -1.0, 2.0, 100.0]))) for i in ids]
    before = logits.copy()
    biased = LogitBias(biases, len(logits)).apply(logits)
    expected = before.copy()
    for i, bias in biases:
        expected[i] += np.float32(bias)
    assert np.array_equal(biased, expected) and np.array_equal(logits, before)


@pytest.mark.parametrize(
    ("biases", "words"),
    [
        ([(9, 1.0)], "token id 9; allowed are 0 to 8"),
        ([(-1, 1.0)], "token id -1"),
        ([(3, 100.5)], "token id 3 is 100.5; allowed are -100 to 100"),
        ([(3, math.nan)], "nan"),
        ([(3, 1.0), (3, 2.0)], "twice"),
    ],
)
def test_biases_out_of_range_are_refused_with_the_range(biases, words):
    with pytest.raises(EngineError, match=words):
        LogitBias(biases, 9)


@pytest.mark.parametrize("n_top", [-1, 21])
def test_too_many_top_logprobs_are_refused(n_top):
    with pytest.raises(EngineError, match="0 to 20"):
        logprobs(np.zeros(30, np.float32), 0, n_top)
