"""Aim: the recovery bench moves what it says through real processes, compares tokens, and prints its figures.

Method: the bench itself, with fewer and smaller pages; its figures once more from waits that are made up.
"""

from typing import Any

import pytest

from services.bench import recovery, recovery_cut
from services.bench.compared import Compared
from services.bench.report import NotMeasuredError, Report

SMALL = {"n_ctx": 4096, "kv_host_tokens": 1024, "page_tokens": 64, "group_pages": 2}


@pytest.fixture
def report(tmp_path):
    return Report("recovery", "none", quick=True, results_folder=tmp_path)


def test_the_bench_pushes_pages_and_tells_how_fast(tmp_path, monkeypatch, report):
    monkeypatch.setattr(recovery, "N_PAGES", 3)
    recovery.bench_recovery(report)
    assert set(report.figures) >= {
        f"{name}_{state}" for name in ("recovery_vs_read", "push_mib_per_s") for state in ("cold", "cached")
    } and all(value > 0 for value in report.figures.values())
    assert len((tmp_path / "recovery.jsonl").read_text().splitlines()) == 2


def test_a_conversation_goes_on_after_a_cut_and_after_its_host_was_killed(monkeypatch, report):
    monkeypatch.setattr(recovery_cut, "MODEL", "tiny")
    monkeypatch.setattr(recovery_cut, "SHAPE", recovery_cut.SHAPE | SMALL)
    monkeypatch.setattr(recovery_cut, "N_CONTEXT_QUICK", 2000)
    monkeypatch.setattr(recovery_cut, "N_READ", 512)
    monkeypatch.setattr(recovery_cut, "LIMIT", 1024)
    monkeypatch.setattr(recovery_cut, "GROUP_TOKENS", 128)
    waits = recovery_cut.measure(report)
    recovery_cut.tell(report, waits)
    assert (waits.compared.compared, waits.compared.problems) == (2 * recovery_cut.N_ANSWER, [])
    assert report.figures["tokens_equal"] == 1
    assert waits.n_by_worker > 0 < waits.n_by_journal
    assert 0 < waits.n_read_again[0] < 512, "the rest came from the journal"


def waits_of(right, found, **changes):
    compared = Compared()
    compared.compare("made up", right, found)
    fields: dict[str, Any] = dict(
        n_context=9000, compared=compared, token_s=[0.1, 0.3, 0.2], cut_s=[1.0, 3.0], killed_s=[4.0, 8.0],
        ready_s=[1.0, 2.0], n_read_again=[10, 20], read_s=2.0, n_by_worker=5, n_by_journal=6,
    )  # fmt: skip
    return recovery_cut.Waits(**(fields | changes))


def test_figures_are_medians_and_the_read_is_scaled(report):
    recovery_cut.tell(report, waits_of([1, 2, 3], [1, 2, 4]))
    told = report.figures
    assert (told["first_token_after_cut_s"], told["first_token_after_kill_s"]) == (2.0, 6.0)
    assert told["host_ready_after_kill_s"] == 1.5
    assert (told["token_s_undisturbed"], told["tokens_read_again_after_kill"]) == (0.2, 15)
    assert told["reread_s_per_64k"] == 32.0, "4,096 tokens in 2 s"
    assert (told["tokens_compared"], told["tokens_equal"]) == (3, 0), "one of three differs"


@pytest.mark.parametrize("changes", [{"n_by_journal": 0}, {"n_by_worker": 0}, {"compared": Compared()}])
def test_what_took_no_part_is_no_figure(report, changes):
    with pytest.raises(NotMeasuredError):
        recovery_cut.tell(report, waits_of([1], [1], **changes))
