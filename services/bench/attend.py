"""`outrigger bench attend`: attention by pages against flash attention of the same library, over the same keys.

The 27B's geometry: 4 key/value heads, 6 query heads on each, 256 elements a head. One token (decode) and 256 (prefill)
attend pages that do not fit any cache, f16 and q8_0, on one thread and on two; flash attention reads the same rows
token-major, as stock llama.cpp has them. Rounds take turns, and a figure is the median over rounds of (flash's seconds
/ ours): above 1 we are faster. Ours includes reading results and the fold; both must give the same attention.

    decode_vs_flash_1t, _2t          one token over all pages, f16
    prefill_vs_flash_1t, _2t         256 tokens over one group of pages, f16
    decode_over_bandwidth_floor      our decode on one thread / summing the same bytes (NumPy, one thread)
    prefill_share_of_sgemm           the two matrix products alone (NumPy's BLAS, f32, one thread) / our prefill
    q8_0.decode_vs_flash_1t ...      the same for q8_0 pages, whose form is exact
    q8_0.decode_over_f16_1t, prefill_over_f16_1t    time of a q8_0 page / time of an f16 page

Flash attention's time in prefill depends on where its rows happen to lie (by up to 1.6 on one machine); ours does not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import click
import numpy as np

from common.attention.grouping import group_queries
from common.attention.order import fold_groups
from common.attention.partial import fold_all
from common.attention.reference import softmax_attention
from common.engine.forms import remembered_form
from common.engine.kv_source import QueryRows
from common.ggml.backend import Backend, choose_device
from common.limits import GROUP_PAGES, PAGE_TOKENS
from device.coreml.threads import one_blas_thread
from services.bench.attend_rows import FlashRows, Geometry, PageRows, RandomPage, random_page
from services.bench.load import BUSY_SHARE, LoadMeter
from services.bench.report import NotMeasuredError, Report, report_options

N_HEAD_KV, N_GROUP, HEAD_DIM = 4, 6, 256
SCALE = HEAD_DIM**-0.5
PREFILL_TOKENS = 256
THREADS = (1, 2)
TYPES = ("f16", "q8_0")
ERROR_MAX = 0.02
"""Largest difference from the formula, relative to the largest value: flash attention's f16 sums reach 0.01."""


@dataclass
class Shape:
    """What is attended, and how often it is measured."""

    what: str
    n_tokens: int
    n_pages: int
    n_rounds: int

    @property
    def rows(self) -> QueryRows:
        """Rows that see all keys but those behind their own token."""
        return QueryRows(self.n_pages * PAGE_TOKENS - self.n_tokens, self.n_tokens, N_GROUP)


@dataclass
class Times:
    """Seconds of flash and of ours, round by round, and how much of the machine others used."""

    pairs: list[tuple[float, float]] = field(default_factory=list)
    others: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Median of flash's time over ours."""
        return median(flash / ours for flash, ours in self.pairs)

    @property
    def ours_s(self) -> float:
        return median(ours for _, ours in self.pairs)


def shapes(ggml_type: str, quick: bool) -> list[Shape]:
    """One token over more bytes than caches hold; a ubatch over one group, or over one page of the slower type."""
    prefill_pages = GROUP_PAGES if ggml_type == "f16" else 1
    if quick:
        return [Shape("decode", 1, 8, 7), Shape("prefill", PREFILL_TOKENS, prefill_pages, 3)]
    return [Shape("decode", 1, 16, 15), Shape("prefill", PREFILL_TOKENS, prefill_pages, 7)]


def measure(ggml_type: str, n_threads: int, quick: bool, report: Report) -> dict[str, Times]:
    """Both shapes of one type and thread count. Raises NotMeasuredError when results differ from the formula."""
    backend = Backend(choose_device("cpu"), n_threads)
    n_pages = max(shape.n_pages for shape in shapes(ggml_type, quick))
    keys, values = (random_page(ggml_type, N_HEAD_KV * HEAD_DIM, seed) for seed in (1, 2))
    geometry = Geometry(N_HEAD_KV, N_GROUP, HEAD_DIM, n_pages)
    form = remembered_form(backend) if ggml_type == "f16" else "kernels"
    flash, pages = FlashRows(backend, geometry, keys, values), PageRows(backend, geometry, keys, values, form)
    device = f"{backend.name} ({backend.device.description})"
    report.ran(f"{ggml_type} {n_threads} threads", f"{device}, many rows by {form}")
    measured = {}
    for shape in shapes(ggml_type, quick):
        times = measured[shape.what] = Times()
        rng = np.random.default_rng(shape.n_tokens)
        q = rng.standard_normal((N_HEAD_KV, shape.rows.n_rows, HEAD_DIM), np.float32)
        sides = _sides(flash, pages, q, shape.rows)
        by_flash, by_pages = (side() for side in sides)
        _check(keys, values, q, shape, (group_queries(by_flash, N_HEAD_KV), by_pages))
        for number in range(shape.n_rounds):
            meter = LoadMeter([])
            flash_s, ours_s = _in_turns(sides, number)
            times.pairs.append((flash_s, ours_s))
            times.others.append(meter.others_share())
            report.row(
                type=ggml_type, n_threads=n_threads, what=shape.what, n_pages=shape.n_pages, flash_s=flash_s,
                ours_s=ours_s, others_share=round(times.others[-1], 4),
            )  # fmt: skip
        report.progress(
            f"{ggml_type} {n_threads}t {shape.what}: flash / ours {times.ratio:.2f}, ours "
            f"{times.ours_s * 1e3:.1f} ms for {shape.n_pages} pages (others used up to {max(times.others):.0%})"
        )
    for each in (pages, flash, backend):
        each.close()
    return measured


