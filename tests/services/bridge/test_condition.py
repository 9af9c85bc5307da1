"""Aim: outrigger_worker_condition has one word for what the worker says of itself.

Method: reports as the control channel makes them; the words are those that common/series.py declares.
"""

from __future__ import annotations

import pytest

from common.metrics import SERIES
from common.wire.messages import WorkerReported
from services.bridge.bridge import condition_of
from services.bridge.control import UNKNOWN


@pytest.mark.parametrize(
    ("report", "condition"),
    [
        (WorkerReported(0, 900, "serving"), "nominal"),
        (WorkerReported(-1, 900, "serving"), "nominal"),
        (WorkerReported(2, 900, "serving"), "throttled"),
        (WorkerReported(2, 900, "suspending"), "suspending"),
        (UNKNOWN, "silent"),
    ],
)
def test_a_report_has_one_condition(report, condition):
    (series,) = [series for series in SERIES if series.name == "worker_condition"]
    assert condition_of(report) == condition and condition in series.labels["condition"]
