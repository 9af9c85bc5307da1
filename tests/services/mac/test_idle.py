"""Aim: between requests the rows of an answer become reusable, one ubatch at a time, and no request waits for it.
Method: the compute thread's loop is turned by hand on tiny models of both architectures; the next turn's tokens are
compared with those of a host that made nothing canonical."""

from __future__ import annotations

import numpy as np
import pytest

from common.errors import EngineError, OutOfMemoryError
from common.wire import messages as m
from tests.services.mac.test_compute import Desk, tokens

PROMPT, N_ANSWER, N_LONG_ANSWER = tokens(400, 11), 120, 370


@pytest.fixture(scope="module", params=["llama", "qwen35"])
def engine(request, new_engine):
    return new_engine(request.param)


@pytest.fixture
def desk(engine):
    engine.span(0, engine.spec.n_layer_full).truncate(0)
    return Desk(engine, None, 0, start=False)


def serve(desk, prompt, max_tokens):
    """Serve one request to its end, with no idle time after it. (token ids, closing event)"""
    desk.ask(prompt, max_tokens=max_tokens, credit=1000)
    events = []
    while not (events and isinstance(events[-1], m.Finished | m.Failed)):
        desk.compute._admit()
        desk.compute._advance(desk.compute._next_lane())
        events += desk.told()
    return [event.token_id for event in events if isinstance(event, m.TokenReady)], events[-1]


def second_turn(answer):
    return np.concatenate([PROMPT, np.array(answer, np.int32), tokens(60, 12)])


def test_after_idle_time_the_answer_comes_from_cache_and_the_next_one_is_the_same(desk):
    answer, _ = serve(desk, PROMPT, N_ANSWER)
    assert desk.compute.n_provisional == 512 - 256
    steps = 0
    while desk.compute._use_idle_time():
        steps += 1
    assert steps == 1 and desk.compute.n_provisional == 0
    warm, finished = serve(desk, second_turn(answer), 8)
    assert finished.report.tokens_cache == 512
    desk.compute._main.sequence.forget()
    cold, finished = serve(desk, second_turn(answer), 8)
    assert warm == cold and finished.report.tokens_cache == 0


def test_a_request_that_comes_in_between_is_served_next_and_reuses_what_is_done(desk):
    answer, _ = serve(desk, PROMPT, N_LONG_ANSWER)
    assert desk.compute._use_idle_time()
    desk.ask(second_turn(answer), max_tokens=4)
    desk.compute._admit()
    assert not desk.compute._use_idle_time(), "a request is there"
    events = []
    while not (events and isinstance(events[-1], m.Finished)):
        desk.compute._advance(desk.compute._main)
        events += desk.told()
    assert events[-1].report.tokens_cache == 512
    ids = [event.token_id for event in events if isinstance(event, m.TokenReady)]
    desk.compute._main.sequence.forget()
    assert serve(desk, second_turn(answer), 4)[0] == ids


def test_without_idle_time_the_answer_is_read_again(desk):
    answer, _ = serve(desk, PROMPT, N_ANSWER)
    _, finished = serve(desk, second_turn(answer), 1)
    assert finished.report.tokens_cache == 256


def test_off_makes_nothing_canonical(engine):
    engine.span(0, engine.spec.n_layer_full).truncate(0)
    desk = Desk(engine, None, 0, start=False)
    desk.compute._main._canonical = False
    answer, _ = serve(desk, PROMPT, N_ANSWER)
    assert not desk.compute._use_idle_time()
    assert serve(desk, second_turn(answer), 1)[1].report.tokens_cache == 256


def test_what_was_run_again_and_why_rows_were_lost_is_counted(desk):
    tally = desk.compute._tally
    serve(desk, PROMPT, N_ANSWER)
    while desk.compute._use_idle_time():
        pass
    serve(desk, tokens(300, 13), 1)
    value = tally.metrics.registry.get_sample_value
    assert value("outrigger_canonical_tokens_total") == 256
    assert value("outrigger_prefix_divergence_total", {"cause": "other_text"}) == 1


@pytest.mark.parametrize("error", [EngineError("the backend failed"), MemoryError()])
def test_an_error_in_idle_time_costs_the_conversation_its_rows_and_nothing_else(desk, monkeypatch, error):
    answer, _ = serve(desk, PROMPT, N_ANSWER)

    def fails():
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(desk.compute._main.sequence, "advance_canonical", fails)
        assert desk.compute._use_idle_time()
    assert not desk.compute._use_idle_time()
    assert serve(desk, second_turn(answer), 2)[1].report.tokens_cache == 0


def test_when_memory_runs_out_a_request_is_refused_and_the_next_is_served(desk, monkeypatch):
    right, _ = serve(desk, PROMPT, 3)

    def fails(*_args):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(desk.compute._main.sequence, "decode", fails)
        _, failed = serve(desk, PROMPT, 3)
    assert failed.code == OutOfMemoryError.code and "memory" in failed.detail
    assert serve(desk, PROMPT, 3)[0] == right
