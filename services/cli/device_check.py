"""`outrigger device-check`: what this device does with a page program, or a bundle. The work is device.coreml's."""

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
@click.option(
    "--bundle",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Check this bundle (of `outrigger convert`) instead of a page.",
)
@click.option("--prompt-tokens", type=click.IntRange(1), default=13, show_default=True, help="With --bundle.")
@click.option(
    "--tokens", type=click.IntRange(1), default=4, show_default=True, help="Generated, with --bundle."
)
def command(
    page_tokens: int, heads: int, head_dim: int, rows: int, export_folder: Path | None, bundle: Path | None,
    prompt_tokens: int, tokens: int,
) -> None:  # fmt: skip
    """Print one JSON to paste into a report: placement, accuracy, latency of a page program on this device.

    On a Mac the page runs through Core ML on each choice of compute units. Elsewhere the JSON says what could not be
    run and holds the rest. Takes a minute and about half a gigabyte of temporary files.

    With --bundle: sizes and hashes, what goes wrong on devices, and a few tokens, by the interpreter and through Core
    ML, loaded as the policy for failing loads says. Exit 1 where the bundle is damaged or has errors.
    """
    if bundle is not None:
        _check_bundle(bundle, prompt_tokens, tokens)
        return
    from device.coreml.device_check import check_device, export
    from device.coreml.geometry import PageGeometry

    geometry = PageGeometry(heads, head_dim, head_dim, rows, page_tokens)
    if export_folder is not None:
        for path in export(geometry, export_folder):
            click.echo(path)
        return
    with tempfile.TemporaryDirectory() as folder:
        found = check_device(geometry, Path(folder), _progress)
    click.echo(json.dumps(found, indent=2))


def _progress(text: str) -> None:
    click.echo(f"device-check: {text}", err=True)


def _check_bundle(folder: Path, n_prompt: int, n_tokens: int) -> None:
    from device.coreml.convert.bundle_check import check_bundle, default_prompt
    from device.coreml.convert.manifest import Manifest

    prompt = default_prompt(int(Manifest.read(folder).model["n_vocab"]), n_prompt)
    found = check_bundle(folder, _progress, prompt, n_tokens)
    for engine in ("interpreter", "core_ml"):
        if found[engine] and "stats" in found[engine]:
            _progress(f"{engine}: {found[engine]['stats']}")
    click.echo(json.dumps(found, indent=2))
    if found["wrong_files"] or any(finding["level"] == "error" for finding in found["findings"]):
        raise SystemExit(1)
