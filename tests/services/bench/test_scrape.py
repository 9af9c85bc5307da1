"""Reading /metrics as text. Method: an exposition of prometheus_client itself, served and read."""

from __future__ import annotations

from common.metrics import Metrics
from services.bench.scrape import samples, scrape
from services.runtime.exposition import Exposition


def test_samples_are_read_as_they_are_served() -> None:
    metrics = Metrics("mac")
    metrics.set("requests_running", 3)
    metrics.add("prefill_seconds_total", 1.5, side="host")
    with Exposition(metrics, 0) as page:
        found = scrape(int(page.url.rsplit(":", 1)[1].split("/")[0]))
    assert found["outrigger_requests_running"] == 3.0
    assert found['outrigger_prefill_seconds_total{side="host"}'] == 1.5


def test_comments_are_no_samples() -> None:
    assert samples("# HELP a b\n# TYPE a gauge\na 1\n") == {"a": 1.0}
