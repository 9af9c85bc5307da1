"""`outrigger verify`: proves on this machine that answers do not depend on the worker. Exit 1 when they do.

Parts: --split (the default) compares token ids with and without a worker; --parity compares the engine's logits with
stock llama.cpp of the same build.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import click

from services.bench.report import Report, report_options


@click.command()
@click.option(
    "--split", "part", flag_value="split", default="split", help="With and without worker.  [default]"
)
@click.option(
    "--parity", "part", flag_value="parity", help="The engine against stock llama.cpp, bit for bit."
)
@report_options
def command(part: str, as_json: bool, quick: bool, results_folder: Path | None) -> None:
    """Compare answers that must be equal. Starts its own processes on free ports; nothing running is touched."""
    run = {"split": _split, "parity": _parity}[part]
    if not run(as_json=as_json, quick=quick, results_folder=results_folder):
        raise SystemExit(1)


def _split(*, as_json: bool, quick: bool, results_folder: Path | None) -> bool:
    verify = import_module("services.bench.verify")
    labels = "+".join(label for label, _path in verify.models(quick))
    report = Report("verify", labels, as_json=as_json, quick=quick, results_folder=results_folder)
    totals = verify.verify_split(report)
    report.figure("compared", totals.compared, compared=totals.compared)
    report.figure("equal", totals.equal)
    report.figure("worker_tokens", totals.worker_tokens, worker_tokens=totals.worker_tokens)
    report.figure("worker_kills", totals.worker_kills)
    for difference in totals.differences:
        click.echo(f"DIFFERENT {difference}", err=True)
    report.finish()
    return totals.passed


def _parity(*, as_json: bool, quick: bool, results_folder: Path | None) -> bool:
    parity = import_module("services.bench.parity")
    report = Report("verify_parity", "", as_json=as_json, quick=quick, results_folder=results_folder)
    compared, equal = parity.verify_parity(report)
    report.figure("compared", compared, compared=compared)
    report.figure("equal", equal)
    report.finish()
    return compared == equal
