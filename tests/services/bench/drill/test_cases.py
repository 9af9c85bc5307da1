"""A drill's judgement: what counts as promised, and what can be tried where.

Method: outcomes written down by hand; every script of the table is read by the emulator's own parser.
"""

from __future__ import annotations

from device.emulator.faults import parse_script
from services.bench.drill.cases import CASES, PAST_CASES, DrillCase, Struck, judge, possible

GOES_ON = DrillCase("cable cut mid-read", "cut in chunk 2", loses_worker=True)
ENDS = DrillCase("mac killed", kill="mac", expected="ends")
PAST = DrillCase("cable cut", "cut in query 2", past=True, loses_pages=True)


def struck(case: DrillCase = GOES_ON, **found: object) -> Struck:
    """As promised of GOES_ON, but for what was `found`."""
    well = {"happened": True, "n_compared": 8, "n_equal": 8, "fallbacks": ("down",)}
    return Struck(case, **{**well, **found})  # type: ignore[arg-type]


def test_what_is_promised_passes() -> None:
    assert judge(struck()) == []
    assert judge(struck(ENDS, error="send it again", right_error=True)) == []
    assert judge(struck(PAST, remote=9)) == []
    assert struck(PAST).outcome == "went on, from the journal (down)"


def test_what_is_not_is_told() -> None:
    for found, word in (
        ({"happened": False}, "did not happen"),
        ({"n_equal": 7}, "7 of 8 tokens equal"),
        ({"n_compared": 0, "n_equal": 0}, "no token"),
        ({"fallbacks": ()}, "does not tell"),
        ({"error": "E601"}, "the answer ended"),
        ({"leaks": ["mac: 9 threads became 12"]}, "9 threads"),
        ({"case": ENDS}, "too late"),
        ({"case": PAST}, "attended no old page"),
        ({"case": PAST, "remote": 3, "fallbacks": ()}, "stood in"),
    ):
        assert any(word in text for text in judge(struck(**found))), word
    assert "another error" in judge(struck(ENDS, error="no", right_error=False))[0]


def test_tokens_are_counted_by_the_longer_answer() -> None:
    it = Struck(GOES_ON)
    it.compare((1, 2, 3), (1, 9))
    assert (it.n_compared, it.n_equal) == (3, 1)


def test_every_script_is_one_the_emulator_knows() -> None:
    scripts = [case.script.format(frozen="20") for case in (*CASES, *PAST_CASES) if case.script]
    assert len(scripts) >= 12
    assert all(len(parse_script(script)) == 1 for script in scripts)


def test_what_cannot_be_tried_is_told_with_its_reason() -> None:
    for cases in (CASES, PAST_CASES):
        every, left_out = possible(cases, {"worker", "bridge", "broker", "mac", "gateway"}, True, True)
        assert every == list(cases) and left_out == []
    some, left_out = possible(CASES, {"bridge", "mac", "gateway"}, False, False)
    assert {case.name for case in some} == {"bridge killed", "mac killed", "gateway killed"}
    assert len(some) + len(left_out) == len(CASES)
    assert all(why for _, why in left_out)
