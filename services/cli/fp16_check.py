"""`outrigger fp16-check MODEL`: where a Gemma 3 overflows fp16, and the scale that prevents it.

The work is device.coreml.convert's (overflow.py, scale.py).
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from device.coreml.convert.description import GemmaModel
    from device.coreml.convert.overflow import GainErrors, Measured, Tried

TABLE_COLUMNS = 110
"""Width when the output is no terminal."""
OUTPUTS = ("attention", "attention_normed", "gate", "mlp", "mlp_normed")


@click.command()
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("--text", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A text to read.")
@click.option("--tokens", type=click.IntRange(2), help="How many of its tokens.  [all]")
@click.option(
    "--margin", type=click.FloatRange(1), default=4.0, show_default=True,
    help="How far below fp16's largest number the scaled residual must stay.",
)  # fmt: skip
@click.option(
    "-o", "--out", type=click.Path(dir_okay=False, path_type=Path), help="Draw peaks by layer (.svg)."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object as the last line.")
def command(
    model: Path, text: Path | None, tokens: int | None, margin: float, out: Path | None, as_json: bool
) -> None:
    """Measure MODEL's activations over a text, layer by layer, and try what fp16 makes of them.

    MODEL is a Hugging Face folder of a Gemma 3, or a GGUF. The residual scale is chosen by what was measured, as
    `outrigger convert --fp16-scale auto` does, and tried. Exit 1 where no scale helps.
    """
    from common.errors import SettingError
    from device.coreml.convert.calibration import calibration_tokens
    from device.coreml.convert.overflow import gain_errors, measure, scaled_peaks, try_fp16
    from device.coreml.convert.scale import choose_scale
    from device.coreml.convert.source import open_model
    from device.coreml.convert.stored import FP16_MAX

    if out is not None and out.suffix.lower() != ".svg":
        raise SettingError(f"--out {out}: only .svg is drawn")
    opened = open_model(model)
    ids = calibration_tokens(model, text.read_text(encoding="utf-8") if text else None)[:tokens]
    measured = measure(opened, ids)
    _print_peaks(opened, measured, len(ids))
    scale = choose_scale(measured.peaks, margin)
    after = scaled_peaks(measured.peaks, scale)
    plain = try_fp16(opened, ids, 1.0, measured.logits)
    scaled = plain if scale == 1 else try_fp16(opened, ids, scale, measured.logits)
    gains = gain_errors(opened, scale)
    _tell(measured, margin, plain, scaled, gains)
    if out is not None:
        from services.bench.peaks_drawing import svg_of

        title = f"{opened.name}: {len(ids)} tokens, residual scale {scale:g}"
        out.write_text(svg_of(measured.peaks, after, FP16_MAX, margin, title), encoding="utf-8")
        click.echo(f"written to {out}")
    if as_json:
        peaks = [[*at, peak, after[at]] for at, peak in measured.peaks.items()]
        tried = {"unscaled": asdict(plain), "scaled": asdict(scaled)}
        overflows = [list(at) for at in measured.overflows]
        click.echo(
            json.dumps(
                {"scale": scale, "margin": margin, "tokens": len(ids), "overflows": overflows, **tried,
                 "gains": asdict(gains), "peaks": peaks}
            )
        )  # fmt: skip


def _print_peaks(model: GemmaModel, measured: Measured, n_tokens: int) -> None:
    from device.coreml.convert.overflow import LOGITS

    peaks, end = measured.peaks, model.n_layer
    table = Table(
        box=None, title=f"{model.name}: largest magnitudes over {n_tokens} tokens", title_justify="left"
    )
    table.add_column("layer", justify="right")
    table.add_column("kind")
    for column in ("residual", "attention out", "normed", "gate", "MLP out", "normed", "fp16"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_row("", "embedding", _figure(peaks[-1, "embedding"]), *[""] * 5, _holds(measured, -1))
    for layer in range(end):
        residual = max(peaks[layer, "mid"], peaks[layer, "residual"])
        cells = (_figure(peaks[layer, place]) for place in OUTPUTS)
        table.add_row(str(layer), model.kinds[layer], _figure(residual), *cells, _holds(measured, layer))
    table.add_row("", "logits", _figure(peaks[end, LOGITS]), *[""] * 5, _holds(measured, end))
    (Console() if sys.stdout.isatty() else Console(width=TABLE_COLUMNS)).print(table)


def _figure(peak: float) -> str:
    return f"{peak:,.0f}" if peak >= 100 else f"{peak:.3g}"


def _holds(measured: Measured, layer: int) -> str:
    return "overflows" if any(at == layer for at, _ in measured.overflows) else "holds"


def _tell(measured: Measured, margin: float, plain: Tried, scaled: Tried, gains: GainErrors) -> None:
    from device.coreml.convert.overflow import predicted_nan
    from device.coreml.convert.scale import RESIDUAL
    from device.coreml.convert.stored import FP16_MAX

    (at, peak), nan = measured.worst(RESIDUAL), predicted_nan(measured.peaks)
    if nan is not None:
        click.echo(
            f"as it is: passes {FP16_MAX:,.0f} at {_place(measured.overflows[0])}; NaN predicted from {_place(nan)} on"
        )
    click.echo(f"as it is, tried in fp16: {_outcome(plain)}")
    click.echo(
        f"residual scale {scaled.scale:g}: the largest power of two up to 1 that keeps {peak:,.0f} ({_place(at)}) "
        f"{margin:g} times below {FP16_MAX:,.0f}: {peak * scaled.scale:,.0f}"
    )
    if scaled.scale != 1:
        click.echo(f"scaled, tried in fp16: {_outcome(scaled)}")
    for what, (_, high, largest) in (
        ("stored as the gain (as convert does)", gains.as_gain),
        ("as gain - 1, the checkpoint's form", gains.as_gain_minus_one),
    ):
        click.echo(f"post-norms {what}: off by {high:.2%} (99th percentile), at most {largest:.2%}")


def _place(at: tuple[int, str]) -> str:
    layer, place = at
    return place if layer < 0 or place in ("logits", "normed") else f"layer {layer}, {place}"


def _outcome(tried: Tried) -> str:
    if tried.closeness is None:
        first = tried.first_infinite or tried.first_nan
        where = f"infinite first at {_place(first)}" if first else "not finite"
        return f"{where}; NaN first at {_place(tried.first_nan)}" if tried.first_nan else where
    close = tried.closeness
    return (
        f"finite; KL from float32 {close.kl_mean:.1e} nats, at most {close.kl_max:.1e}; "
        f"same likeliest token {close.top1:.0%}"
    )
