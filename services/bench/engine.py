"""`outrigger bench engine`: our engine against stock llama.cpp of the same wheel, turn by turn in one process.

Same file, weight layout, threads, f16 cache, flash attention and ubatch. A round reads the same text with both, ubatch
by ubatch, and then decodes with both, a few tokens at a time, changing who goes first; so both meet the same
disturbances, and the last logits of both must be equal to the bit. A figure is the median over rounds of (stock's
seconds / ours): above 1 our engine is faster. Decode here is the fused path; engine_depth.py adds the paged one.

    <model>.prefill_vs_stock_1t, _2t    reading PREFILL_TOKENS from an empty cache
    <model>.decode_vs_stock_1t, _2t     decoding DECODE_TOKENS behind them, logits fetched
    smollm2.decode_4k_vs_stock_1t, _2t  decoding by pages from 4,096 tokens on
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from common.engine.engine import Engine
from common.engine.grid import cut
from common.engine.span import LayerSpan
from common.engine.weights import WeightLayout
from common.ggml.stock import StockContext, StockModel
from common.model.embedded import embedded_model
from common.model.synthetic import ensure_preset
from services.bench.engine_depth import add_depth_figures, depth_rows, measure_depth
from services.bench.load import BUSY_SHARE, LoadMeter
from services.bench.report import NotMeasuredError, Report, report_options
from services.bench.texts import natural_tokens

THREADS = (1, 2)
N_CTX = 2048
DECODE_TOKENS = 64
DEPTH_MODEL = "smollm2"
"""Decoded at depth too. A hybrid's attention is a small share of its token at that depth, and stock cannot go back."""
DECODE_TURN_TOKENS = 4
"""Tokens decoded by one side before the other takes its turn."""

Decode = Callable[[NDArray[np.int32], int, Any], NDArray[np.float32]]


@dataclass
class Rounds:
    """Seconds of stock and of ours, round by round, for one model and thread count."""

    label: str
    n_threads: int
    prefill_tokens: int
    prefill_s: list[tuple[float, float]] = field(default_factory=list)
    decode_s: list[tuple[float, float]] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    n_rows_equal: int = 0

    @staticmethod
    def ratio(pairs: list[tuple[float, float]]) -> float:
        """Median of stock's time over ours."""
        return median(stock / ours for stock, ours in pairs)


def cases(quick: bool, models: tuple[str, ...]) -> list[tuple[str, Path, int, int]]:
    """(label, file, tokens read, rounds) of each model."""
    prefill_tokens, n_rounds = (512, 5) if quick else (1024, 9)
    labels = models or ("smollm2", "hybrid-60m" if quick else "hybrid-400m")
    return [
        (label, embedded_model() if label == "smollm2" else ensure_preset(label), prefill_tokens, n_rounds)
        for label in labels
    ]


# --- measuring


def measure(
    label: str, path: Path, prefill_tokens: int, n_rounds: int, weights: WeightLayout, report: Report
) -> list[Rounds]:
    """Both thread counts of one model."""
    measured = []
    tokens = natural_tokens(path, prefill_tokens + DECODE_TOKENS)
    for n_threads in THREADS:
        model = StockModel(path, repack=weights == "repack")
        stock = StockContext(model, n_ctx=N_CTX, n_threads=n_threads)
        with Engine.load(path, n_ctx=N_CTX, n_threads=n_threads, weights=weights, device="cpu") as engine:
            report.ran(f"{label} {n_threads}t", engine.describe())
            span = engine.span(0, engine.spec.n_layer_full)
            rounds = Rounds(label, n_threads, prefill_tokens)
            for number in range(-1, n_rounds):  # the first round warms up caches and is thrown away
                _run_round(rounds, number, stock, span, tokens, report)
        stock.close()
        model.close()
        measured.append(rounds)
    return measured


