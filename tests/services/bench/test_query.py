"""Aim: the query bench asks real processes over no page and over one, and tells what they use in silence.

Method: the bench itself, with fewer queries. How long they take is the machine's business; that a core is spun away in
silence is not: then the share would be 1 or more.
"""

from services.bench import query
from services.bench.report import Report


def test_queries_are_answered_and_nothing_burns_in_silence(tmp_path, monkeypatch):
    monkeypatch.setattr(query, "N_QUERIES_QUICK", 50)
    monkeypatch.setattr(query, "N_WARM", 10)
    monkeypatch.setattr(query, "IDLE_S", 1.0)
    report = Report("query", "none", quick=True, results_folder=tmp_path)
    query.bench_query(report)
    assert {name for name in report.figures if name.startswith("query_")} == {
        f"query_{what}us_{of}" for what in ("", "page_") for of in ("p50", "p90", "p99")
    } | {"query_worker_us_p50"}
    assert all(value > 0 for name, value in report.figures.items() if name.startswith("query_"))
    assert report.figures["idle_cpu_share"] < 0.5
    assert len((tmp_path / "query.jsonl").read_text().splitlines()) == 2
