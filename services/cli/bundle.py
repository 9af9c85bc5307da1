"""`outrigger bundle`: what to do with a converted bundle: lint it, prove it, bring it somewhere, check it there.

The work is device.coreml.convert's, and services.cli.phone_files' for phones.
"""

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


@command.command()
@click.argument("bundle", type=FOLDER)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path), required=False)
@click.option(
    "--device", metavar="APP", help="The app (com.example.chat) on a phone at the cable, instead of FOLDER."
)
@click.option(
    "--packages/--no-packages",
    default=None,
    help="Take .mlpackage folders along.  [where not all are compiled]",
)
def push(bundle: Path, folder: Path | None, device: str | None, packages: bool | None) -> None:
    """Copy BUNDLE into FOLDER (a mounted device, a disk), and check sizes and hashes of what arrived.

    What is there already and right is kept; an interrupted push goes on. With --device the files go into an app's
    Documents by pymobiledevice3's command line (extra "usbmux"); that was never tried on a device.
    """
    from common.errors import SettingError
    from device.coreml.convert import delivery

    if (folder is None) == (device is None):
        raise SettingError("give FOLDER or --device APP, one of them")
    files = delivery.contents(bundle, packages)
    if packages is None and any(".mlpackage/" in name for name in files):
        click.echo(
            "not compiled yet: .mlpackage folders go along; an app wants .mlmodelc (sh finish-on-mac.sh)"
        )
    if folder is not None:
        done = delivery.push(bundle, folder, files, _arrived)
    else:
        from services.cli.phone_files import PhoneFiles

        assert device is not None, "one of both is given"
        done = PhoneFiles(device).push(bundle, bundle.resolve().name, files, _arrived)
    click.echo(
        f"{folder or device}: {done.n_copied} files copied ({done.n_bytes / 1e6:,.1f} MB), {done.n_kept} were there; "
        "sizes and hashes are right"
    )


def _arrived(name: str, size: int) -> None:
    click.echo(f"  {size / 1e6:>8,.1f} MB  {name}")


@command.command()
@click.argument("folder", type=FOLDER)
@click.option(
    "--device", metavar="APP", help="Check the copy of the bundle FOLDER in an app on a phone at the cable."
)
@click.option("--packages/--no-packages", default=None, help="With --device: as it was pushed.")
def verify(folder: Path, device: str | None, packages: bool | None) -> None:
    """Check sizes and hashes of a delivered bundle, or of one as it was made; exit 1 where something is wrong."""
    from device.coreml.convert import delivery

    if device is None:
        n_files, wrong, strangers = delivery.check(folder)
    else:
        from services.cli.phone_files import PhoneFiles

        files = delivery.contents(folder, packages)
        n_files, wrong, strangers = (
            len(files),
            [*PhoneFiles(device).wrong(folder.resolve().name, files).values()],
            [],
        )
    for problem in wrong:
        click.echo(f"wrong    {problem}")
    for name in strangers:
        click.echo(f"note     {name} does not belong to it")
    click.echo(f"{device or folder}: {n_files - len(wrong)} of {n_files} files are right")
    if wrong:
        raise SystemExit(1)
