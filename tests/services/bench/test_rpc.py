"""Aim: the RPC bench asks for the split it names, believes only a run that did it, and compares like with like.
Method: argument lists and llama-bench's JSON as text; the two programs are compiled and run by the bench itself."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from services.bench import rpc, rpc_build
from services.bench.report import NotMeasuredError, Report
from services.bench.rpc_runs import Way, read_seconds
from services.setup.checks import SetupError

ALONE, IN_TURN = Way(0, 256), Way(13, 128, in_turn=True)
SAID = {
    "n_prompt": 2048,
    "n_ubatch": 128,
    "n_threads": 1,
    "backends": "RPC,CPU",
    "samples_ns": [12_500_000_000],
}


def test_layers_lie_where_the_name_says():
    assert ALONE.arguments(30, "", "") == ["-ub", "256", "-ngl", "0"]
    one = Way(11, 256).arguments(30, "", "b:2")
    assert one == ["-ub", "256", "-rpc", "b:2", "-ngl", "11"]
    two = IN_TURN.arguments(30, "a:1", "b:2")
    assert two == ["-ub", "128", "-rpc", "a:1,b:2", "-ngl", "31", "-ts", "17/13"], "17 near, 13 far"


@pytest.mark.parametrize("n_layer", [4, 5, 18, 30, 32, 64])
@pytest.mark.parametrize("quick", [False, True])
def test_splits_lie_around_the_half_and_leave_both_sides_something(n_layer, quick):
    tried = rpc.splits_to_try(n_layer, quick)
    assert n_layer // 2 in tried and all(0 < n < n_layer for n in tried)
    assert len(tried) >= 3 or n_layer < 5


def test_a_sample_is_believed_only_when_it_is_the_one_that_was_asked_for():
    assert read_seconds(json.dumps([SAID]), 2048, IN_TURN) == 12.5
    assert read_seconds(json.dumps([SAID | {"backends": "CPU", "n_ubatch": 256}]), 2048, ALONE) == 12.5
    for changed in (
        {"backends": "CPU"},
        {"n_ubatch": 512},
        {"n_prompt": 512},
        {"samples_ns": [1, 2]},
        {"n_threads": 2},
    ):
        with pytest.raises(NotMeasuredError):
            read_seconds(json.dumps([SAID | changed]), 2048, IN_TURN)
    with pytest.raises(NotMeasuredError):
        read_seconds("error: no such file", 2048, IN_TURN)


def rounds():
    found = rpc.Rounds(far_cpu_s=5.0, worker_tokens=1792)
    for others, read_s in ((0.9, (1, 1, 1, 1)), (0.0, (20, 10, 21, 14)), (0.01, (22, 11, 21, 14))):
        found.read_s.append(dict(zip(rpc.SIDES, read_s, strict=True)))
        found.others.append(others)
    return found


def figures(found, tmp_path):
    report = Report("rpc", "m", results_folder=tmp_path, out=io.StringIO(), err=io.StringIO())
    contest = SimpleNamespace(label="m", report=report, n_layer=30)
    rpc._figures(contest, found, 2, IN_TURN, SimpleNamespace(split_layer=16))
    return report.figures


def test_each_side_is_compared_with_its_own_host_alone_in_the_quiet_rounds(tmp_path):
    found = figures(rounds(), tmp_path)
    assert found["m.rpc_speedup"] == pytest.approx(21 / 10.5)
    assert found["m.outrigger_speedup"] == pytest.approx(21 / 14)
    assert (found["m.rpc_layers_far"], found["m.outrigger_layers_far"]) == (13, 14)


@pytest.mark.parametrize("idle", ["far_cpu_s", "worker_tokens"])
def test_a_far_side_that_did_nothing_gives_no_figure(idle, tmp_path):
    with pytest.raises(NotMeasuredError, match=idle):
        figures(replace(rounds(), **{idle: 0}), tmp_path)


def test_a_machine_without_cmake_is_told_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(rpc_build, "amx_verdict", lambda state: SimpleNamespace(flags=(), word="absent"))
    with pytest.raises(SetupError, match=r"(?s)cmake.*apt-get install cmake.*compiler"):
        rpc_build.rpc_programs(tmp_path)
    assert list(tmp_path.iterdir()) == [], "nothing is begun"
