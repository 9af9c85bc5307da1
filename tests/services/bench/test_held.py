"""Aim: the bench of held pages makes its figures of what was counted, refuses what did not take part, and runs.

Method: counts and answers made by hand, with results known; then a small model through real processes, where no figure
is judged.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.model.synthetic import ensure_preset
from common.wire.messages import ReadReport
from services.bench import held
from services.bench.client import Answer
from services.bench.compared import Compared
from services.bench.held_figures import Pages, ReadSpent, TokenSpent, memory_of
from services.bench.report import Report

PAGES = Pages(all_s=0.6, wait_s=0.2, worker_s=0.5, n_bytes=1e6, by_worker=12, by_journal=0)


def answer(n_tokens: int, **report: float) -> Answer:
    return Answer(tuple(range(n_tokens)), ReadReport(**report), 0.1, 1.0)  # type: ignore[arg-type]


def test_counts_are_what_grew_between_two_scrapes():
    seconds = 'outrigger_page_attention_seconds_total{{part="{}",rows="{}"}}'
    before = {seconds.format("all", "one"): 1.0, seconds.format("all", "many"): 5.0}
    after = {
        seconds.format("all", "one"): 1.5,
        seconds.format("wait", "one"): 0.25,
        seconds.format("all", "many"): 7.0,
        seconds.format("worker", "many"): 4.0,
        'outrigger_link_bytes_total{direction="in",kind="queries"}': 30.0,
        'outrigger_link_bytes_total{direction="out",kind="queries"}': 12.0,
        'outrigger_link_bytes_total{direction="out",kind="pages"}': 500.0,
        'outrigger_held_groups_total{where="worker"}': 6.0,
        'outrigger_held_groups_total{where="journal"}': 2.0,
    }
    assert Pages.between(before, after, "one") == Pages(0.5, 0.25, 0.0, 42.0, 6.0, 2.0)
    assert Pages.between(before, after, "many") == Pages(2.0, 0.0, 4.0, 42.0, 6.0, 2.0)


def test_a_reads_time_is_told_by_the_ubatch():
    read = ReadSpent.of(answer(2, tokens_cache=512, prefill_s=1.0), 1024, PAGES)
    assert (read.n_tokens, read.tokens_per_s) == (512, 512)
    assert read.ms_per_ubatch(read.seconds) == 500
    assert read.layers_ms == pytest.approx(200)
    assert read.own_pages_ms == pytest.approx(200)
    assert (read.wait_ms, read.worker_ms) == (100, 250)


def test_a_tokens_time_leaves_out_the_prompts_and_what_was_read_again():
    pages = PAGES.without(replace(PAGES, all_s=0.0, wait_s=0.0, worker_s=0.0, n_bytes=4e5, by_worker=2))
    assert (pages.n_bytes, pages.by_worker) == (6e5, 10)
    token = TokenSpent.of(answer(11, decode_s=1.0), pages)
    assert token == TokenSpent(100, 60, 20, 50, 6e4)
    others = [replace(token, all_ms=ms) for ms in (1, 2, 900)]
    assert TokenSpent.median(others) == replace(token, all_ms=2)


def test_memory_is_the_processs_own():
    status = "Name:\tpython\nVmRSS:\t  900 kB\nRssAnon:\t  100 kB\nRssFile:\t  790 kB\nRssShmem:\t   10 kB\n"
    assert memory_of(status) == 110 * 1024


@pytest.mark.model
def test_answers_with_half_of_their_pages_elsewhere_are_measured(smollm2, tmp_path):
    """smollm2: the tiny hybrid takes its tokenizer from the embedded model."""
    report = Report("held", "tiny", results_folder=tmp_path)
    depths, compared = held.Depths(limit=512, depth=2048, page_tokens=256, n_more=16), Compared()
    held.measure_answers(ensure_preset("tiny"), depths, 1, report, compared)
    assert (compared.compared, compared.equal) == (16, 16)
    figures = {
        "decode_speedup_half_remote",
        "attention_speedup_half_remote",
        "wait_share",
        "host_memory_growth",
    }
    assert figures <= set(report.figures)
    # queries out and accumulators home, f32, in two layers: rows of 32 elements on 4 heads, and m and l of each
    n_values = 2 * 4 * (32 + 32 + 2)
    assert report.figures["bytes_per_token"] == pytest.approx(4 * n_values, rel=0.5)
