"""Aim: the table of faults has every kind and every moment, and each script says what its case is called.
Method: every case's script is read by the emulator's own parser; the pairs that cannot be are named here."""

from __future__ import annotations

import pytest

from device.emulator.faults import KINDS, parse_script
from services.bench.faults import cases as c

ALL = c.cases(c.KINDS, c.MOMENTS)
SPLIT_DECODE = c.cases(c.KINDS, c.SPLIT_DECODE_MOMENTS)


def test_every_kind_of_the_emulator_is_there_at_every_moment_it_can_have():
    assert {fault.kind for case in ALL for fault in parse_script(case.script(5, 4.0))} == set(KINDS)
    missing = {(kind.name, moment.name) for kind in c.KINDS for moment in c.MOMENTS} - {
        (case.kind.name, case.moment.name) for case in ALL
    }
    assert missing == {("flip", "before"), ("flip", "mid-decode")}, (
        "nothing moves there that could be flipped"
    )


@pytest.mark.parametrize("case", ALL + SPLIT_DECODE, ids=lambda case: case.name)
def test_a_script_is_one_of_the_emulator_and_strikes_a_chunk_that_exists(case):
    n_tokens = c.TOKENS_BEFORE if case in SPLIT_DECODE else 0
    for n_chunks in (2, 3, 7):
        for fault in parse_script(case.script(n_chunks, 4.0)):
            assert fault.frame != "chunk" or 1 <= fault.number <= n_chunks + n_tokens


def test_refused_greetings_follow_a_cut():
    for case in ALL:
        kinds = [fault.kind for fault in parse_script(case.script(3, 4.0))]
        assert case.kind.refuses == ("wrong-version" in kinds or "foreign-model" in kinds)
        assert not case.kind.refuses or kinds[-1] == "cut"
