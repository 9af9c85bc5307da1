"""Decoding at depth, by pages, against stock llama.cpp with flash attention: the second half of `bench engine`.

Both sides read the same text once, on all threads; then they decode the text that follows, a few tokens at a time, in
turns. The paged path is not equal to stock to the bit, so the likeliest tokens are compared instead: sides that differ
more often than roundings do are not measured.

    <model>.decode_4k_vs_stock_1t, _2t    median over rounds of (stock's seconds / ours), from DEPTH_TOKENS on
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np

from common.engine.engine import Decoding, Engine
from common.engine.grid import cut
from common.engine.span import LayerSpan
from common.engine.weights import WeightLayout
from common.ggml.stock import StockContext, StockModel
from services.bench.load import BUSY_SHARE, LoadMeter
from services.bench.report import NotMeasuredError, Report
from services.bench.texts import natural_tokens

DEPTH_TOKENS = 4096
ROUND_TOKENS = 32
TURN_TOKENS = 4
N_CTX = DEPTH_TOKENS + 1024
SAME_TOKEN_SHARE_MIN = 0.8


@dataclass
class DepthRounds:
    """Seconds of stock and of ours for ROUND_TOKENS tokens, round by round, and how often both chose alike."""

    n_threads: int
    pairs: list[tuple[float, float]] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    n_same: int = 0
    n_tokens: int = 0

    @property
    def ratio(self) -> float:
        """Median of stock's time over ours."""
        return median(stock / ours for stock, ours in self.pairs)


def measure_depth(
    label: str, path: Path, n_rounds: int, weights: WeightLayout, threads: tuple[int, ...], report: Report
) -> list[DepthRounds]:
    """All thread counts of one model; the rows read on the most threads serve all of them."""
    tokens = natural_tokens(path, DEPTH_TOKENS + len(threads) * (n_rounds + 1) * ROUND_TOKENS)
    model = StockModel(path, repack=weights == "repack")
    stock = StockContext(model, n_ctx=N_CTX, n_threads=max(threads))
    rows, measured = None, []
    try:
        report.progress(f"{label}: both read {DEPTH_TOKENS} tokens")
        for position, n in cut(0, DEPTH_TOKENS):
            stock.decode(tokens[position : position + n], position, "none")
        for n_threads in sorted(threads, reverse=True):
            stock.use_threads(n_threads)
            with Engine.load(
                path,
                n_ctx=N_CTX,
                n_threads=n_threads,
                weights=weights,
                device="cpu",
                decoding=Decoding("paged"),
            ) as engine:
                report.ran(f"{label} at depth, {n_threads}t", engine.describe())
                span = engine.span(0, engine.spec.n_layer_full)
                if rows is None:
                    for position, n in cut(0, DEPTH_TOKENS):
                        span.run(tokens[position : position + n], position)
                    rows = span.export_rows(0, DEPTH_TOKENS)
                else:
                    span.import_rows(rows, DEPTH_TOKENS)
                stock.truncate(DEPTH_TOKENS)
                measured.append(_rounds(label, n_threads, n_rounds, stock, span, tokens, report))
    finally:
        stock.close()
        model.close()
    return measured[::-1]


def _rounds(
    label: str,
    n_threads: int,
    n_rounds: int,
    stock: StockContext,
    span: LayerSpan,
    tokens: np.ndarray,
    report: Report,
) -> DepthRounds:
    """The first round warms up caches and is thrown away."""
    rounds = DepthRounds(n_threads)
    for number in range(-1, n_rounds):
        meter = LoadMeter([])
        seconds = _decode(rounds, stock, span, tokens, number)
        if number < 0:
            continue
        rounds.pairs.append(seconds)
        rounds.others.append(meter.others_share())
        report.row(
            model=label, n_threads=n_threads, depth=DEPTH_TOKENS, decode_tokens=ROUND_TOKENS,
            decode_stock_s=seconds[0], decode_s=seconds[1], others_share=round(rounds.others[-1], 4),
        )  # fmt: skip
        report.progress(
            f"{label} {n_threads}t at {DEPTH_TOKENS}, round {number + 1}: decode {seconds[0] / seconds[1]:.3f} "
            f"(others used {rounds.others[-1]:.0%} of the cores)"
        )
    if rounds.n_same < SAME_TOKEN_SHARE_MIN * rounds.n_tokens:
        raise NotMeasuredError(
            f"{label}: {rounds.n_same} of {rounds.n_tokens} likeliest tokens are stock's; these are not two roundings "
            "of one model"
        )
    return rounds


def _decode(
    rounds: DepthRounds, stock: StockContext, span: LayerSpan, tokens: np.ndarray, number: int
) -> tuple[float, float]:
    """One round in turns; seconds of both."""
    seconds, first = [0.0, 0.0], span.n_valid
    for turn, start in enumerate(range(first, first + ROUND_TOKENS, TURN_TOKENS)):
        chosen: list[list[int]] = [[], []]
        for side in (0, 1) if (turn + number) % 2 else (1, 0):
            run = (stock.decode, span.run)[side]
            started_s = time.perf_counter()
            for position in range(start, start + TURN_TOKENS):
                chosen[side].append(int(run(tokens[position : position + 1], position, "last")[-1].argmax()))
            seconds[side] += time.perf_counter() - started_s
        rounds.n_tokens += TURN_TOKENS
        rounds.n_same += sum(a == b for a, b in zip(*chosen, strict=True))
    return seconds[0], seconds[1]


def add_depth_figures(report: Report, label: str, everything: list[DepthRounds]) -> None:
    """One figure for each thread count."""
    for rounds in everything:
        name = f"{label}.decode_4k_vs_stock_{rounds.n_threads}t"
        report.figure(name, rounds.ratio, rounds=len(rounds.pairs), tokens_same=rounds.n_same)
        if max(rounds.others) > BUSY_SHARE:
            report.note(
                f"{label} {rounds.n_threads}t at {DEPTH_TOKENS}: other programs took up to {max(rounds.others):.0%} of "
                "the cores; measure on a quiet machine"
            )


def depth_rows(label: str, everything: list[DepthRounds]) -> list[tuple[object, ...]]:
    """Rows for the table of tokens a second."""
    rows: list[tuple[object, ...]] = []
    for rounds in everything:
        stock, ours = (ROUND_TOKENS / median(pair[side] for pair in rounds.pairs) for side in (0, 1))
        rows.append(
            (f"{label} decode at {DEPTH_TOKENS}, {rounds.n_threads} threads", stock, ours, rounds.ratio)
        )
    return rows
