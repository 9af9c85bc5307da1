"""Cases of a drill on a real system: a cut cable goes on, a killed gateway ends with the right error; past the host's
limit a cut cable goes on from the journal, and a killed mac process finds its conversation there.

Method: the system as `outrigger run` starts it, with the smallest synthetic model and the emulated worker.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from common.config import load_settings
from common.errors import ServiceError, SettingError
from common.model.synthetic import ensure_preset
from services.bench.drill import past
from services.bench.drill.cases import CASES, PAST_CASES
from services.bench.drill.past import Growth, PastSubject
from services.bench.drill.prompts import prompts
from services.bench.drill.system import PAST_THE_LIMIT, Struckable, check_drillable, why_not_past
from services.bench.drill.trial import Subject

CUT, KILLED = CASES[0], next(case for case in CASES if case.kill == "gateway")
PAST_CUT, PAST_KILLED = PAST_CASES[1], next(case for case in PAST_CASES if case.kill == "mac")


def test_a_cut_cable_and_a_killed_gateway() -> None:
    model = ensure_preset("tiny")
    with Struckable(model, load_settings(None, {})) as system:
        system.wait_whole(90.0)
        asked = itertools.cycle(prompts(model, system.settings, [(700, 8)] * 3, lambda _text: None))
        subject = Subject(system, lambda: next(asked), 1.0)
        subject.prepare()
        cut, killed = subject.run(CUT), subject.run(KILLED)
    assert cut.problems == [] and cut.fallbacks == ("down",) and cut.n_equal == 16
    assert killed.problems == [] and killed.n_equal >= 8


def test_a_cut_cable_and_a_killed_mac_past_the_limit() -> None:
    model = ensure_preset("tiny")
    with Struckable(model, load_settings(None, {}), **PAST_THE_LIMIT) as system:
        system.wait_whole(90.0)
        lengths = [(past.N_PROMPT, past.N_TOKENS)] * past.N_PROMPTS
        right = prompts(model, system.settings, lengths, lambda _text: None, past.N_FIRST)
        asked = itertools.cycle(right)
        subject = PastSubject(system, lambda: next(asked), 1.0)
        subject.prepare()
        cut, killed = subject.run(PAST_CUT), subject.run(PAST_KILLED)
    assert cut.problems == [] and cut.fallbacks == ("down",) and cut.n_equal > past.N_TOKENS
    assert killed.problems == [] and killed.error and killed.n_equal > 0
    assert system.left_behind == []


def test_counters_that_begin_anew_are_added_up() -> None:
    growth = Growth()
    for now in (3.0, 5.0, None, 1.0, 4.0):
        growth.look({} if now is None else {"n": now})
    assert growth.by_series == {"n": 6.0}


@pytest.mark.parametrize("flags", [{"hold": "off"}, {"decode": "fused"}, {"worker_pages": "off"}])
def test_settings_that_keep_all_pages_in_memory_are_named(flags: dict[str, object]) -> None:
    assert why_not_past(load_settings(None, {})) == ""
    assert next(iter(flags.values())) in why_not_past(load_settings(None, {}, flags))


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ({"split": "off"}, "nothing to lose"),
        ({"split_decode": "on"}, "verify"),
        ({"worker_host": "auto"}, "doctor"),
    ],
)
def test_settings_without_a_worker_to_lose_are_refused(flags: dict[str, object], word: str) -> None:
    with pytest.raises((SettingError, ServiceError), match=word):
        check_drillable(load_settings(None, {}, flags))


def test_a_missing_file_is_told_by_the_system_itself(tmp_path: Path) -> None:
    with (
        pytest.raises(ServiceError, match="no model file"),
        Struckable(tmp_path / "no.gguf", load_settings(None, {})),
    ):
        raise AssertionError("it started")
