"""Draws what the dashboards show, with matplotlib: `python -m monitoring.draw http://127.0.0.1:9090 docs/images 300`.

For documents, and for whoever has no Grafana: this is not Grafana's rendering. Asks a Prometheus for the queries of
monitoring/panels.py over the last seconds given (300 unless told). Needs the extra `trace` (matplotlib).
"""

from __future__ import annotations

import json
import re
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from monitoring.panels import DASHBOARDS, Dashboard, Panel

COLUMNS = 3


def points(url: str, expression: str, seconds: float) -> list[dict[str, Any]]:
    """The series of one range query, a point a second."""
    now = time.time()
    query = urllib.parse.urlencode({"query": expression, "start": now - seconds, "end": now, "step": "1"})
    with urllib.request.urlopen(f"{url}/api/v1/query_range?{query}", timeout=20) as answer:
        return json.load(answer)["data"]["result"]


def draw(board: Dashboard, url: str, seconds: float, path: Path) -> None:
    """One picture: all panels of a dashboard."""
    rows = -(-len(board.panels) // COLUMNS)
    figure, axes = pyplot.subplots(rows, COLUMNS, figsize=(15, 2.9 * rows), layout="constrained")
    for axis in axes.flat[len(board.panels) :]:
        axis.axis("off")
    for axis, panel in zip(axes.flat, board.panels, strict=False):
        _draw_panel(axis, panel, url, seconds)
    figure.suptitle(f"{board.title} (drawn by monitoring/draw.py from a Prometheus; not Grafana's rendering)")
    figure.savefig(path, dpi=70)
    pyplot.close(figure)


def _draw_panel(axis: Any, panel: Panel, url: str, seconds: float) -> None:
    axis.set_title(f"{panel.title} [{panel.unit}]", fontsize=9)
    for expression, legend in panel.queries:
        for series in points(url, expression, seconds):
            labels = series["metric"]
            name = re.sub(r"{{(\w+)}}", lambda found, labels=labels: labels.get(found[1], ""), legend)
            times, values = zip(*series["values"], strict=True)
            numbers = [float(value) for value in values]
            if any(number > 0 for number in numbers):  # flat zeros would hide the rest in the legend
                axis.plot([at - times[-1] for at in times], numbers, label=name)
    if axis.lines:
        axis.legend(fontsize=7)
        axis.set_ylim(bottom=0)
    else:
        axis.text(0.5, 0.5, "zero all the time", ha="center", fontsize=8)
    axis.tick_params(labelsize=7)


def main(url: str, folder: str, seconds: str = "300") -> None:
    """Draw all of them."""
    for board in DASHBOARDS:
        path = Path(folder) / f"{board.uid}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        draw(board, url, float(seconds), path)
        print(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
