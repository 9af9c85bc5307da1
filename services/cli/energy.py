"""`outrigger energy TRACE...`: watts and joules a token from a battery's rate. The work is services.bench.energy's."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

from common.errors import SettingError

if TYPE_CHECKING:
    from services.bench.energy.integral import RunEnergy

TABLE_COLUMNS = 110
"""Width when the output is no terminal."""


@click.command()
@click.argument(
    "traces",
    nargs=-1,
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="TRACE...",
)
@click.option("--battery-wh", type=float, required=True, help="The battery's energy in watt-hours.")
@click.option(
    "--window", "given", multiple=True, metavar="START:END:TOKENS",
    help="When it generated, in seconds, and how many tokens. Repeatable.  [TRACE's .windows.csv]",
)  # fmt: skip
@click.option("--column", help="XML: the column of rates, where it cannot be told.")
@click.option("-o", "--out", type=click.Path(dir_okay=False, path_type=Path), help="Draw the runs (.svg).")
@click.option("--json", "as_json", is_flag=True, help="One JSON object as the last line.")
def command(
    traces: tuple[Path, ...], battery_wh: float, given: tuple[str, ...], column: str | None, out: Path | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Mean watts, joules and joules a token of runs on battery, integrated only while they generated.

    TRACE holds the battery's rate in percent of its charge an hour, one sample a second: a CSV with the columns time_s
    and percent_per_hour, or the XML of `xctrace export`. The power is that of the whole device, screen included.
    """
    from services.bench.energy.drawing import svg_of
    from services.bench.energy.integral import integrate
    from services.bench.energy.samples import read_trace
    from services.bench.energy.windows import parse_window, windows_beside

    if given and len(traces) > 1:
        raise SettingError(
            "--window belongs to one TRACE; put the windows of several beside each, in .windows.csv"
        )
    if out is not None and out.suffix.lower() != ".svg":
        raise SettingError(f"--out {out}: only .svg is drawn")
    runs = []
    for path in traces:
        trace = read_trace(path, column)
        windows = [parse_window(text) for text in given] if given else windows_beside(path)
        runs.append((trace, windows, integrate(trace, windows, battery_wh)))
    _print([energy for _, _, energy in runs])
    if out is not None:
        out.write_text(svg_of(runs, battery_wh), encoding="utf-8")
        click.echo(f"written to {out}")
    if as_json:
        click.echo(
            json.dumps({"battery_wh": battery_wh, "runs": [_figures(energy) for _, _, energy in runs]})
        )


def _figures(energy: RunEnergy) -> dict[str, object]:
    figures = {
        **asdict(energy),
        "joules_per_token": energy.joules_per_token,
        "tokens_per_s": energy.tokens_per_s,
    }
    return figures | {"outside_w": energy.outside_w if energy.outside_w == energy.outside_w else None}


def _print(runs: Sequence[RunEnergy]) -> None:
    table = Table(box=None)
    table.add_column("run", no_wrap=True)
    columns = ("windows", "seconds", "tokens", "t/s", "mean W", "J", "J/token", "against first", "outside W")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for run in runs:
        against = run.joules_per_token / runs[0].joules_per_token
        table.add_row(
            run.name, str(run.n_windows), f"{run.seconds:,.1f}", f"{run.n_tokens:,}", f"{run.tokens_per_s:.2f}",
            f"{run.mean_w:.3f}", f"{run.joules:,.1f}", f"{run.joules_per_token:.3f}", f"{against:.2f}",
            f"{run.outside_w:.3f}" if run.outside_w == run.outside_w else "",
        )  # fmt: skip
    (Console() if sys.stdout.isatty() else Console(width=TABLE_COLUMNS)).print(table)
    for run in runs:
        for note in run.notes:
            click.echo(f"{run.name}: {note}")
