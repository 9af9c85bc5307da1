"""`outrigger demo`: what a worker is worth, shown in two minutes on one machine. Exit 1 when a token differs."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from common.model.embedded import embedded_model
from common.model.synthetic import ensure_preset
from services.bench.demo import run_demo, tell
from services.bench.report import Report, report_options

REAL = "smollm2"


@click.command()
@click.option("--model", default=REAL, help="smollm2, or a preset of `outrigger synth`.  [smollm2]")
@report_options
def command(model: str, as_json: bool, quick: bool, results_folder: Path | None) -> None:
    """Read a long document alone and with a worker, stream the answer, and cut the cable once in the middle.

    Starts its own processes on free ports; nothing running is touched. Host and worker get one core each, and the host
    alone is shown with one core and with two threads.
    """
    path = embedded_model() if model == REAL else ensure_preset(model)
    report = Report("demo", model, as_json=as_json, quick=quick, results_folder=results_folder)

    def write(text: str) -> None:
        print(text, end="", file=sys.stderr, flush=True)

    shown = run_demo(path, report, write)
    tell(report, shown)
    report.finish()
    if shown.equal != shown.compared:
        raise SystemExit(1)
