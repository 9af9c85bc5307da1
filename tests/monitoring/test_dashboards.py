"""Aim: the dashboards in the repository are those that the generator makes, and ask for what some process counts.

Method: the generator runs; names are compared with common/series.py. Types and data are checked in tests/system.
"""

from __future__ import annotations

import re

import pytest

from common.series import PREFIX, SERIES
from monitoring.make_dashboards import FOLDER, json_of
from monitoring.panels import DASHBOARDS


@pytest.mark.parametrize("board", DASHBOARDS, ids=lambda board: board.uid)
def test_the_file_is_what_the_generator_makes(board):
    assert (FOLDER / f"{board.uid}.json").read_text(encoding="utf-8") == json_of(board), "make dashboards"


def test_every_series_asked_for_is_declared(checkout):
    declared = {PREFIX + series.name for series in SERIES}
    recorded = set(re.findall(r"record: (\S+)", (checkout / "monitoring" / "rules.yml").read_text()))
    asked = {
        name
        for board in DASHBOARDS
        for panel in board.panels
        for expression, _legend in panel.queries
        for name in re.findall(r"outrigger[_:][\w:]+", expression)
    }
    assert len(asked) > 30
    assert asked - declared - recorded == set()
