"""A soak's plan, its judgement and its plots.

Method: plans drawn twice from a seed; samples made by hand; scripts read by the emulator's own parser.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest

from common.limits import MIB
from device.emulator.faults import parse_script
from services.bench.faults.footprint import Footprint
from services.bench.soak.drawing import svg_of
from services.bench.soak.plan import FAULTS, KILLS, KINDS, deeds, strokes
from services.bench.soak.samples import Sample, growth_mib_per_min, not_back, still_growing

HELD = Footprint(20, 8, 100 * MIB)
CALM = Sample(0.0, {"mac": HELD}, {"mac.requests_running": 0.0})


def grown(mib_per_min: float, n: int = 60) -> list[Sample]:
    """A sample every ten seconds."""
    return [
        Sample(10.0 * i, {"mac": replace(HELD, rss_bytes=int((100 + mib_per_min * i / 6) * MIB))}, {})
        for i in range(n)
    ]


def test_a_seed_gives_the_same_plan_and_every_kind_comes() -> None:
    def first(seed: int, client: int) -> list[object]:
        return list(islice(deeds(seed, client, 4, 2, 1), 300))

    assert first(1, 0) == first(1, 0) != first(2, 0)
    assert first(1, 0) != first(1, 1)
    assert {deed.kind for deed in first(1, 0)} == set(KINDS)  # type: ignore[attr-defined]
    assert list(islice(strokes(5), 50)) == list(islice(strokes(5), 50))
    drawn = list(islice(strokes(5), 800))
    assert {stroke.script for stroke in drawn} == {*FAULTS, ""}
    assert {stroke.kill for stroke in drawn} == {*KILLS, ""}
    assert all(bool(stroke.kill) != bool(stroke.script) for stroke in drawn)


def test_prompts_are_of_the_kind_that_is_asked() -> None:
    numbers: dict[str, set[int]] = {}
    for deed in islice(deeds(3, 0, 4, 2, 1), 400):
        numbers.setdefault(deed.kind, set()).add(deed.prompt)
    assert numbers["chat"] == {0, 1, 2, 3} == numbers["reconnect"]
    assert numbers["read"] == {4, 5} and numbers["past"] == {6} and numbers["cancel"] == {4, 5, 6}


def test_every_fault_is_one_the_emulator_knows() -> None:
    assert all(len(parse_script(script)) == 1 for script in FAULTS)


def test_what_is_as_it_was_passes() -> None:
    assert not_back(CALM, CALM) == []
    assert still_growing(grown(0.5)) == [] == still_growing([])


def test_what_is_not_is_told() -> None:
    more = replace(CALM, held={"mac": replace(HELD, n_descriptors=40)})
    assert "20 descriptors became 40" in not_back(CALM, more)[0]
    assert "running was 0 and is 1" in not_back(CALM, replace(CALM, gauges={"mac.requests_running": 1.0}))[0]
    assert "mac is gone" in not_back(CALM, replace(CALM, held={}))
    assert "mac grows by 20.0 MiB a minute" in still_growing(grown(20.0))[0]


def test_growth_is_that_of_the_second_half() -> None:
    level = [replace(each, held={"mac": HELD}) for each in grown(0.0)]
    risen = [replace(each, held={"mac": replace(HELD, rss_bytes=MIB)}) for each in level[:20]] + level[20:]
    assert growth_mib_per_min(risen, "mac") == 0.0
    assert growth_mib_per_min(grown(3.0), "mac") == pytest.approx(3.0, rel=1e-3)


def test_growth_is_that_of_the_life_at_the_end() -> None:
    """A process that was killed begins small; what it takes then is no leak."""
    early = [replace(each, pids={"mac": 1}) for each in grown(0.0, 30)]
    small = Sample(310.0, {"mac": replace(HELD, rss_bytes=10 * MIB)}, {}, {"mac": 2})
    late = [replace(each, at_s=320.0 + each.at_s, pids={"mac": 2}) for each in grown(0.0, 30)]
    assert growth_mib_per_min([*early, small, *late], "mac") == pytest.approx(0.0, abs=1e-6)


def test_the_plots_name_every_process() -> None:
    pytest.importorskip("matplotlib")
    svg = svg_of(grown(1.0), [30.0, 60.0], "soak")
    assert svg.lstrip().startswith("<?xml") and "</svg>" in svg