def _run_round(
    rounds: Rounds,
    number: int,
    stock: StockContext,
    span: LayerSpan,
    tokens: NDArray[np.int32],
    report: Report,
) -> None:
    stock.clear()
    span.truncate(0)
    meter, n = LoadMeter([]), rounds.prefill_tokens
    sides: tuple[Decode, Decode] = (stock.decode, span.run)
    pieces = [(p, rows, "last" if p + rows == n else "none") for p, rows in cut(0, n)]
    prefill_s, logits = _take_turns(sides, tokens, [[piece] for piece in pieces], number)
    steps = [(p, 1, "last") for p in range(n, n + DECODE_TOKENS)]
    turns = [steps[i : i + DECODE_TURN_TOKENS] for i in range(0, len(steps), DECODE_TURN_TOKENS)]
    decode_s, more = _take_turns(sides, tokens, turns, number)
    for theirs, ours in (logits, more):
        if not np.array_equal(theirs, ours):
            raise NotMeasuredError(
                f"{rounds.label}: logits differ from stock, so the times are not comparable"
            )
    if number < 0:
        return
    rounds.prefill_s.append(prefill_s)
    rounds.decode_s.append(decode_s)
    rounds.others.append(meter.others_share())
    rounds.n_rows_equal += 2
    report.row(
        model=rounds.label,
        n_threads=rounds.n_threads,
        prefill_tokens=n,
        decode_tokens=DECODE_TOKENS,
        prefill_stock_s=prefill_s[0],
        prefill_s=prefill_s[1],
        decode_stock_s=decode_s[0],
        decode_s=decode_s[1],
        others_share=round(rounds.others[-1], 4),
    )
    report.progress(
        f"{rounds.label} {rounds.n_threads}t round {number + 1}: prefill {prefill_s[0] / prefill_s[1]:.3f}, decode "
        f"{decode_s[0] / decode_s[1]:.3f} (others used {rounds.others[-1]:.0%} of the cores)"
    )


def _take_turns(
    sides: tuple[Decode, Decode],
    tokens: NDArray[np.int32],
    turns: list[list[tuple[int, int, str]]],
    number: int,
) -> tuple[tuple[float, float], list[NDArray[np.float32]]]:
    """Runs every turn with both sides, changing who is first; seconds of each side, and each one's last logits."""
    seconds, logits = [0.0, 0.0], [np.empty(0, np.float32)] * 2
    for i, turn in enumerate(turns):
        for side in (0, 1) if (i + number) % 2 else (1, 0):
            run = sides[side]
            started_s = time.perf_counter()
            for position, n_rows, wanted in turn:
                logits[side] = run(tokens[position : position + n_rows], position, wanted)
            seconds[side] += time.perf_counter() - started_s
    return (seconds[0], seconds[1]), logits


# --- telling


def add_figures(report: Report, rounds: Rounds) -> None:
    """The two figures of one model and thread count."""
    took_part = {"rounds": len(rounds.prefill_s), "rows_equal_to_stock": rounds.n_rows_equal}
    suffix = f"vs_stock_{rounds.n_threads}t"
    report.figure(f"{rounds.label}.prefill_{suffix}", Rounds.ratio(rounds.prefill_s), **took_part)
    report.figure(f"{rounds.label}.decode_{suffix}", Rounds.ratio(rounds.decode_s), **took_part)
    if max(rounds.others) > BUSY_SHARE:
        report.note(
            f"{rounds.label} {rounds.n_threads}t: other programs took up to {max(rounds.others):.0%} of the cores; "
            f"measure on a quiet machine"
        )


def print_table(report: Report, everything: list[Rounds], at_depth: list[tuple[object, ...]]) -> None:
    """Tokens a second of both sides, medians."""
    rows: list[tuple[object, ...]] = []
    for rounds in everything:
        for what, n, pairs in (
            ("prefill", rounds.prefill_tokens, rounds.prefill_s),
            ("decode", DECODE_TOKENS, rounds.decode_s),
        ):
            stock, ours = (n / median(pair[side] for pair in pairs) for side in (0, 1))
            rows.append(
                (f"{rounds.label} {what}, {rounds.n_threads} threads", stock, ours, Rounds.ratio(pairs))
            )
    report.table("tokens a second, medians", ("", "stock", "ours", "stock's time / ours"), [*rows, *at_depth])


@click.command()
@click.option("--model", "models", multiple=True, help="smollm2 or a preset; may be repeated.  [both]")
@click.option("--weights", type=click.Choice(["repack", "plain"]), default="repack", show_default=True)
@report_options
def command(
    models: tuple[str, ...], weights: WeightLayout, as_json: bool, quick: bool, results_folder: Path | None
) -> None:
    """Prefill and decode against stock llama.cpp of the same build, on one thread and on two."""
    chosen = cases(quick, models)
    labels = "+".join(label for label, *_ in chosen)
    report = Report("engine", labels, as_json=as_json, quick=quick, results_folder=results_folder)
    everything: list[Rounds] = []
    for label, path, prefill_tokens, n_rounds in chosen:
        everything += measure(label, path, prefill_tokens, n_rounds, weights, report)
    at_depth = []
    for label, path, _, n_rounds in chosen:
        if label == DEPTH_MODEL:
            at_depth = measure_depth(label, path, n_rounds, weights, THREADS, report)
    for rounds in everything:
        add_figures(report, rounds)
    add_depth_figures(report, DEPTH_MODEL, at_depth)
    print_table(report, everything, depth_rows(DEPTH_MODEL, at_depth))
    report.finish()
