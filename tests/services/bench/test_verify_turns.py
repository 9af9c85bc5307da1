"""Aim: verify --turns passes only when tokens and log-probabilities agree, something was reused, a worker took part and
little was read again; its scripts do to a chat what their names say.
Method: totals by hand; scripts are driven with made-up answers. The processes themselves run in `outrigger verify`."""

from __future__ import annotations

from itertools import count, pairwise

import numpy as np
import pytest

from common.wire.messages import ReadReport
from services.bench.chats import REASONING_TOKENS, scripts
from services.bench.client import Answer
from services.bench.verify_turns import TurnTotals, shared

ROLES = {
    role: np.array([900 + i], np.int32) for i, role in enumerate(("system", "user", "assistant", "tool"))
}
END = 999
IDS = np.arange(2000, dtype=np.int32)


def answer(ids=(1, 2), logprobs=(-0.5, -0.25), cache=0, worker=0, n_prompt=1000):
    report = ReadReport(tokens_cache=cache, tokens_worker=worker, tokens_host=n_prompt - cache - worker)
    return Answer(tuple(ids), report, 0.1, 0.2, tuple(logprobs))


def passing():
    totals = TurnTotals()
    warm = answer(cache=512, worker=256)
    totals.compare_answers("a", answer(), warm)
    totals.reread("a", IDS[:1000], IDS[:700], warm)
    return totals


def test_it_passes_when_all_is_well():
    totals = passing()
    assert totals.passed and (totals.compared, totals.equal) == (2, 2)
    assert totals.reread_tokens_max == 700 - 512


@pytest.mark.parametrize("change", [{"tokens_cache": 0}, {"tokens_worker": 0}, {"compared": 0, "equal": 0}])
def test_it_fails_when_something_took_no_part(change):
    totals = passing()
    for name, value in change.items():
        setattr(totals, name, value)
    assert not totals.passed


@pytest.mark.parametrize(
    "warm", [{"ids": (1, 3)}, {"logprobs": (-0.5, -0.25001)}, {"ids": (1,), "logprobs": (-0.5,)}]
)
def test_one_other_token_or_bit_fails(warm):
    totals = passing()
    totals.compare_answers("b", answer(), answer(**warm))
    assert not totals.passed and "b" in totals.problems[0]


def test_more_than_an_ubatch_read_again_fails_and_so_does_a_report_that_does_not_add_up():
    totals = passing()
    totals.reread("b", IDS[:1000], IDS[:800], answer(cache=800 - 257))
    assert not totals.passed and "257" in totals.problems[0]
    totals = passing()
    totals.reread("c", IDS[:1000], IDS[:800], answer(cache=768, n_prompt=999))
    assert not totals.passed and "add up" in totals.problems[0]


def test_a_prompt_that_is_held_whole_still_needs_its_last_token():
    totals = TurnTotals()
    assert totals.reread("d", IDS[:513], IDS[:600], answer(cache=256, n_prompt=513)) == 256
    assert not totals.problems


def test_shared_counts_leading_tokens():
    assert shared(IDS[:5], IDS[:9]) == 5 and shared(IDS[:5], IDS[1:9]) == 0 and shared(IDS[:0], IDS) == 0


def played(name):
    """The prompts of one script, and the answers it was given."""
    places = count(0)
    text = lambda n: np.full(n, next(places) % 800, np.int32)  # noqa: E731
    script = scripts(text, ROLES, END)[name]
    steps, answers = [next(script)], []
    while True:
        answers.append(tuple(range(801, 801 + steps[-1].n_answer))[: steps[-1].n_answer])
        try:
            steps.append(script.send(answers[-1]))
        except StopIteration:
            return steps, answers


def test_prompts_are_regenerated():
    steps, _ = played("regenerate")
    assert [len(s.prompt) for s in steps[:3]] == [len(steps[0].prompt)] * 3
    assert shared(steps[3].prompt, steps[2].prompt) == len(steps[2].prompt)


def test_an_edit_parts_from_the_prompt_before_in_its_middle():
    steps, _ = played("edit")
    assert shared(steps[3].prompt, steps[2].prompt) < len(steps[1].prompt)
    assert shared(steps[4].prompt, steps[3].prompt) < len(steps[0].prompt)


def test_reasoning_of_the_answer_before_the_last_is_left_out():
    steps, answers = played("dropped_reasoning")
    first = len(steps[0].prompt)
    kept, dropped = steps[1].prompt[first:], steps[2].prompt[first:]
    assert tuple(kept[: len(answers[0])]) == answers[0]
    assert tuple(dropped[: len(answers[0]) - REASONING_TOKENS]) == answers[0][REASONING_TOKENS:]


def test_odd_cuts_end_where_kernels_change():
    assert [len(step.prompt) % 256 for step in played("odd_cuts")[0]] == [1, 0, 255, 2]


def test_a_tool_loop_only_ever_appends():
    steps, _ = played("tool_loop")
    for before, after in pairwise(steps):
        assert shared(before.prompt, after.prompt) == len(before.prompt)
