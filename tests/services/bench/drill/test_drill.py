"""Two cases of a drill on a real system: a cut cable goes on, a killed gateway ends with the right error.

Method: the system as `outrigger run` starts it, with the smallest synthetic model and the emulated worker.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from common.config import load_settings
from common.errors import ServiceError, SettingError
from common.model.synthetic import ensure_preset
from services.bench.drill.cases import CASES
from services.bench.drill.prompts import prompts
from services.bench.drill.system import Struckable, check_drillable
from services.bench.drill.trial import Subject

CUT, KILLED = CASES[0], next(case for case in CASES if case.kill == "gateway")


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
