"""Aim: with a worker, without one, and with one that is killed in the middle of a read, the tokens are the same.
Method: real processes (mac, bridge, worker) on free ports over a tiny hybrid, asked over the bus as a gateway would."""

from __future__ import annotations

import io

import pytest

from common.model.synthetic import ensure_preset
from services.bench.report import Report
from services.bench.verify import LENGTHS_QUICK, Totals, verify_model

pytestmark = pytest.mark.model


def test_the_worker_changes_no_token_alive_killed_or_back_again(smollm2, tmp_path):
    """smollm2: the tiny hybrid takes its tokenizer from the embedded model."""
    report = Report(
        "verify", "tiny", quick=True, results_folder=tmp_path, out=io.StringIO(), err=io.StringIO()
    )
    totals = Totals()
    verify_model("tiny", ensure_preset("tiny"), report, totals)
    assert totals.problems == []
    assert totals.passed and totals.worker_kills == 1
    assert totals.compared == 8 * (len(LENGTHS_QUICK) + 2)
