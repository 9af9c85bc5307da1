"""Aim: everything that alerts and dashboards ask for is there, in a real Prometheus that scrapes a running system.

Method: `outrigger run` with an emulated worker and a broker, a short load through its API, Prometheus with the files of
monitoring/. Comparisons of alerts are asked with `bool`, so that they answer when all is well, too. Panels that show
zeros after that load say what must go wrong; test_prometheus_faults.py lets it.
"""

from __future__ import annotations

import re
import subprocess

import pytest

from monitoring.panels import DASHBOARDS
from tests.system.prometheus import need_prometheus

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]


def expressions(checkout) -> dict[str, str]:
    """Alert -> its expression, with comparisons that answer 0 or 1."""
    text = (checkout / "monitoring" / "alerts.yml").read_text()
    found = re.findall(r"alert: (\w+)\n\s+expr: '?(.*?)'?\n", text)
    return {name: re.sub(r" (>=|>|==) ", r" \1 bool ", expression) for name, expression in found}


def promtool(checkout, *arguments: str) -> str:
    need_prometheus()
    done = subprocess.run(
        ["promtool", *arguments], cwd=checkout / "monitoring", capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_configuration_and_rules_are_valid(checkout):
    assert "SUCCESS" in promtool(checkout, "check", "config", "prometheus.yml")
    assert "SUCCESS" in promtool(checkout, "check", "rules", "rules.yml", "alerts.yml")


def test_rules_compute_and_alerts_fire_as_they_should(checkout):
    promtool(checkout, "test", "rules", "rules_test.yml")


def test_every_process_is_scraped(watched):
    assert watched.prometheus.values("up") == [1.0] * 4


@pytest.mark.parametrize("board", DASHBOARDS, ids=lambda board: board.uid)
def test_every_expression_has_data_and_every_panel_shows_something(watched, board):
    queries = [expression for panel in board.panels for expression, _legend in panel.queries]
    assert [each for each in queries if not watched.prometheus.values(each)] == []
    zero = {
        panel.title
        for panel in board.panels
        if all(watched.most(expression) <= 0 for expression, _legend in panel.queries)
    }
    assert zero <= {panel.title for panel in board.panels if panel.quiet}


def test_every_alert_has_data_and_none_fires(watched, checkout):
    asked = expressions(checkout)
    assert len(asked) == 9
    assert {name for name, each in asked.items() if not watched.prometheus.values(each)} == set()
    assert watched.prometheus.firing() - {"WorkerHurts", "TimeToFirstTokenOverBudget"} == set()


def test_idle_time_past_the_limit_leaves_the_worker_ready(watched):
    assert watched.most('outrigger_worker_state{state="resting"}') == 0
