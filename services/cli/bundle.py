"""`outrigger bundle`: what to do with a converted bundle: lint it. The work is device.coreml.convert's."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.group()
def command() -> None:
    """Core ML bundles of Gemma 3 models, made by `outrigger convert`."""


@command.command()
@click.argument("folder", type=FOLDER)
@click.option("--json", "as_json", is_flag=True, help="One JSON object as the last line.")
def lint(folder: Path, as_json: bool) -> None:
    """Say what would go wrong on a device with FOLDER, a bundle or any folder of packages; exit 1 on errors."""
    from device.coreml.convert.lint import lint as findings_of

    findings = findings_of(folder)
    for finding in findings:
        click.echo(f"{finding.level:<8} {finding.rule:<15} {finding.where}: {finding.what}")
        click.echo(f"{'':<24} {finding.remedy}")
    n_errors = sum(finding.level == "error" for finding in findings)
    click.echo(f"{folder}: {n_errors} errors, {sum(f.level == 'warning' for f in findings)} warnings")
    if as_json:
        click.echo(json.dumps({"errors": n_errors, "findings": [asdict(finding) for finding in findings]}))
    if n_errors:
        raise SystemExit(1)
