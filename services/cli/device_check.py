"""`outrigger device-check`: what this device does with a page program. The work is device.coreml.device_check's."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import click


@click.command()
@click.option("--page-tokens", type=int, default=16_384, show_default=True, help="Keys of the sample page.")
@click.option("--heads", type=int, default=4, show_default=True, help="KV heads.")
@click.option("--head-dim", type=int, default=256, show_default=True)
@click.option("--rows", type=int, default=48, show_default=True, help="Query rows a KV head.")
@click.option(
    "--export",
    "export_folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write the sample page, questions and answers there instead, for a phone.",
)
def command(page_tokens: int, heads: int, head_dim: int, rows: int, export_folder: Path | None) -> None:
    """Print one JSON to paste into a report: placement, accuracy, latency of a page program on this device.

    On a Mac the page runs through Core ML on each choice of compute units. Elsewhere the JSON says what could not be
    run and holds the rest. Takes a minute and about half a gigabyte of temporary files.
    """
    from device.coreml.device_check import check_device, export
    from device.coreml.geometry import PageGeometry

    geometry = PageGeometry(heads, head_dim, head_dim, rows, page_tokens)
    if export_folder is not None:
        for path in export(geometry, export_folder):
            click.echo(path)
        return
    with tempfile.TemporaryDirectory() as folder:
        found = check_device(
            geometry, Path(folder), lambda text: click.echo(f"device-check: {text}", err=True)
        )
    click.echo(json.dumps(found, indent=2))
