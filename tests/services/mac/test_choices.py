"""Aim: several choices of one prompt are the answers that requests of their own would get, for one read of the prompt;
biases and log-probabilities come from the logits the sampler saw.
Method: the real loop on tiny models of both architectures; each choice is compared with a request asked alone."""

from __future__ import annotations

import numpy as np
import pytest

from common.ggml.logits import logprobs
from common.wire import messages as m
from tests.services.mac.conftest import SPLIT_LAYERS
from tests.services.mac.test_compute import Desk, tokens
from tests.services.mac.twin import TailTwin

HOT = m.Sampling(temperature=1.5, top_k=0, seed=7)


@pytest.fixture(params=["llama", "qwen35"])
def desk(request, new_engine):
    engine, far = new_engine(request.param), new_engine(request.param)
    twin = TailTwin(far, SPLIT_LAYERS[request.param])
    desk = Desk(engine, twin, SPLIT_LAYERS[request.param])
    yield desk
    desk.queue.close()
    desk.thread.join(timeout=30)
    assert not desk.thread.is_alive()
    twin.close()


def choices_of(events):
    """Token ids and reason by choice; indices without gaps, and nothing after a choice's end."""
    ids, reasons = {}, {}
    for event in events:
        if isinstance(event, m.TokenReady):
            assert event.choice not in reasons
            ids.setdefault(event.choice, [])
            assert event.index == len(ids[event.choice])
            ids[event.choice].append(event.token_id)
        elif isinstance(event, m.ChoiceFinished | m.Finished):
            reasons[event.choice] = event.reason
            assert event.n_generated == len(ids.get(event.choice, []))
    return ids, reasons


@pytest.mark.parametrize("n_prompt", [40, 513])
def test_each_choice_is_the_answer_its_seed_would_get_alone_for_one_read(desk, n_prompt):
    prompt = tokens(n_prompt)
    desk.ask(prompt, max_tokens=40, sampling=HOT, n_choices=3)
    events = desk.until(m.Finished)
    ids, reasons = choices_of(events)
    assert reasons == dict.fromkeys(range(3), "length")
    done = [e.tokens_done for e in events if isinstance(e, m.PrefillAdvanced)]
    assert done == sorted(set(done)) and done[-1] == n_prompt
    assert not any(isinstance(e, m.PrefillAdvanced) for e in events[len(done) :]), "the prompt is read once"
    order = [e.choice for e in events if isinstance(e, m.TokenReady)]
    assert order[:48] == [0] * 16 + [1] * 16 + [2] * 16, "choices take turns"
    for choice in range(3):
        alone = desk.run(
            prompt, max_tokens=40, sampling=m.Sampling(temperature=1.5, top_k=0, seed=7 + choice)
        )
        assert ids[choice] == alone[0]
    assert len({tuple(each) for each in ids.values()}) == 3


def test_a_choice_that_is_stopped_or_not_wanted_ends_alone(desk):
    prompt = tokens(40)
    free = [
        desk.run(prompt, max_tokens=30, sampling=m.Sampling(temperature=1.5, top_k=0, seed=7 + choice))[0]
        for choice in range(3)
    ]
    stop = next(i for i in free[1][5:] if i not in free[0] + free[2])
    desk.ask(prompt, max_tokens=30, sampling=HOT, n_choices=3, stop=[stop], credit=20)
    events = desk.until(m.TokenReady)
    desk.queue.cancel(b"peer", "r", 2)
    desk.queue.grant(b"peer", "r", 100)
    events += desk.until(m.Finished)
    ids, reasons = choices_of(events)
    assert ids[0] == free[0] and reasons[0] == "length"
    assert ids[1] == free[1][: free[1].index(stop)] and reasons[1] == "stop"
    assert ids.get(2, []) == free[2][: len(ids.get(2, []))] and reasons[2] == "cancelled"


def test_all_choices_end_with_their_request(desk):
    desk.ask(tokens(40), max_tokens=900, sampling=HOT, n_choices=4)
    desk.until(m.TokenReady)
    desk.queue.cancel(b"peer", "r")
    assert desk.until(m.Finished)[-1].reason == "cancelled"
    assert desk.run(tokens(300, 3), max_tokens=3)[0] == desk.run(tokens(300, 3), max_tokens=3)[0]


def test_logprobs_are_those_of_the_logits_and_change_nothing(desk):
    prompt = tokens(60)
    plain, _ = desk.run(prompt, max_tokens=4)
    desk.ask(prompt, max_tokens=4, top_logprobs=20)
    told = [e for e in desk.until(m.Finished) if isinstance(e, m.TokenReady)]
    assert [e.token_id for e in told] == plain
    whole = desk.compute.engine.span(0, desk.compute.engine.spec.n_layer_full)
    whole.truncate(0)
    logits = [whole.run(prompt, 0, logits="last")[-1]]
    for n, token_id in enumerate(plain[:-1]):
        logits.append(whole.run(np.array([token_id], np.int32), 60 + n, logits="last")[-1])
    desk.compute._main.sequence.forget()
    for event, row in zip(told, logits, strict=True):
        expected = logprobs(row, event.token_id, 20)
        assert event.logprobs == m.TokenLogprobs(expected.chosen, expected.top)
        assert event.logprobs.top[0] == (event.token_id, event.logprobs.logprob), "greedy takes the likeliest"


def test_a_bias_bans_and_forces_tokens_also_when_greedy_and_shows_in_logprobs(desk):
    prompt = tokens(30)
    first = desk.run(prompt, max_tokens=1)[0][0]
    banned = desk.run(prompt, max_tokens=1, sampling=m.Sampling(logit_bias=((first, -100.0),)))[0][0]
    assert banned != first
    desk.ask(prompt, max_tokens=2, sampling=m.Sampling(logit_bias=((9, 100.0),)), top_logprobs=0)
    forced = [e for e in desk.until(m.Finished) if isinstance(e, m.TokenReady)]
    assert [e.token_id for e in forced] == [9, 9]
    assert all(e.logprobs.logprob > -1e-3 and e.logprobs.top == () for e in forced)


def test_presence_and_frequency_penalties_count_what_was_generated(desk):
    """A huge frequency penalty lets greedy say nothing twice as long as there is something else."""
    ids, _ = desk.run(
        tokens(30), max_tokens=60, sampling=m.Sampling(frequency_penalty=100.0, presence_penalty=0.0)
    )
    assert len(set(ids)) == len(ids) == 60
    ids, _ = desk.run(tokens(30), max_tokens=60, sampling=m.Sampling(presence_penalty=100.0))
    assert len(set(ids)) == len(ids) == 60
