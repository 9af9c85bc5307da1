"""`outrigger pages`: page programs on disk. Build templates for a model, look into packages, check pages.

Everything here runs on any platform; `outrigger device-check` is what needs Apple hardware. The work is done in
device.coreml.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

PACKAGE = click.Path(exists=True, file_okay=False, path_type=Path)
CONSTANTS_SHOWN = 12


@click.group()
def command() -> None:
    """Page programs: old keys as Core ML programs. Build templates, look into packages, check pages."""


def _geometry_options(function: Any) -> Any:
    for option in (
        click.option(
            "--chunk-tokens", type=int, default=0, help="Keys summed together.  [largest up to 1,024]"
        ),
        click.option("--page-tokens", type=int, default=16_384, show_default=True, help="Keys of a page."),
        click.option("--rows", type=int, default=48, show_default=True, help="Query rows a KV head."),
        click.option("--head-dim", type=int, default=256, show_default=True),
        click.option("--heads", type=int, default=4, show_default=True, help="KV heads."),
    ):
        function = option(function)
    return function


@command.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--model", type=click.Path(exists=True, path_type=Path), help="Take heads and head_dim from this GGUF."
)
@click.option(
    "--tokens", type=click.IntRange(1, 64), default=8, show_default=True, help="Query tokens, with --model."
)
@click.option("--sample", is_flag=True, help="Write a page of random keys from it, too.")
@_geometry_options
def build(
    folder: Path,
    model: Path | None,
    tokens: int,
    sample: bool,
    heads: int,
    head_dim: int,
    rows: int,
    page_tokens: int,
    chunk_tokens: int,
) -> None:
    """Build the template of a model's (or the given) geometry in FOLDER."""
    from device.coreml.accuracy import constants_of, make_inputs
    from device.coreml.geometry import PageGeometry
    from device.coreml.page_writer import write_page
    from device.coreml.template import find_template

    if model is not None:
        from common.model.spec import ModelSpec

        spec = ModelSpec.read(model)
        heads, head_dim, rows = spec.n_head_kv, spec.head_dim, spec.n_head // spec.n_head_kv * tokens
    geometry = PageGeometry(heads, head_dim, head_dim, rows, page_tokens, chunk_tokens)
    template = find_template(geometry, folder)
    click.echo(f"{template.path}: {geometry}, {geometry.weight_bytes / 1e6:.1f} MB of constants a page")
    if sample:
        page = folder / f"sample-{geometry.name}.mlpackage"
        write_page(template, constants_of(geometry, make_inputs("realistic", geometry)), page)
        click.echo(f"{page}: a page of random keys")


@command.command()
@click.argument("package", type=PACKAGE)
@click.option("--json", "as_json", is_flag=True, help="Everything, as one JSON object.")
def inspect(package: Path, as_json: bool) -> None:
    """Say what a Core ML PACKAGE contains (any ML Program, not only pages)."""
    from device.coreml.inspection import inspect_package

    view = inspect_package(package)
    if as_json:
        click.echo(json.dumps(asdict(view), default=str))
        return
    click.echo(
        f"{view.path}: specification {view.specification}, {_size(view.program_bytes)} of program, "
        f"{_size(view.weight_bytes)} of weights in {len({c.offset for c in view.constants})} blobs"
    )
    for key, value in sorted(view.metadata.items()):
        click.echo(f"  {key}: {value}")
    for function in view.functions:
        click.echo(f"function {function.name}")
        for title, values in (
            ("takes", function.features),
            ("keeps", function.states),
            ("gives", function.outputs),
        ):
            for name, kind in values.items():
                click.echo(f"  {title} {name}: {kind}")
        click.echo("  runs " + ", ".join(f"{n} {name}" for name, n in function.operations.items()))
        if function.unknown:
            click.echo("  not run by the interpreter: " + ", ".join(function.unknown))
    for constant in view.constants[:CONSTANTS_SHOWN]:
        click.echo(f"  at {constant.offset:>12,}  {constant.name}: {constant.type}")
    if len(view.constants) > CONSTANTS_SHOWN:
        click.echo(f"  and {len(view.constants) - CONSTANTS_SHOWN} more constants (all with --json)")


@command.command()
@click.argument("packages", metavar="PAGE...", type=PACKAGE, nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object as the last line.")
@click.option("--in-order", is_flag=True, help="The worst accumulator, too: a minute a product page.")
def verify(packages: tuple[Path, ...], as_json: bool, in_order: bool) -> None:
    """Check pages against float64 under several assumptions about the hardware. Exit 1 where a bound is passed."""
    from device.coreml.accuracy import ARITHMETICS
    from device.coreml.page_check import USUAL, check_page

    results = []
    for package in packages:
        check = check_page(package, ARITHMETICS if in_order else USUAL)
        verdict = "within bounds" if check.passed else "OUT OF BOUNDS"
        click.echo(f"{package}: {check.n_keys} of {check.geometry}: {verdict}")
        for finding in check.findings:
            click.echo(
                f"  {finding.arithmetic!s:<28} output {finding.o_error:.1e}  lse {finding.lse_error:.1e}"
            )
            results.append({
                "page": str(package), "arithmetic": str(finding.arithmetic), "o_error": finding.o_error,
                "lse_error": finding.lse_error, "within_bounds": finding.within_bounds,
            })  # fmt: skip
    passed = all(result["within_bounds"] for result in results)
    if as_json:
        click.echo(json.dumps({"pages": len(packages), "passed": int(passed), "findings": results}))
    if not passed:
        raise SystemExit(1)


@command.command()
@_geometry_options
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object as the last line.")
def accuracy(as_json: bool, seed: int, **numbers: int) -> None:
    """Measure how exact pages of a geometry are: the table of docs/frozen-pages.md (interpreter, no Apple hardware)."""
    import tempfile

    from device.coreml.accuracy import measure
    from device.coreml.geometry import PageGeometry

    dim = numbers["head_dim"]
    geometry = PageGeometry(
        numbers["heads"], dim, dim, numbers["rows"], numbers["page_tokens"], numbers["chunk_tokens"]
    )
    click.echo(f"{geometry}; error of the worst row's output / of the worst log-sum-exp; interpreter")
    click.echo(f"{'scores':<15}{'arithmetic':<30}{'first call':>20}{'later calls':>20}")
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for found in measure(geometry, Path(folder), seed=seed):
            first, later = (
                f"{found.o_first:.1e} / {found.lse_first:.1e}",
                f"{found.o_later:.1e} / {found.lse_later:.1e}",
            )
            click.echo(f"{found.case:<15}{found.arithmetic!s:<30}{first:>20}{later:>20}")
            results.append({**asdict(found), "arithmetic": str(found.arithmetic)})
    if as_json:
        click.echo(json.dumps({"geometry": geometry.name, "results": results}))


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:,.1f} MB" if n_bytes >= 1e6 else f"{n_bytes / 1e3:,.1f} kB"
