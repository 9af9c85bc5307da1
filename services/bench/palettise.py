"""`outrigger bench palettise`: our one-dimensional k-means against coremltools' own, on one core.

Weights are a Gemma 3's (with --model) or random ones of the same widths: normal, and with heavy tails. For each setting
(bits, output channels a table, channels):

    NAME.s_per_m          our seconds a million weights, tables and indices
    NAME.coremltools_s    coremltools' seconds a million weights: exact from 10,000 a table on, below by scikit-learn
    NAME.error_ratio      summed squared error of ours over theirs, tables rounded to fp16 (1: equal)

coremltools is asked for a few tables only, and both errors are taken over those. Where it would need scikit-learn and
that is not installed, only ours is told.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
from threadpoolctl import threadpool_limits

from device.coreml.convert.palette import Lut, palettise
from device.coreml.convert.source import open_model
from device.coreml.toolchain import kmeans_of_coremltools
from services.bench.report import Report, report_options

SETTINGS = ((4, 8, 2560), (6, 4, 2560), (4, 0, 2560), (4, 8, 640), (6, 4, 640))
N_WEIGHTS = 1 << 20
TABLES_COMPARED = 6


@click.command("palettise")
@click.option(
    "--model", type=click.Path(exists=True, path_type=Path), help="Take up and down matrices from this."
)
@report_options
def command(as_json: bool, quick: bool, results_folder: Path | None, model: Path | None) -> None:
    """Time palettisation and compare its error with coremltools'."""
    name = "random" if model is None else model.name
    report = Report("palettise", name, as_json=as_json, quick=quick, results_folder=results_folder)
    report.ran("host", "NumPy on one core; coremltools' k-means on the same tables")
    kmeans_of_coremltools(np.zeros((4, 4096), np.float16), 2)  # imported before anything is timed
    with threadpool_limits(1):
        for label, lut, weights in _cases(model, quick):
            report.progress(f"{label}: {weights.size:,} weights")
            began_s = time.process_time()
            palette = palettise(weights, lut)
            ours_s = time.process_time() - began_s
            per_million = 1e6 / weights.size
            report.figure(f"{label}.s_per_m", ours_s * per_million, weights=weights.size)
            theirs = _compared(weights, palette.dense(), lut)
            row = {"label": label, "s_per_m": ours_s * per_million, "error": palette.error(weights)}
            if theirs is not None:
                seconds, ratio = theirs
                report.figure(f"{label}.coremltools_s", seconds * per_million, weights=weights.size)
                report.figure(f"{label}.error_ratio", ratio, tables=min(TABLES_COMPARED, len(palette.tables)))
                row |= {"coremltools_s": seconds * per_million, "error_ratio": ratio}
            report.row(**row)
    report.finish()


def _cases(model: Path | None, quick: bool) -> Iterator[tuple[str, Lut, np.ndarray]]:
    """(name, setting, fp16 matrix) of each case."""
    if model is not None:
        opened = open_model(model)
        for bits, group in ((4, 8), (6, 4), (4, 0)):
            for name in (f"{opened.n_layer // 2}.up", f"{opened.n_layer // 2}.down"):
                label = f"lut{bits}-{group}.{name.partition('.')[2]}"
                yield label, Lut(bits, group), opened.rows(name).astype(np.float16)
        return
    rng = np.random.default_rng(0)
    for bits, group, n_in in SETTINGS[: 1 if quick else None]:
        shape = ((N_WEIGHTS >> 3 if quick else N_WEIGHTS) // n_in // 8 * 8, n_in)
        for kind in ("normal", "heavy"):
            values = rng.standard_normal(shape) if kind == "normal" else rng.standard_t(5, shape)
            yield f"lut{bits}-{group}.w{n_in}.{kind}", Lut(bits, group), (0.02 * values).astype(np.float16)


def _compared(weights: np.ndarray, dense: np.ndarray, lut: Lut) -> tuple[float, float] | None:
    """(coremltools' seconds for all of it, our squared error over theirs), or None where it cannot run."""
    rows = lut.group or len(weights)
    tables = range(0, len(weights), rows)
    chosen = tables[:: max(len(tables) // TABLES_COMPARED, 1)][:TABLES_COMPARED]
    ours = theirs = 0.0
    began_s = time.process_time()
    for first in chosen:
        part = weights[first : first + rows]
        found = kmeans_of_coremltools(part, lut.bits)
        if found is None:
            return None
        theirs += float(((found.astype(np.float64) - part) ** 2).sum())
    seconds = (time.process_time() - began_s) * len(tables) / len(chosen)
    for first in chosen:
        part = weights[first : first + rows].astype(np.float64)
        ours += float(((dense[first : first + rows].astype(np.float64) - part) ** 2).sum())
    return seconds, ours / theirs
