"""Peaks of a model's activations by layer, before and after a residual scale, as an SVG.

matplotlib is an optional extra (`pip install "outrigger[trace]"`). Called by services.cli.fp16_check.
"""

from __future__ import annotations

import io
from collections.abc import Mapping

from common.errors import SettingError

NEEDS = 'the plot needs matplotlib: pip install "outrigger[trace]", or leave --out out'
PLACES = {
    "residual": "#3b6ea8",
    "attention": "#7d5ba6",
    "attention_normed": "#b08fd0",
    "mlp": "#c46a2b",
    "mlp_normed": "#e0a878",
    "logits": "#222222",
}
"""What is drawn, in which colour; `mid` and `embedding` are the residual's, too."""

Peaks = Mapping[tuple[int, str], float]


def svg_of(before: Peaks, after: Peaks, limit: float, margin: float, title: str) -> str:
    """Two panels on one logarithmic axis, with fp16's largest number and the margin. Raises SettingError."""
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise SettingError(NEEDS) from error
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    FigureCanvasSVG(figure)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, peaks, name in zip(panels, (before, after), ("as the model is", "scaled"), strict=True):
        for place, colour in PLACES.items():
            points = by_layer(peaks, place)
            axes.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=3, lw=1.2, label=place)
        axes.axhline(limit, color="#c44", lw=1)
        axes.axhline(limit / margin, color="#c44", lw=0.8, linestyle=":")
        axes.set_yscale("log")
        axes.set_title(name, fontsize=9, loc="left")
        axes.set_xlabel("layer")
    panels[0].set_ylabel(f"largest magnitude (red: {limit:,.0f}; dotted: the margin)")
    panels[1].legend(fontsize=7, loc="lower right")
    figure.suptitle(title, fontsize=10)
    out = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "outrigger"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def by_layer(peaks: Peaks, place: str) -> list[tuple[int, float]]:
    """(layer, peak) of a place; of the residual, the largest of a layer's two sums, and the embedding at -1."""
    names = ("embedding", "mid", "residual") if place == "residual" else (place,)
    largest: dict[int, float] = {}
    for (layer, name), peak in peaks.items():
        if name in names:
            largest[layer] = max(peak, largest.get(layer, 0.0))
    return sorted(largest.items())
