"""The long parity run of `outrigger verify --parity`: our engine against stock llama.cpp, natural text, bit for bit.

Every row of the prompts and every decoded step is compared, whole and split, in both weight layouts; more than a
thousand positions a model. In one process, because it compares numbers and not processes. Called by
services.cli.verify.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from common.engine.engine import Engine
from common.engine.parity import ParityCount, compare
from common.engine.weights import WeightLayout
from common.ggml.stock import StockContext, StockModel
from services.bench.models import models
from services.bench.report import Report
from services.bench.texts import natural_tokens

LAYOUTS: tuple[WeightLayout, ...] = ("plain", "repack")
LENGTHS = (512, 513, 514)
"""Of prompts: 0, 1 and 2 rows past the grid, where kernels change."""
LENGTH_PAST_WINDOW = 900
"""One more, for models with a window of 512."""
N_GENERATED = 64
N_CTX = 1024
N_THREADS = 1
"""Threads change no bit, and one does not suffer from what else the machine does."""


def verify_parity(report: Report) -> tuple[int, int]:
    """Compares all models in both layouts; (positions compared, positions equal to the last bit)."""
    total, rows = ParityCount(), []
    for label, path in models(report.quick):
        for weights in LAYOUTS[1:] if report.quick else LAYOUTS:
            count = _compare_model(label, path, weights, report)
            rows.append(
                (f"{label} {weights}", count.compared, count.equal, count.same_token, count.difference_max)
            )
            total += count
    report.model = "+".join(label for label, _ in models(report.quick))
    report.table(
        "logits of our engine and of stock llama.cpp",
        ("", "rows", "equal", "same top token", "furthest apart"),
        rows,
    )
    return total.compared, total.equal


def _compare_model(label: str, path: Path, weights: WeightLayout, report: Report) -> ParityCount:
    model = StockModel(path, repack=weights == "repack")
    stock = StockContext(model, n_ctx=N_CTX, n_threads=N_THREADS)
    rng, total = np.random.default_rng(0), ParityCount()
    with Engine.load(path, n_ctx=N_CTX, n_threads=N_THREADS, weights=weights, device="cpu") as engine:
        report.ran(f"{label} {weights}", engine.describe())
        for n_prompt in (*LENGTHS, LENGTH_PAST_WINDOW) if engine.spec.sliding else LENGTHS:
            tokens = natural_tokens(path, n_prompt, skip=7 * n_prompt)
            for cuts in ([], [int(rng.integers(1, engine.spec.n_layer_full))]):
                count = compare(engine, stock, tokens, N_GENERATED, cuts, logits="last" if cuts else "all")
                what = f"split at {cuts[0]}" if cuts else "whole"
                report.progress(
                    f"{label} {weights}, {n_prompt} tokens, {what}: {count.equal} of {count.compared} equal"
                )
                report.row(model=label, weights=weights, n_prompt=n_prompt, cuts=cuts, **vars(count))
                total += count
    stock.close()
    model.close()
    return total
