"""A timeline as a picture: SVG by matplotlib, and an HTML page around it with the numbers beneath.

matplotlib is an optional extra (`pip install "outrigger[trace]"`) and is imported only here. Called by
services.cli.trace.
"""

from __future__ import annotations

import io
from html import escape

from common.errors import SettingError
from services.bench.timeline import LANES, Bar, bars_of, busy_s, title_of
from services.mac.read_log import LoggedRead

COLOURS = {
    "whole": "#3b6ea8",
    "head": "#3b6ea8",
    "tail": "#c46a2b",
    "import": "#7d5ba6",
    "out": "#8a8f98",
    "home": "#b9bdc4",
}
"""By what a bar is; the worker's tail has the host's tail's colour: it is the same work."""
WORDS = {
    "whole": "all layers",
    "head": "head layers",
    "tail": "tail layers",
    "import": "rows taken over",
    "out": "residual out",
    "home": "rows home",
}


def svg_of(read: LoggedRead) -> str:
    """The read's lanes as an SVG document. Raises SettingError when matplotlib is not installed."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise SettingError(
            'drawing needs matplotlib: pip install "outrigger[trace]", or write a Chrome trace (-o read.json)'
        ) from error
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    bars = bars_of(read.report.stages)
    figure = Figure(figsize=(max(8.0, 0.5 * len(read.report.stages)), 2.9), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    for what, colour in COLOURS.items():
        chosen = [bar for bar in bars if bar.what == what]
        for row, lane in enumerate(LANES):
            spans = [(bar.at_s, bar.seconds) for bar in chosen if bar.lane == lane]
            axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=colour, edgecolors="white", linewidth=0.4)
        if chosen:
            axes.plot([], [], color=colour, linewidth=6, label=WORDS[what])
    for bar in bars:
        _number(axes, bar, read.report.prefill_s)
    axes.set_yticks(range(len(LANES)), LANES)
    axes.invert_yaxis()
    axes.set_xlim(0, max([read.report.prefill_s, *(bar.end_s for bar in bars)]) or 1.0)
    axes.set_xlabel("seconds since the read began")
    axes.set_title(title_of(read), fontsize=9, loc="left")
    axes.legend(fontsize=7, ncols=6, loc="upper center", bbox_to_anchor=(0.5, -0.25), frameon=False)
    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "outrigger"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def _number(axes: object, bar: Bar, read_s: float) -> None:
    """The ubatch's number in its bar, where there is room."""
    if bar.what in ("whole", "head", "tail") and bar.seconds > 0.015 * read_s:
        row, centre_s = LANES.index(bar.lane), bar.at_s + bar.seconds / 2
        axes.text(centre_s, row, str(bar.ubatch), ha="center", va="center", color="white", fontsize=6)  # type: ignore[attr-defined]


def html_of(read: LoggedRead) -> str:
    """A page with the picture, how busy each lane was, and every stage in milliseconds."""
    svg = svg_of(read)
    bars, report = bars_of(read.report.stages), read.report
    shares = "".join(
        f"<li>{lane}: busy {busy_s(bars, lane):.3f} s, {busy_s(bars, lane) / (report.prefill_s or 1):.0%}</li>"
        for lane in LANES
    )
    columns = ("position", "head", "out + home", "worker waits", "worker", "import", "tail")
    rows = "".join(
        "<tr>"
        + f"<td>{stage.position:,}</td>"
        + "".join(
            f"<td>{1000 * value:.2f}</td>"
            for value in (
                stage.head_s,
                max(0.0, stage.round_trip_s - stage.queue_s - stage.worker_s),
                stage.queue_s,
                stage.worker_s,
                stage.import_s,
                stage.tail_s,
            )
        )
        + "</tr>"
        for stage in report.stages
    )
    title = escape(title_of(read))
    head = "".join(f"<th>{column}</th>" for column in columns)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        "<style>body{font:14px system-ui;margin:2em}svg{max-width:100%;height:auto}"
        "td,th{padding:.1em .8em;text-align:right}</style>"
        f"<h1>{title}</h1>{svg[svg.index('<svg') :]}<ul>{shares}</ul>"
        f"<table><caption>milliseconds by ubatch</caption><tr>{head}</tr>{rows}</table></html>\n"
    )
