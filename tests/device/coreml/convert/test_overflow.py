"""Aim: the fp16 check sees where fp16 overflows, what comes of it, and that the chosen scale prevents it without harm.

Method: the tiny checkpoint as it is, and with one post-norm so loud that a residual passes 65,504; predictions
are compared with what the rounded forward does, scaled logits with unscaled ones in float64.
"""

import numpy as np
import pytest

from device.coreml.convert.forward import Forward
from device.coreml.convert.overflow import (
    LOGITS,
    gain_errors,
    measure,
    predicted_nan,
    scaled_peaks,
    try_fp16,
    with_scale,
)
from device.coreml.convert.scale import RESIDUAL, choose_scale, peaks_over
from device.coreml.convert.source import open_model
from device.coreml.convert.stored import FP16_MAX
from tests.device.coreml.convert.conftest import N_LAYER, tiny_tensors, write_checkpoint

LOUD = 3


@pytest.fixture(scope="module")
def loud(tmp_path_factory):
    tensors = tiny_tensors()
    tensors[f"model.layers.{LOUD}.post_feedforward_layernorm.weight"][:] = 40_960.0
    return open_model(write_checkpoint(tmp_path_factory.mktemp("loud") / "loud-gemma", tensors))


@pytest.fixture(scope="module")
def tokens(text):
    return text[:24]


def test_a_quiet_model_holds(tiny, tokens):
    measured = measure(tiny, tokens, 4)
    assert measured.overflows == [] and predicted_nan(measured.peaks) is None
    assert measured.peaks.items() >= peaks_over(tiny, tokens).items()
    tried = try_fp16(tiny, tokens, 1.0, measured.logits)
    assert tried.first_infinite is None and tried.first_nan is None
    assert 0 < tried.closeness.kl_max < 1e-3


def test_peaks_of_logits_are_those_of_the_forward(tiny, tokens):
    measured = measure(tiny, tokens, len(tokens))
    assert measured.peaks[N_LAYER, LOGITS] == pytest.approx(np.abs(measured.logits).max(), rel=1e-5)


def test_an_overflow_is_found_predicted_and_happens(loud, tokens):
    measured = measure(loud, tokens, 4)
    assert measured.overflows[0] == (LOUD, "mlp_normed")
    assert measured.worst(RESIDUAL)[1] > FP16_MAX
    tried = try_fp16(loud, tokens, 1.0, measured.logits)
    assert tried.first_infinite == measured.overflows[0]
    assert tried.first_nan is not None and tried.closeness is None


def test_the_chosen_scale_prevents_it(loud, tokens):
    measured = measure(loud, tokens, 4)
    scale = choose_scale(measured.peaks, 4.0)
    assert scale < 1
    assert all(
        4 * peak <= FP16_MAX
        for (_, place), peak in scaled_peaks(measured.peaks, scale).items()
        if place in RESIDUAL
    )
    tried = try_fp16(loud, tokens, scale, measured.logits)
    assert tried.first_infinite is None and tried.first_nan is None
    assert tried.closeness.kl_max < 0.05


@pytest.mark.parametrize("scale", [0.5, 2.0**-5])
def test_rmsnorm_forgets_the_scale(tiny, tokens, scale):
    logits = []
    for model in (tiny, with_scale(tiny, scale)):
        forward = Forward(model)
        *_, last = forward.residuals(tokens)
        logits.append(forward.logits(last[-4:]))
    np.testing.assert_allclose(logits[1], logits[0], rtol=1e-2, atol=1e-3)  # eps is not scaled
    scaled = peaks_over(with_scale(tiny, scale), tokens)
    for at, peak in scaled_peaks(peaks_over(tiny, tokens), scale).items():
        assert scaled[at] == pytest.approx(peak, rel=1e-2)


def test_gains_are_stored_without_loss_only_as_gains(tiny):
    """gain - 1 is near -1 once the gain is scaled, and its steps there are 2^-11 of one, not of the gain."""
    errors = gain_errors(tiny, 2.0**-6)
    assert errors.as_gain[2] <= 2.0**-11
    assert errors.as_gain_minus_one[2] > 8 * errors.as_gain[2]
    # By hand: 1.125 / 64 = 0.017578125 is exact; 0.017578125 - 1 lies between -0.98242 and -0.98193 (steps of 2^-11).
    assert 1 + np.float64(np.float16(0.0177 - 1)) == pytest.approx(36 / 2048)
