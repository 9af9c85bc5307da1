"""Aim: rules and alerts ask only for what some process counts, and every alert has its lines in the runbook.

Method: the files are read as text; names are compared with common/series.py. What they compute, Prometheus' own tools
test in tests/system.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from common.series import PREFIX, SERIES

FILES = ("rules.yml", "alerts.yml", "rules_test.yml")


def declared() -> set[str]:
    """Names as a scrape shows them."""
    names = set()
    for series in SERIES:
        ends = ("_bucket", "_sum", "_count") if series.kind == "histogram" else ("",)
        names |= {PREFIX + series.name + end for end in ends}
    return names


@pytest.mark.parametrize("name", FILES)
def test_every_series_asked_for_is_declared(checkout: Path, name: str) -> None:
    asked = set(re.findall(r"\boutrigger_\w+(?=[\s{\[)'|])", (checkout / "monitoring" / name).read_text()))
    assert len(asked) > 5
    assert asked - declared() - {"outrigger_rates", "outrigger_percentiles", "outrigger_budgets"} == set()


def test_every_recorded_series_asked_for_is_recorded(checkout: Path) -> None:
    folder = checkout / "monitoring"
    recorded = set(re.findall(r"record: (\S+)", (folder / "rules.yml").read_text()))
    asked = set(re.findall(r"\boutrigger:[\w:]+", (folder / "alerts.yml").read_text()))
    assert asked and asked <= recorded


def test_every_alert_has_its_section_in_the_runbook(checkout: Path) -> None:
    text = (checkout / "monitoring" / "alerts.yml").read_text()
    alerts = re.findall(r"alert: (\w+)", text)
    sections = re.findall(r"^## (\w+)$", (checkout / "docs" / "runbook.md").read_text(), re.M)
    assert alerts == sections
    assert re.findall(r"runbook: docs/runbook.md#(\w+)", text) == [name.lower() for name in alerts]
