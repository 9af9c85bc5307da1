"""`outrigger synth`: writes a synthetic model. All the work is common.model.synthetic's."""

from __future__ import annotations

import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click

from common.ggml.quantize import STORAGE_TYPES
from common.model.embedded import embedded_model
from common.model.geometry import ARCHITECTURES, PRESETS, Geometry, preset
from common.model.synthetic import write_synthetic
from services.cli.progress import ByteProgress

NUMBERS = [field.name for field in fields(Geometry) if field.type == "int"]
"""The geometry's whole numbers; each is an option that replaces the preset's value."""


def _geometry_options(command: Any) -> Any:
    for name in reversed(NUMBERS):
        option = f"--{name.replace('_', '-')}"
        command = click.option(option, name, type=click.IntRange(min=1), metavar="N", hidden=True)(command)
    return command


@click.command(
    epilog="Geometry, each replacing the preset's value: "
    + ", ".join(f"--{name.replace('_', '-')}" for name in NUMBERS)
    + "."
)
@click.argument("name", metavar="PRESET", type=click.Choice(list(PRESETS)))
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Same seed, same bytes."
)
@click.option(
    "--type", "storage", type=click.Choice(list(STORAGE_TYPES)), help="Of the matrices.  [preset's]"
)
@click.option("--arch", type=click.Choice(ARCHITECTURES), help="Architecture.  [preset's: qwen35]")
@click.option("--untied", is_flag=True, help="An output matrix of its own instead of the embedding's.")
@click.option(
    "--tokenizer", type=click.Path(path_type=Path), help="GGUF to take the tokenizer from.  [embedded model]"
)
@click.option("--no-tokenizer", is_flag=True, help="Token ids only; allows any --n-vocab.")
@_geometry_options
def command(
    name: str,
    out: Path,
    seed: int,
    storage: str | None,
    arch: str | None,
    untied: bool,
    tokenizer: Path | None,
    no_tokenizer: bool,
    **numbers: int | None,
) -> None:
    """Write a model of seeded random weights to the file OUT.

    Stock llama.cpp loads it like any other. For tests and measurements: it has a tokenizer and talks nonsense.
    """
    geometry, preset_storage = preset(name)
    changes: dict[str, Any] = {key: value for key, value in numbers.items() if value is not None}
    geometry = replace(geometry, arch=arch or geometry.arch, tied=geometry.tied and not untied, **changes)
    source = None if no_tokenizer else tokenizer or embedded_model()
    storage = storage or preset_storage
    started_s = time.monotonic()
    with ByteProgress(f"writing {out}") as progress:
        write_synthetic(geometry, out, storage=storage, seed=seed, tokenizer=source, progress=progress)
    in_layers, elsewhere = geometry.n_params()
    click.echo(
        f"{out}: {geometry.arch}, {geometry.n_layer} layers of {in_layers / 1e6:.1f}M parameters in all, "
        f"{elsewhere / 1e6:.1f}M in embedding and output, {storage}, seed {seed}, "
        f"{out.stat().st_size / 1e6:.1f} MB in {time.monotonic() - started_s:.1f} s"
    )