def _sides(
    flash: FlashRows, pages: PageRows, q: np.ndarray, rows: QueryRows
) -> tuple[Callable[[], np.ndarray], Callable[[], np.ndarray]]:
    """By flash [n_tokens, n_head, head_dim] and by pages [n_head_kv, n_rows, head_dim], with all that belongs to it."""
    n_pages = rows.end // PAGE_TOKENS

    def by_pages() -> np.ndarray:
        parts = pages.kernel.attend(q, SCALE, pages.refs[:n_pages], rows)
        return fold_all(fold_groups(parts, 0, GROUP_PAGES)).output()

    return flash.attention(q, SCALE, rows), by_pages


def _in_turns(sides: tuple[Callable[[], np.ndarray], ...], number: int) -> tuple[float, float]:
    seconds = [0.0, 0.0]
    for side in (0, 1) if number % 2 else (1, 0):
        started_s = time.perf_counter()
        sides[side]()
        seconds[side] = time.perf_counter() - started_s
    return seconds[0], seconds[1]


def _check(
    keys: RandomPage, values: RandomPage, q: np.ndarray, shape: Shape, found: tuple[np.ndarray, np.ndarray]
) -> None:
    """Both against the formula, on the first and the last row of one head."""
    some = [0, shape.rows.n_rows - 1]
    visible = np.arange(shape.rows.end) <= shape.rows.positions[some, None]
    k, v = (np.tile(rows.wide[:, None, :HEAD_DIM], (shape.n_pages, 1, 1)) for rows in (keys, values))
    right, _ = softmax_attention(q[:1, some], k, v, SCALE, visible)
    for who, o in zip(("flash attention", "attention by pages"), found, strict=True):
        error = np.abs(o[:1, some] - right).max() / np.abs(right).max()
        if not error < ERROR_MAX:
            raise NotMeasuredError(f"{shape.what}: {who} is off by {error:.3g} of the largest value")


# --- floors


def bandwidth_floor_s(n_pages: int) -> float:
    """Seconds to sum the bytes of so many f16 pages on one thread: the best of several."""
    data = np.ones(n_pages * PAGE_TOKENS * N_HEAD_KV * HEAD_DIM, np.float32)  # K and V of two bytes each
    return min(_seconds(data.sum) for _ in range(5))


def sgemm_floor_s(n_pages: int) -> float:
    """Seconds of the two matrix products of a ubatch over so many pages, f32, NumPy's BLAS on one thread."""
    n_rows = N_GROUP * PREFILL_TOKENS
    q, k = np.ones((n_rows, HEAD_DIM), np.float32), np.ones((PAGE_TOKENS, HEAD_DIM), np.float32)
    scores = np.empty((n_rows, PAGE_TOKENS), np.float32)

    def products() -> None:
        np.matmul(q, k.T, out=scores)
        scores @ k

    with one_blas_thread():
        return min(_seconds(products) for _ in range(5)) * N_HEAD_KV * n_pages


def _seconds(act: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    act()
    return time.perf_counter() - started_s


# --- telling


def add_figures(report: Report, everything: dict[tuple[str, int], dict[str, Times]], quick: bool) -> None:
    """See the head of this file."""
    for (ggml_type, n_threads), measured in everything.items():
        prefix = "" if ggml_type == "f16" else f"{ggml_type}."
        for what, times in measured.items():
            report.figure(f"{prefix}{what}_vs_flash_{n_threads}t", times.ratio, rounds=len(times.pairs))
            if max(times.others) > BUSY_SHARE:
                report.note(
                    f"{ggml_type} {n_threads}t {what}: other programs took up to {max(times.others):.0%} of the cores"
                )
    decode, prefill = shapes("f16", quick)
    f16 = everything["f16", 1]
    report.figure("decode_over_bandwidth_floor", f16["decode"].ours_s / bandwidth_floor_s(decode.n_pages))
    report.figure("prefill_share_of_sgemm", sgemm_floor_s(prefill.n_pages) / f16["prefill"].ours_s)
    for f16_shape, q8_0_shape in zip(shapes("f16", quick), shapes("q8_0", quick), strict=True):
        what = f16_shape.what
        page_s = everything["q8_0", 1][what].ours_s / q8_0_shape.n_pages
        report.figure(f"q8_0.{what}_over_f16_1t", page_s / (f16[what].ours_s / f16_shape.n_pages))


def print_table(report: Report, everything: dict[tuple[str, int], dict[str, Times]], quick: bool) -> None:
    """Milliseconds a page."""
    rows = []
    for (ggml_type, n_threads), measured in everything.items():
        for shape in shapes(ggml_type, quick):
            times = measured[shape.what]
            flash, ours = (
                median(pair[side] for pair in times.pairs) / shape.n_pages * 1e3 for side in (0, 1)
            )
            rows.append((f"{ggml_type} {shape.what}, {n_threads} threads", flash, ours, times.ratio))
    report.table(
        f"milliseconds a page of {PAGE_TOKENS:,} keys", ("", "flash", "pages", "flash / pages"), rows
    )


@click.command()
@report_options
def command(as_json: bool, quick: bool, results_folder: Path | None) -> None:
    """Attention by pages against flash attention, at the size of a 27B model."""
    report = Report("attend", "none", as_json=as_json, quick=quick, results_folder=results_folder)
    everything = {
        (ggml_type, n_threads): measure(ggml_type, n_threads, quick, report)
        for ggml_type in TYPES
        for n_threads in THREADS
    }
    add_figures(report, everything, quick)
    print_table(report, everything, quick)
    report.finish()
