"""`outrigger drill`: faults on purpose, on a system of the user's own settings. Exit 1 when one ends badly."""

from __future__ import annotations

import os
from pathlib import Path

import click

from common.config import find_file, load_settings
from common.model.synthetic import ensure_preset
from services.bench.drill.run import run_drill
from services.bench.report import Report, report_options

QUICK_MODEL = "tiny"


@click.command()
@click.option("--model", metavar="FILE", help="GGUF file to serve.  [as set; with --quick a synthetic one]")
@click.option("--worker-host", metavar="ADDRESS", help="A worker that runs elsewhere.  [one here, emulated]")
@click.option("--split-layer", type=int, help="First layer of the worker.  [as set]")
@report_options
def command(
    model: str | None,
    worker_host: str | None,
    split_layer: int | None,
    as_json: bool,
    quick: bool,
    results_folder: Path | None,
) -> None:
    """Cut the cable, freeze the worker, damage a frame, kill each process; each in the middle of an answer.

    Starts the system of your settings once more, on free ports and in a folder of its own, and compares every token
    with those of a host alone. For each case: did the answer go on or end with the right error, seconds lost, seconds
    until all stood ready again, what leaked. A worker elsewhere must be free (`outrigger down`); faults of the cable
    need one that was started with `--emulate loopback`.

    \b
    Exit codes: 0 all as promised, 1 one was not, 2 a bad setting, 3 a process did not start.
    """
    flags = {"model": model, "worker_host": worker_host, "split_layer": split_layer}
    if quick and model is None:
        flags["model"] = str(ensure_preset(QUICK_MODEL))
    settings = load_settings(find_file(os.environ), os.environ, flags)
    path = Path(settings.host.model)
    report = Report("drill", path.stem, as_json=as_json, quick=quick, results_folder=results_folder)
    struck = run_drill(path, settings, report)
    report.finish()
    if any(each.problems for each in struck):
        raise SystemExit(1)
