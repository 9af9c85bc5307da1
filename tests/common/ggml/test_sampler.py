"""The sampler is greedy when asked, repeatable by seed, and draws from the distribution its values describe.

Method: random logits against plain NumPy statements of the same rules; no model is needed.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from common.errors import EngineError
from common.ggml.sampler import Sampler
from common.wire.messages import Sampling

finite = hnp.arrays(np.float32, st.integers(1, 50), elements=st.floats(-50, 50, width=32))
seeds = st.integers(0, 2**32 - 2)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return weights / weights.sum()


@given(logits=finite)
def test_greedy_takes_the_lowest_id_among_the_highest(logits):
    with Sampler(Sampling(temperature=0), len(logits)) as sampler:
        assert sampler.sample(logits) == int(np.flatnonzero(logits == logits.max())[0])


@given(logits=finite, seed=seeds)
def test_the_same_seed_draws_the_same_tokens(logits, seed):
    def draw():
        with Sampler(Sampling(temperature=1.0, top_k=0, seed=seed), len(logits)) as sampler:
            return [sampler.sample(logits) for _ in range(8)]

    assert draw() == draw()


@given(logits=finite, seed=seeds, top_k=st.integers(1, 5))
def test_top_k_never_leaves_the_k_highest(logits, seed, top_k):
    floor = np.sort(logits)[::-1][: min(top_k, len(logits))][-1]
    with Sampler(Sampling(temperature=1.5, top_k=top_k, seed=seed), len(logits)) as sampler:
        assert all(logits[sampler.sample(logits)] >= floor for _ in range(8))


@given(logits=finite, seed=seeds, min_p=st.floats(0.01, 1.0))
def test_min_p_never_goes_below_its_share_of_the_highest(logits, seed, min_p):
    p = softmax(logits)
    with Sampler(Sampling(temperature=1.0, top_k=0, min_p=min_p, seed=seed), len(logits)) as sampler:
        assert all(p[sampler.sample(logits)] >= min_p * p.max() * (1 - 1e-4) for _ in range(8))


@given(logits=finite, seed=seeds, top_p=st.floats(0.05, 0.95))
def test_top_p_stays_within_the_nucleus(logits, seed, top_p):
    p = softmax(logits)
    with Sampler(Sampling(temperature=1.0, top_k=0, top_p=top_p, seed=seed), len(logits)) as sampler:
        for _ in range(8):
            chosen = sampler.sample(logits)
            assert (
                p[p > p[chosen]].sum() <= top_p + 1e-4
            )  # what is more likely does not fill the nucleus alone


def test_draws_follow_the_distribution():
    logits = np.array([2.0, 1.0, 0.0, -1.0], np.float32)
    n_draws, temperature = 20_000, 0.7
    with Sampler(Sampling(temperature=temperature, top_k=0, seed=7), 4) as sampler:
        counts = np.bincount([sampler.sample(logits) for _ in range(n_draws)], minlength=4)
    expected = softmax(logits / temperature) * n_draws
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert (
        chi_squared < 16.3
    )  # 0.1 % of honest samplers with 3 degrees of freedom exceed this; the seed is fixed


def test_penalties_push_a_repeated_token_down_and_count_only_what_was_generated():
    logits = np.array([3.0, 2.5, 2.4], np.float32)
    with Sampler(Sampling(temperature=0, frequency_penalty=0.4), 3) as sampler:
        chosen = [sampler.sample(logits) for _ in range(4)]
    # 3.0 | 2.6 | 2.2 < 2.5 | 2.5-0.4 < 2.4
    assert chosen == [0, 0, 1, 2]
    assert logits.tolist() == np.array([3.0, 2.5, 2.4], np.float32).tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_are_an_error(temperature, bad):
    logits = np.zeros(5, np.float32)
    logits[3] = bad
    with (
        Sampler(Sampling(temperature=temperature), 5) as sampler,
        pytest.raises(EngineError, match="logit of token id 3 is"),
    ):
        sampler.sample(logits)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (Sampling(temperature=-1), "temperature is -1"),
        (Sampling(top_p=float("nan")), "top_p is nan; allowed are 0 to 1"),
        (Sampling(repeat_penalty=0), "repeat_penalty is 0"),
        (Sampling(seed=0xFFFF_FFFF), "seed is 4294967295"),
    ],
)
def test_values_out_of_range_are_refused_before_native_code(values, words):
    with pytest.raises(EngineError, match=words):
        Sampler(values, 10)


def test_wrong_shapes_and_a_closed_sampler_are_errors():
    sampler = Sampler(Sampling(temperature=1.0), 10)
    with pytest.raises(EngineError, match=r"must be f32 \[10\], not float32 \[9\]"):
        sampler.sample(np.zeros(9, np.float32))
    with pytest.raises(EngineError, match="float64"):
        sampler.sample(np.zeros(10))
    sampler.close()
    sampler.close()
    with pytest.raises(EngineError, match="closed"):
        sampler.sample(np.zeros(10, np.float32))
