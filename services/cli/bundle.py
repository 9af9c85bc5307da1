"""`outrigger bundle`: what to do with a converted bundle: lint it, prove it. The work is device.coreml.convert's."""

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


@command.command()
@click.argument("folder", type=FOLDER)
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("--text", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A text to read.")
@click.option("--tokens", type=int, default=96, show_default=True, help="How many of its tokens to read.")
@click.option("--single", type=int, default=8, show_default=True, help="Tokens read again one by one.")
@click.option(
    "--logits", type=int, default=16, show_default=True, help="Positions whose logits are compared."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object as the last line.")
def prove(
    folder: Path, model: Path, text: Path | None, tokens: int, single: int, logits: int, as_json: bool
) -> None:
    """Execute every part of FOLDER over a text by the interpreter and compare with MODEL's float64 forward.

    MODEL is what the bundle was made from. Exit 1 where something is not finite. Minutes for a model of 270M; what is
    close enough depends on the palettes (docs/gemma.md has figures).
    """
    import math

    from device.coreml.convert.calibration import calibration_tokens
    from device.coreml.convert.proof import prove as proof_of
    from device.coreml.convert.source import open_model

    ids = calibration_tokens(model, text.read_text(encoding="utf-8") if text else None)[:tokens]
    proof = proof_of(open_model(model), folder, ids, min(single, len(ids) - 1), min(logits, len(ids)))
    close = proof.closeness
    click.echo(f"{folder}: {proof.n_tokens} tokens through every part, by the interpreter")
    for i, error in enumerate(proof.residual_errors):
        click.echo(f"  residual after chunk {i + 1}: {error:.2e} from float64 (relative, worst position)")
    click.echo(f"  batches against {proof.n_infer} single tokens: {proof.prefill_vs_infer:.2e}")
    click.echo(
        f"  likeliest token the same: {close.top1:.1%}; KL {close.kl_mean:.2e} nats, at most {close.kl_max:.2e}"
    )
    if as_json:
        click.echo(json.dumps(asdict(proof)))
    if not all(map(math.isfinite, (*proof.residual_errors, proof.prefill_vs_infer, close.kl_max))):
        click.echo("  not finite: the residual overflows fp16; convert with --fp16-scale auto")
        raise SystemExit(1)
