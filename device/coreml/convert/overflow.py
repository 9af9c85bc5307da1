"""The fp16 check: where a model's activations pass what fp16 holds, what would come of it, and whether a scale helps.

Everything is measured on a text. Peaks come from a float32 forward (scale.py). What fp16 does with them is tried: the
same forward with every activation rounded to fp16 where it is stored between operations, once as the model is and once
with the chosen residual scale; products are added in float32, so that only overflow and rounding of what is stored can
spoil it. Decides nothing by a name. Called by services.cli.fp16_check.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from device.coreml.convert.description import GemmaModel, WeightSource
from device.coreml.convert.forward import Forward
from device.coreml.convert.proof import Closeness, closeness
from device.coreml.convert.scale import RESIDUAL, Peaks, peaks_and_last
from device.coreml.convert.stored import FP16_MAX

POST_NORMS = ("post_attn_norm", "post_ffn_norm")
"""The norms whose outputs are added to the residual; they carry its scale."""
LOGITS = "logits"

Place = tuple[int, str]
"""(layer, place) as forward.py names them."""


@dataclass(frozen=True)
class Measured:
    """A text's peaks in float32, logits as (n_layer, "logits"), and what the rounded forward is compared with."""

    peaks: Peaks
    logits: np.ndarray  # f32 [n_compared, n_vocab]

    @property
    def overflows(self) -> list[Place]:
        """Places that fp16 cannot hold as the model is, in the order of computation."""
        return [place for place, peak in self.peaks.items() if not peak <= FP16_MAX]

    def worst(self, places: Iterable[str]) -> tuple[Place, float]:
        """The largest peak among places of these names."""
        names = set(places)
        return max(
            ((at, peak) for at, peak in self.peaks.items() if at[1] in names), key=lambda item: item[1]
        )


@dataclass(frozen=True)
class Tried:
    """A forward with fp16 between operations: where infinity and NaN came first, and how far off its logits are."""

    scale: float
    first_infinite: Place | None
    first_nan: Place | None
    closeness: Closeness | None
    """From the float32 logits; None where a logit is not finite."""


@dataclass(frozen=True)
class GainErrors:
    """Relative errors of scaled post-norms stored in fp16: median, 99th percentile, largest."""

    as_gain: tuple[float, float, float]
    as_gain_minus_one: tuple[float, float, float]
    """The form of checkpoints: w = gain - 1 is stored, 1 + w multiplies."""


def measure(model: GemmaModel, tokens: np.ndarray, n_compared: int = 16) -> Measured:
    """Run `tokens` (i32) in float32 and keep peaks, and logits of the last `n_compared` positions."""
    peaks, last = peaks_and_last(model, tokens)
    forward = Forward(model, np.float32)
    normed = forward.norm(last, "norm")
    peaks[model.n_layer, "normed"] = float(np.abs(normed).max())
    peaks[model.n_layer, LOGITS] = max(
        float(np.abs(normed @ rows.astype(np.float32).T).max()) for _, rows in model.blocks("head")
    )
    return Measured(peaks, forward.logits(last[-n_compared:]))


def scaled_peaks(peaks: Peaks, scale: float) -> Peaks:
    """Peaks with a residual scale: the places of the residual are multiplied by it, the others stay."""
    return {at: peak * scale if at[1] in RESIDUAL else peak for at, peak in peaks.items()}


def predicted_nan(peaks: Peaks) -> Place | None:
    """Where NaN would come first: right after the first overflow, for an infinite row normed is infinity over infinity.

    None where everything fits.
    """
    order = list(peaks)
    for i, at in enumerate(order):
        if not peaks[at] <= FP16_MAX:
            return order[min(i + 1, len(order) - 1)]
    return None


def try_fp16(model: GemmaModel, tokens: np.ndarray, scale: float, reference: np.ndarray) -> Tried:
    """Run the model with its residual scaled and every stored activation rounded to fp16; compare logits."""
    first: dict[str, Place] = {}

    def round_in_place(layer: int, place: str, rows: np.ndarray) -> None:
        rows[...] = rows.astype(np.float16)
        if "infinite" not in first and np.isinf(rows).any():
            first["infinite"] = (layer, place)
        if "nan" not in first and np.isnan(rows).any():
            first["nan"] = (layer, place)

    forward = Forward(with_scale(model, scale), np.float32, round_in_place)
    with np.errstate(over="ignore", invalid="ignore"):
        *_, last = forward.residuals(tokens)
        logits = forward.logits(last[-len(reference) :])
    close = closeness(logits, reference) if np.isfinite(logits).all() else None
    return Tried(scale, first.get("infinite"), first.get("nan"), close)


def with_scale(model: GemmaModel, scale: float) -> GemmaModel:
    """The same model with embedding and post-norms multiplied by `scale`: RMSNorm forgets it, logits stay."""
    return replace(model, source=_ScaledSource(model.source, scale, model.tied), tied=False)


@dataclass(frozen=True)
class _ScaledSource:
    source: WeightSource
    scale: float
    tied: bool

    def rows(self, name: str, first: int, last: int) -> np.ndarray:
        if name == "embed":
            return self.source.rows(name, first, last) * np.float32(self.scale)
        return self.source.rows("embed" if name == "head" and self.tied else name, first, last)

    def gain(self, name: str) -> np.ndarray:
        gain = self.source.gain(name)
        return gain * self.scale if name.endswith(POST_NORMS) else gain

    def close(self) -> None:
        self.source.close()


def gain_errors(model: GemmaModel, scale: float) -> GainErrors:
    """What storing costs the post-norms' gains, in both forms, over all layers."""
    gains = np.concatenate(
        [model.gain(f"{layer}.{name}") * scale for layer in range(model.n_layer) for name in POST_NORMS]
    ).astype(np.float64)
    gains = gains[gains != 0]
    with np.errstate(over="ignore"):
        as_gain = gains.astype(np.float16).astype(np.float64)
        as_weight = 1 + (gains - 1).astype(np.float16).astype(np.float64)
    return GainErrors(_spread(as_gain, gains), _spread(as_weight, gains))


def _spread(stored: np.ndarray, right: np.ndarray) -> tuple[float, float, float]:
    errors = np.abs(stored / right - 1)
    median, high = np.quantile(errors, (0.5, 0.99))
    return float(median), float(high), float(errors.max())
