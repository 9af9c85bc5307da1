"""`outrigger soak`: mixed requests under random faults. Exit 1 when a token differs or something is held afterwards."""

from __future__ import annotations

import os
from pathlib import Path

import click

from common.config import find_file, load_settings
from common.model.synthetic import ensure_preset
from services.bench.report import Report, report_options
from services.bench.soak.run import run_soak, tell, write_page

QUICK_MODEL, QUICK_MINUTES = "tiny", 1.0


@click.command()
@click.option("--minutes", type=click.FloatRange(0.1, 10_000), help="How long.  [10; with --quick 1]")
@click.option("--seed", type=int, default=1, help="Of requests and faults.  [1]")
@click.option("--model", metavar="FILE", help="GGUF file to serve.  [as set; with --quick a synthetic one]")
@click.option(
    "--report",
    "page",
    type=click.Path(path_type=Path),
    help="A page with plots (.html, or .svg for the plots alone); needs matplotlib.",
)
@report_options
def command(
    minutes: float | None,
    seed: int,
    model: str | None,
    page: Path | None,
    as_json: bool,
    quick: bool,
    results_folder: Path | None,
) -> None:
    """Short chats, long reads, conversations past the host's limit, cancels and new connections, under faults by seed.

    Starts a system of your settings on free ports and in a folder of its own, with an emulated worker whose faults
    strike, and kills its processes. Every answer is compared with that of a host alone; what a killed host ends is
    asked again. At the end memory, descriptors, threads, gauges and the journal must be where they were, and no process
    may have grown steadily. Rows of every sample go to results/soak.jsonl.

    \b
    Exit codes: 0 all as it must be, 1 something is not, 2 a bad setting, 3 a process did not start.
    """
    flags = {"model": str(ensure_preset(QUICK_MODEL)) if quick and model is None else model}
    settings = load_settings(find_file(os.environ), os.environ, flags)
    path = Path(settings.host.model)
    report = Report("soak", path.stem, as_json=as_json, quick=quick, results_folder=results_folder)
    minutes = minutes or (QUICK_MINUTES if quick else 10.0)
    soaked = run_soak(path, settings, report, minutes=minutes, seed=seed)
    tell(report, soaked)
    result = report.finish()
    if page:
        write_page(page, soaked, result, f"soak, {minutes:g} minutes, {path.stem}, seed {seed}")
        click.echo(f"report: {page}", err=True)
    if soaked.problems:
        raise SystemExit(1)
