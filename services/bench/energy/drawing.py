"""Runs' power over time as an SVG: one lane a run, windows shaded, all from their first window on.

matplotlib is an optional extra (`pip install "outrigger[trace]"`). Called by services.cli.energy.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

from common.errors import SettingError
from services.bench.energy.integral import RunEnergy, Window, watts
from services.bench.energy.samples import Trace

NEEDS = 'the plot needs matplotlib: pip install "outrigger[trace]", or leave --out out'


def svg_of(runs: Sequence[tuple[Trace, Sequence[Window], RunEnergy]], battery_wh: float) -> str:
    """The SVG document. Raises SettingError when matplotlib is not installed."""
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise SettingError(NEEDS) from error
    figure = Figure(figsize=(9, 1.2 + 1.7 * len(runs)), layout="constrained")
    FigureCanvasSVG(figure)
    lanes = figure.subplots(len(runs), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, (trace, windows, energy) in zip(lanes, runs, strict=True):
        first_s = min(window.first_s for window in windows)
        for sample in trace.samples:
            power_w, from_s = watts(sample.percent_per_hour, battery_wh), sample.at_s - first_s
            axes.plot([from_s, from_s + sample.seconds], [power_w, power_w], color="#3b6ea8", linewidth=1.2)
        for window in windows:
            axes.axvspan(window.first_s - first_s, window.last_s - first_s, color="#c46a2b", alpha=0.15, lw=0)
        axes.axhline(energy.mean_w, color="#c46a2b", linewidth=0.8, linestyle="--")
        axes.set_title(
            f"{trace.name}: {energy.mean_w:.2f} W, {energy.joules_per_token:.3f} J a token",
            fontsize=9,
            loc="left",
        )
        axes.set_ylabel("W")
        axes.set_ylim(bottom=0)
    lanes[-1].set_xlabel(
        "seconds since the first window began (shaded: generating; dashed: mean of the windows)"
    )
    out = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "outrigger"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()
