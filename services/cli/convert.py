"""`outrigger convert MODEL OUT`: a Gemma 3 model as a Core ML bundle. The work is device.coreml.convert's."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from device.coreml.convert.description import GemmaModel
    from device.coreml.convert.manifest import Manifest, PartRecord
    from device.coreml.convert.options import ConvertOptions, Part

LUT_HELP = "none, BITS, or BITS,GROUP (GROUP output channels share a table)."


@click.command()
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
@click.option("--context", type=int, default=1024, show_default=True, help="Tokens a conversation can have.")
@click.option("--batch", type=int, default=64, show_default=True, help="Tokens of a prompt read at once.")
@click.option(
    "--chunks", type=int, default=0, help="Transformer packages.  [as few as keep each below 0.95 GB]"
)
@click.option("--lut-embeddings", default="8", show_default=True, help=LUT_HELP)
@click.option("--lut-layers", default="4,8", show_default=True, help=LUT_HELP)
@click.option("--lut-head", default="6,4", show_default=True, help=LUT_HELP)
@click.option(
    "--fp16-scale",
    default="auto",
    show_default=True,
    help="Factor of the residual stream: auto measures the model, or a power of two.",
)
@click.option("--dry-run", is_flag=True, help="Print parts and sizes; write nothing.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object as the last line.")
def command(
    model: Path,
    out: Path,
    context: int,
    batch: int,
    chunks: int,
    lut_embeddings: str,
    lut_layers: str,
    lut_head: str,
    fp16_scale: str,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Convert MODEL (a Hugging Face folder of a Gemma 3, or a GGUF) to a Core ML bundle in the folder OUT.

    An interrupted conversion goes on where it stopped. Runs anywhere; compiling the packages afterwards needs a Mac
    (OUT/finish-on-mac.sh).
    """
    from device.coreml.convert.options import ConvertOptions, plan_parts
    from device.coreml.convert.palette import Lut
    from device.coreml.convert.scale import parse_scale
    from device.coreml.convert.source import open_model

    scale = parse_scale(fp16_scale)
    options = ConvertOptions(
        context, batch, chunks, Lut.parse(lut_embeddings, "--lut-embeddings"), Lut.parse(lut_layers, "--lut-layers"),
        Lut.parse(lut_head, "--lut-head"), 1.0 if scale is None else scale,
    )  # fmt: skip
    opened = open_model(model)
    parts = plan_parts(opened, options)
    _introduce(opened, options, parts)
    if scale is None:
        options = _with_measured_scale(opened, model, options)
    else:
        click.echo(f"residual scale {scale:g}, as given")
    if dry_run:
        return
    began_s = time.monotonic()
    manifest = _convert(opened, out, options)
    _conclude(manifest, out, time.monotonic() - began_s, as_json)


def _introduce(model: GemmaModel, options: ConvertOptions, parts: tuple[Part, ...]) -> None:
    click.echo(
        f"{model.name}: {model.n_layer} layers of width {model.n_embd}, {model.n_head} heads, "
        f"{model.n_head_kv} KV heads, window {model.window}, {model.n_vocab:,} tokens"
    )
    for note in model.notes:
        click.echo(f"  {note}")
    for kind, rope in sorted(model.ropes.items()):
        n_layers = model.kinds.count(kind)
        scaling = f", positions divided by {rope.factor:g}" if rope.factor != 1 else ""
        click.echo(f"  {n_layers} {kind} layers: rotary base {rope.base:,.0f}{scaling}")
    click.echo(f"context {options.context:,}, batches of {options.batch}")
    for part in parts:
        lut, plain = options.lut(part.kind), 2 * part.n_weights
        saved = f" instead of {plain / 1e6:,.0f} ({lut})" if lut else " (fp16)"
        click.echo(f"  {part.name:<36} {part.estimated_bytes / 1e6:>8,.0f} MB{saved}")
    total, plain = sum(part.estimated_bytes for part in parts), sum(2 * part.n_weights for part in parts)
    click.echo(f"  {'together':<36} {total / 1e6:>8,.0f} MB instead of {plain / 1e6:,.0f}")


def _with_measured_scale(model: GemmaModel, path: Path, options: ConvertOptions) -> ConvertOptions:
    from dataclasses import replace

    from device.coreml.convert.calibration import calibration_tokens
    from device.coreml.convert.scale import choose_scale, peaks_over

    peaks = peaks_over(model, calibration_tokens(path))
    (layer, place), peak = max(peaks.items(), key=lambda item: item[1])
    scale = choose_scale(peaks)
    click.echo(f"largest activation {peak:,.0f} (layer {layer}, {place}); residual scale {scale:g}")
    return replace(options, scale=scale)


def _convert(model: GemmaModel, out: Path, options: ConvertOptions) -> Manifest:
    from device.coreml.convert.convert import Watch, convert

    progress = _Progress()
    return convert(model, out, options, Watch(progress.part, progress.weights))


def _conclude(manifest: Manifest, out: Path, seconds: float, as_json: bool) -> None:
    from device.coreml.convert.lint import lint

    total = sum(part.n_bytes for part in manifest.parts)
    click.echo(f"{out}: {total / 1e6:,.1f} MB in {len(manifest.parts)} packages, {seconds:.0f} s")
    findings = [finding for finding in lint(out) if finding.level != "note"]
    for finding in findings:
        click.echo(f"  {finding.level}: {finding.where}: {finding.what}; {finding.remedy}")
    click.echo(
        "next: on a Mac, sh finish-on-mac.sh in that folder; README.md there says what an app must pass"
    )
    if as_json:
        figures = {
            "bytes": total, "seconds": round(seconds, 2), "findings": len(findings),
            "parts": [
                {"package": part.package, "bytes": part.n_bytes, "seconds": part.seconds, "error": part.palette_error}
                for part in manifest.parts
            ],
        }  # fmt: skip
        click.echo(json.dumps(figures))


class _Progress:
    """One line a part when it is done, and how far the whole is while it runs (on standard error)."""

    def __init__(self) -> None:
        self._began_s = self._shown_s = time.monotonic()
        self._first_done: int | None = None
        self._made = False

    def part(self, part: Part, record: PartRecord | None) -> None:
        if record is None:
            self._made = True
            return
        self._clear()
        error = f", palettes off by {record.palette_error:.2%}" if record.palette_error else ""
        how = f"{record.seconds:.1f} s" if self._made else "kept from before"
        self._made = False
        click.echo(f"  {part.package:<46} {record.n_bytes / 1e6:>8,.1f} MB  {how}{error}")

    def weights(self, done: int, total: int) -> None:
        now_s = time.monotonic()
        if self._first_done is None:
            self._first_done, self._began_s = done, now_s
            return
        if now_s - self._shown_s < (0.2 if sys.stderr.isatty() else 10.0):
            return
        self._shown_s = now_s
        left_s = (now_s - self._began_s) * (total - done) / max(done - self._first_done, 1)
        line = f"  {done / total:4.0%} of {total / 1e6:,.0f} M weights, {left_s:,.0f} s left"
        sys.stderr.write(f"\r{line}\x1b[K" if sys.stderr.isatty() else f"{line}\n")
        sys.stderr.flush()

    def _clear(self) -> None:
        if sys.stderr.isatty():
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
