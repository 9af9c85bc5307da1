"""Writes the dashboards of monitoring/panels.py as Grafana's JSON: `make dashboards`.

Needs grafana-foundation-sdk (extra `dashboards`). A test compares the files in the repository with what this makes.
"""

from __future__ import annotations

import json
from pathlib import Path

from grafana_foundation_sdk.builders import common, prometheus, timeseries
from grafana_foundation_sdk.builders import dashboard as grafana
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement, TooltipDisplayMode
from grafana_foundation_sdk.models.dashboard import DashboardCursorSync, DataSourceRef

from monitoring.panels import DASHBOARDS, Dashboard, Panel

FOLDER = Path(__file__).parent / "grafana" / "dashboards"
SOURCE = DataSourceRef(type_val="prometheus", uid="outrigger-prometheus")
"""The data source of grafana/provisioning."""


def json_of(board: Dashboard) -> str:
    """The JSON text of one dashboard."""
    made = (
        grafana.Dashboard(board.title)
        .uid(board.uid)
        .description(board.text)
        .tags(["outrigger"])
        .time("now-30m", "now")
        .refresh("10s")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
    )
    for panel in board.panels:
        made = made.with_panel(_panel(panel))
    body = json.loads(json.dumps(made.build(), cls=JSONEncoder))
    del body["style"]  # Grafana's schema has no such field any more; the SDK still writes its default
    return json.dumps(body, indent=2, sort_keys=True) + "\n"


def _panel(panel: Panel) -> timeseries.Panel:
    made = timeseries.Panel().title(panel.title).unit(panel.unit).datasource(SOURCE).height(8).span(12).min(0)
    if panel.quiet:
        made = made.description(f"Zero, or empty, unless {panel.quiet}.")
    made = made.tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
    legends = common.VizLegendOptions().display_mode(LegendDisplayMode.LIST)
    made = made.legend(legends.placement(LegendPlacement.BOTTOM).show_legend(True))
    for ref, (expression, legend) in zip("ABCDEFGH", panel.queries, strict=False):
        made = made.with_target(prometheus.Dataquery().ref_id(ref).expr(expression).legend_format(legend))
    return made


def main() -> None:
    """Write all of them."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for board in DASHBOARDS:
        path = FOLDER / f"{board.uid}.json"
        path.write_text(json_of(board), encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
