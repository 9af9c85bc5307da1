"""Aim: the residual's scale is chosen by measured peaks, with its margin, or refused.

Method: peaks as plain numbers, and those of the tiny model.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ModelError, SettingError
from device.coreml.convert.scale import MARGIN, choose_scale, parse_scale, peaks_over
from device.coreml.convert.stored import FP16_MAX


@given(st.floats(1, 4e6))
def test_the_largest_power_of_two_that_keeps_the_margin(peak):
    scale = choose_scale({(3, "residual"): peak, (0, "attention"): 5.0})
    assert peak * scale * MARGIN <= FP16_MAX
    assert scale == 1 or peak * scale * 2 * MARGIN > FP16_MAX
    assert np.log2(scale) % 1 == 0


def test_published_peaks_of_a_4b_model():
    """278,318 was published; half of it, the scale chosen there by name, still overflows."""
    peak = 278_318.0
    assert peak / 2 > FP16_MAX
    assert choose_scale({(20, "residual"): peak}) == 2.0**-5


def test_what_no_scale_can_help_is_refused():
    with pytest.raises(ModelError, match="layer 4: mlp reaches"):
        choose_scale({(4, "mlp"): 70_000.0, (4, "residual"): 1.0})
    with pytest.raises(ModelError, match="would be needed"):
        choose_scale({(4, "residual"): 1e9})
    with pytest.raises(ModelError, match="not finite"):
        choose_scale({(4, "residual"): float("inf")})


def test_peaks_are_seen_at_every_place(tiny, text):
    peaks = peaks_over(tiny, text[:40])
    places = {place for _, place in peaks}
    assert places >= {
        "embedding",
        "mid",
        "residual",
        "attention",
        "mlp",
        "gate",
        "attention_normed",
        "mlp_normed",
    }
    assert {layer for layer, _ in peaks} == {-1, *range(tiny.n_layer)}
    assert choose_scale(peaks) == 1.0


@pytest.mark.parametrize("text", ["0.3", "2", "0", "-1", "half", "0.001"])
def test_values_that_are_no_power_of_two_are_refused(text):
    with pytest.raises(SettingError, match="--fp16-scale"):
        parse_scale(text)


def test_values_are_read():
    assert parse_scale("auto") is None
    assert parse_scale("0.125") == 0.125
