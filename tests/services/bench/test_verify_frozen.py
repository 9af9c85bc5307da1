"""Aim: verify --frozen measures what it says: pages take part, int8 is told apart, a wrong page or choice fails it.
Method: the whole comparison on a tiny hybrid with pages of 256 keys, once; the verdict on totals made by hand."""

import io

import numpy as np
import pytest

from common.model.synthetic import ensure_preset
from services.bench.frozen_ways import Way, divergence, through_int8
from services.bench.report import Report
from services.bench.verify_frozen import FrozenTotals, Sizes, verify_model

pytestmark = pytest.mark.model


def test_the_comparison_itself(tmp_path, smollm2):
    pytest.importorskip("coremltools", reason="needs the extra coreml", exc_type=ImportError)
    report = Report("verify_frozen", "tiny", results_folder=tmp_path, out=io.StringIO(), err=io.StringIO())
    totals = verify_model("tiny", ensure_preset("tiny"), Sizes(520, 1, 6, 256), report)
    ordinary, frozen, fp32, int8 = totals.ways
    assert totals.compared == 6 and not totals.problems()
    assert frozen.keys == fp32.keys == int8.keys == 2 * 2 * 256 * 7  # layers, pages, keys, tokens
    assert set(frozen.attention) == {3, 7} and set(frozen.layers) == set(range(7))
    assert fp32.attention_max < ordinary.attention_max < totals.attention_bound
    assert fp32.attention_max < frozen.attention_max < totals.attention_bound < int8.attention_max
    assert ordinary.top1 == 6 and ordinary.kl == [0.0] * 6 and ordinary.layer_max == 0.0 < frozen.layer_max


def test_what_is_out_of_bounds_is_a_problem():
    totals = FrozenTotals(compared=2)
    totals.frozen.kl = [0.0, 0.1]
    totals.frozen.attention = {3: 0.005, 7: 0.02}
    totals.frozen.add_layer(0, np.array([np.nan]), np.ones(1))
    totals.frozen.add_layer(0, np.ones(1), np.ones(1))
    totals.differences.append("x position 5: gap 0.5 of the logits' spread")
    different, *rest = totals.problems()
    assert different.startswith("different: x position 5") and len(rest) == 3
    assert "attention over frozen keys: 0.02, allowed 0.01" in rest[0] and "mean KL: 0.05" in rest[2]
    assert "behind a layer: nan" in rest[1]


def test_ways_count_what_they_are_told():
    way, other = Way("", "a"), Way("", "b")
    right = np.array([0.0, 1.0, 2.0])
    assert way.add_logits(right + 5, right) and not way.add_logits(right[::-1], right)
    assert way.kl[0] == pytest.approx(0, abs=1e-12) and way.top1 == 1
    p = np.exp(right) / np.exp(right).sum()
    assert divergence(right, right[::-1]) == pytest.approx((p * (right - right[::-1])).sum())
    other.add_layer(4, np.array([3.0, 4.5]), np.array([3.0, 4.0]))
    way.join(other)
    assert way.layers == {4: pytest.approx(0.1)} and way.layer_max == pytest.approx(0.1)


def test_int8_is_half_a_step_off_at_most():
    values = np.array([[-1.27, 0.004, 0.016], [0, 0, 0]], np.float16)
    rounded = through_int8(values)
    assert np.abs(rounded - values).max() < 0.0052 and rounded[0, 0] == values[0, 0] and not rounded[1].any()
