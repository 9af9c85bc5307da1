"""Aim: the split bench prints a figure only when the read did what the figure is about, and computes it from medians.
Method: readings are made by hand as a host would report them; the processes are run by the bench itself."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from common.wire.messages import ReadReport, UbatchTimes
from device.emulator.faults import parse_script
from services.bench.client import Answer
from services.bench.report import NotMeasuredError, Report
from services.bench.rig import Seat
from services.bench.rounds import Case, Readings, Round, check_read, quietest, rounds_missing
from services.bench.split import add_figures, cases
from services.bench.split_worst import CHUNKS_BEFORE, CHUNKS_WARM, SLOW
from services.mac.plan import plan_read

CASE = Case("m", Path("m.gguf"), 20, (0,), n_rounds=3)
ALONE, SPLIT = Seat("alone", 0, None), Seat("split20", 20, None)


def stages(head_s, worker_s, tail_s):
    remote = [UbatchTimes(256 * i, 256, 0.0, head_s=head_s, worker_s=worker_s) for i in range(7)]
    return (*remote, UbatchTimes(1792, 256, 0.0, head_s=head_s, tail_s=tail_s))


def answer(seat, read_s, **changes):
    remote = 1792 if seat.split_layer else 0
    report = ReadReport(0, 2048 - remote, remote, stages=stages(1.0, 0.6 if remote else 0.0, 0.6))
    return Answer((1, 2, 3, 4), msgspec.structs.replace(report, **changes), read_s, read_s)


def readings(others_share=0.0):
    rounds = []
    for alone_s, forty_s, half_s in ((16.0, 11.0, 9.0), (17.0, 10.0, 10.0), (50.0, 60.0, 8.0)):
        half = answer(replace(SPLIT, split_layer=16), half_s)
        found = {"alone": answer(ALONE, alone_s), "split20": answer(SPLIT, forty_s), "split16": half}
        found["split16-usb-c"] = answer(SPLIT, half_s - 1)
        rounds.append(Round(found, others_share))
    return Readings(CASE, 0, rounds, {"split20": 20, "split16": 16, "split16-usb-c": 16})


def test_figures_are_ratios_of_medians(tmp_path):
    report = Report("split", "m", results_folder=tmp_path, out=io.StringIO(), err=io.StringIO())
    add_figures(report, readings())
    assert report.figures["m.d0.speedup_40_64"] == pytest.approx(17 / 11)
    assert report.figures["m.d0.speedup_best_2k"] == pytest.approx(17 / 9)
    assert report.figures["m.d0.speedup_best_2k_usb-c"] == pytest.approx(17 / 8)
    assert report.figures["m.d0.best_split"] == 16, "the cable's seat does not compete"
    # Bound: eight heads of 1 s and the last tail of 0.6 s.
    assert report.figures["m.d0.pipeline_efficiency"] == pytest.approx(8.6 / 11)


@pytest.mark.parametrize(
    "seat, changes, words",
    [
        (SPLIT, {"tokens_worker": 0, "bypass_reason": "rested"}, "rested"),
        (SPLIT, {"tokens_worker": 1536}, "expected 1792"),
        (SPLIT, {"fallbacks": ("down",)}, "failed"),
        (SPLIT, {"tokens_cache": 256}, "reused"),
        (ALONE, {"tokens_worker": 1792}, "expected 0"),
    ],
)
def test_a_read_that_did_something_else_is_refused(seat, changes, words):
    check_read("here", 0, seat, answer(seat, 1.0), answer(ALONE, 1.0))
    with pytest.raises(NotMeasuredError, match=words):
        check_read("here", 0, seat, answer(seat, 1.0, **changes), None)


def test_other_tokens_are_refused():
    with pytest.raises(NotMeasuredError, match=r"\(1, 2, 3, 5\)"):
        check_read("here", 0, SPLIT, replace(answer(SPLIT, 1.0), token_ids=(1, 2, 3, 5)), answer(ALONE, 1.0))


def test_disturbed_rounds_are_repeated_within_a_bound_and_the_quiet_ones_count():
    quiet, loud = Round(others_share=0.0), Round(others_share=0.5)
    assert rounds_missing([], 3, may_repeat=False) and rounds_missing(
        [quiet, quiet, loud], 3, may_repeat=True
    )
    assert not rounds_missing([quiet, quiet, loud], 3, may_repeat=False)
    assert not rounds_missing([quiet, loud, quiet, quiet], 3, may_repeat=True)
    assert rounds_missing([loud] * 5, 3, may_repeat=True)
    assert not rounds_missing([loud] * 6, 3, may_repeat=True)
    assert quietest([loud, quiet, loud, quiet], 2) == [quiet, quiet]


def test_a_disturbed_measurement_says_so(tmp_path):
    out = io.StringIO()
    for share in (0.01, 0.4):
        report = Report("split", "m", results_folder=tmp_path, out=out, err=io.StringIO())
        add_figures(report, readings(share))
        report.finish()
    assert out.getvalue().count("quiet machine") == 1 and "40%" in out.getvalue()


def test_long_reads_have_a_figure_of_their_own(tmp_path):
    report = Report("split", "m", results_folder=tmp_path, out=io.StringIO(), err=io.StringIO())
    long = Readings(CASE, 4096, readings().rounds, {"split16": 16}, n_new=8192)
    add_figures(report, long)
    assert set(report.figures) == {"m.d4096.speedup_best_8k"}


def test_what_is_measured():
    quick, full = cases(True, ("smollm2",), None), cases(False, ("smollm2",), 15)
    assert (quick[0].depths, full[0].depths, full[0].layer) == ((0,), (0, 4096), 15)
    assert full[0].worst and not quick[0].worst, "the quick form measures the slow-down on the hybrid"
    assert quick[0].forty == 18 and full[0].neighbours and not full[0].long_reads


def test_the_fault_of_the_worst_case_is_one_the_emulator_knows():
    """It has to come in the third chunk of the read that follows two others."""
    fault = parse_script(f"slow {SLOW} after chunk {CHUNKS_WARM + CHUNKS_BEFORE}")
    remote = [len(plan_read(0, n, worker="ready", split_tokens_min=513).ubatches) - 1 for n in (600, 2048)]
    assert len(fault) == 1 and sum(remote) == CHUNKS_WARM
