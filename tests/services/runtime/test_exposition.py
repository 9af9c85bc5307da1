"""Aim: /metrics is served on loopback, and a port in use is told with the setting to change.

Method: two servers on one port; the text is fetched over HTTP.
"""

from __future__ import annotations

from urllib.request import urlopen

import pytest

from common.errors import ServiceError
from common.metrics import Metrics
from services.runtime.exposition import Exposition


def test_it_serves_what_is_counted_now():
    metrics = Metrics("mac")
    with Exposition(metrics, 0) as exposition:
        assert exposition.url.startswith("http://127.0.0.1:")
        metrics.add("generation_tokens_total", 5)
        with urlopen(exposition.url, timeout=20) as answer:
            assert b"outrigger_generation_tokens_total 5.0" in answer.read()


def test_a_port_in_use_is_told_with_the_setting():
    with Exposition(Metrics("mac"), 0) as first:
        port = int(first.url.rpartition(":")[2].partition("/")[0])
        with pytest.raises(ServiceError, match=rf"port {port} .*OUTRIGGER_BRIDGE_METRICS_PORT"):
            Exposition(Metrics("bridge"), port)
