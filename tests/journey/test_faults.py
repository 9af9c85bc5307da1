"""Aim: whatever goes wrong at the far end, at whatever moment, the stream goes on, same tokens, and nothing leaks.
Method: real processes on a tiny model, the worker emulated; a fault of each kind at moments chosen by seed."""

from __future__ import annotations

import io
import random
from pathlib import Path

import pytest

from common.model.synthetic import ensure_preset
from services.bench.demo import run_demo
from services.bench.faults import cases as c
from services.bench.report import Report
from services.bench.verify_faults import FaultCounts, strike_model

pytestmark = pytest.mark.model
SEED = 1
SLOW_KINDS = ("wrong version", "foreign model", "long freeze")
"""Each takes seconds by nature; `outrigger verify --faults` has them all."""


def quiet(bench: str, folder: Path) -> Report:
    return Report(bench, "tiny", quick=True, results_folder=folder, out=io.StringIO(), err=io.StringIO())


def chosen(rng: random.Random) -> list[c.Case]:
    """One case of each kind, and every moment at least once."""
    kinds = [kind for kind in c.KINDS if kind.name not in SLOW_KINDS]
    everything = c.cases(kinds, c.MOMENTS)
    rng.shuffle(everything)
    by_kind = {case.kind.name: case for case in everything}
    by_moment = {case.moment.name: case for case in everything}
    return list(dict.fromkeys([*by_kind.values(), *by_moment.values()]))


def test_every_kind_of_fault_leaves_the_tokens_as_they_are(smollm2, tmp_path):
    """smollm2: the tiny hybrid takes its tokenizer from the embedded model."""
    counts = FaultCounts()
    cases = chosen(random.Random(SEED))
    strike_model("tiny", ensure_preset("tiny"), quiet("verify_faults", tmp_path), counts, cases)
    assert counts.problems == []
    assert counts.passed and counts.fired >= len(cases)


def test_the_demo_shows_the_same_tokens_and_survives_its_cut(smollm2, tmp_path):
    streamed: list[str] = []
    shown = run_demo(ensure_preset("tiny"), quiet("demo", tmp_path), streamed.append)
    assert shown.compared > 0 and shown.equal == shown.compared
    assert shown.both.report.tokens_worker and shown.cut.report.fallbacks == ("down",)
    assert shown.link_bytes > 4 * 128 * shown.both.report.tokens_worker, (
        "residuals alone are f32 [n_tokens, 128]"
    )
    assert "".join(streamed).strip()
