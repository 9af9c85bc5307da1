"""The residual's scale: the power of two that keeps a model's activations inside fp16, from peaks that were measured.

RMSNorm forgets the scale of what it normalises, so the embedding and the two norms whose outputs are added to the
residual may be multiplied by one factor, and nothing else changes. A power of two costs no digit. Deciding by a
folder's name, as is done elsewhere, gave a scale at which the model it was published for still overflows.
Called by services.cli.convert; fp16-check builds on `peaks_over` and `choose_scale`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from common.errors import ModelError, SettingError
from device.coreml.convert.description import GemmaModel
from device.coreml.convert.forward import Forward
from device.coreml.convert.stored import FP16_MAX

MARGIN = 4.0
"""The scaled peak may reach fp16's largest number divided by this: other texts have other peaks."""
RESIDUAL = ("embedding", "mid", "residual", "attention_normed", "mlp_normed")
"""Places that the scale reaches; all others are computed from normed values."""
SCALE_MIN = 2.0**-8

Peaks = dict[tuple[int, str], float]
"""(layer, place) -> largest magnitude; layers and places as forward.py names them."""


def peaks_over(model: GemmaModel, tokens: np.ndarray) -> Peaks:
    """Peaks of a text's activations, computed in float32 without any fp16 on the way."""
    return peaks_and_last(model, tokens)[0]


def peaks_and_last(model: GemmaModel, tokens: np.ndarray) -> tuple[Peaks, np.ndarray]:
    """Peaks, and the residuals f32 [n_tokens, n_embd] after the last layer."""
    peaks: Peaks = {}

    def watch(layer: int, place: str, rows: np.ndarray) -> None:
        peaks[layer, place] = float(np.abs(rows).max())

    *_, last = Forward(model, np.float32, watch).residuals(tokens)
    return peaks, last


def choose_scale(peaks: Mapping[tuple[int, str], float], margin: float = MARGIN) -> float:
    """The largest power of two up to 1 that keeps the residual's peaks `margin` times under fp16's largest number.

    Raises ModelError where even the smallest would not do, or where a place that no scale reaches would overflow.
    """
    peak = max(value for (_, place), value in peaks.items() if place in RESIDUAL)
    if not math.isfinite(peak):
        raise ModelError("the model's activations are not finite even in float32")
    for (layer, place), value in peaks.items():
        if place not in RESIDUAL and value > FP16_MAX:
            raise ModelError(
                f"layer {layer}: {place} reaches {value:g}, beyond fp16's {FP16_MAX:g}; no residual scale changes that"
            )
    scale = min(1.0, 2.0 ** math.floor(math.log2(FP16_MAX / margin / max(peak, 1e-30))))
    if scale < SCALE_MIN:
        raise ModelError(
            f"the residual reaches {peak:g}: a scale of {scale:g} would be needed, {SCALE_MIN:g} at least"
        )
    return scale


def parse_scale(text: str) -> float | None:
    """A number of the command line, or None for `auto`. Raises SettingError where it is no power of two up to 1."""
    if text == "auto":
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not SCALE_MIN <= value <= 1 or math.log2(value) % 1:
        raise SettingError(f"--fp16-scale {text!r}: use auto, or a power of two from {SCALE_MIN:g} to 1")
    return value
