"""Aim: the recovery bench moves what it says through a real broker, bridge and worker, and prints its figures.

Method: one quick run; no figure is judged.
"""

from __future__ import annotations

from services.bench import recovery
from services.bench.report import Report


def test_a_worker_started_anew_is_given_all_pages(tmp_path, monkeypatch):
    monkeypatch.setattr(recovery, "N_PAGES", 3)
    report = Report("recovery", "none", quick=True, results_folder=tmp_path)
    recovery.bench_recovery(report)
    assert {
        f"{name}_{state}" for name in ("recovery_vs_read", "push_mib_per_s") for state in ("cold", "cached")
    } <= set(report.figures)
    assert len((tmp_path / "recovery.jsonl").read_text().splitlines()) == 2
