"""Aim: a short request that arrives during a long one starts at the next step's border, both get their share, neither
changes a bit of the other, and a cancel hits the right one.
Method: the real loop on tiny models of both architectures, with the twin as worker and without; the computing time is
what a clock of the test says, one second for each step, so that shares are counted and not measured."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from common.errors import LinkDeadlineError
from common.wire import messages as m
from services.mac.worker import LinkView
from tests.services.mac.conftest import SPLIT_LAYERS
from tests.services.mac.test_compute import Desk, tokens
from tests.services.mac.twin import TailTwin

N_SHORT_CTX = 768
LONG, SHORT = tokens(2300, 1), tokens(300, 2)


@pytest.fixture(scope="module", params=["llama", "qwen35"])
def engines(request, new_engine):
    engine = new_engine(request.param)
    return request.param, engine, new_engine(request.param), engine.sequence(N_SHORT_CTX)


@pytest.fixture
def desk(engines):
    arch, engine, far, sequence = engines
    for each in (engine, sequence):
        each.span(0, engine.spec.n_layer_full).truncate(0)
    far.span(SPLIT_LAYERS[arch], far.spec.n_layer_full).truncate(0)
    twin = TailTwin(far, SPLIT_LAYERS[arch])
    desk = Desk(engine, twin, SPLIT_LAYERS[arch], short_sequence=sequence)
    desk.twin = twin
    yield desk
    desk.queue.close()
    desk.thread.join(timeout=30)
    assert not desk.thread.is_alive()
    twin.close()


def push_out(desk):
    """Leave nothing of earlier requests at hand, in either lane."""
    desk.run(tokens(1100, 99), max_tokens=1)  # more than the short lane can hold
    desk.run(tokens(9, 98), max_tokens=1)


def alone(desk, prompt, **how):
    """What a request gets with nobody beside it and nothing to reuse."""
    push_out(desk)
    ids, finished = desk.run(prompt, **how)
    assert finished.report.tokens_cache == 0
    return ids


def both(desk, **short_how):
    """A long request, and a short one as soon as the long one's read has begun: all events of both."""
    desk.ask(LONG, "long", max_tokens=6)
    events = desk.until(m.PrefillAdvanced)
    desk.ask(SHORT, "short", **({"max_tokens": 12} | short_how))
    ends = 0
    while ends < 2:
        events += desk.until(m.Finished | m.Failed)
        ends += 1
    return events


def ids_of(events, name):
    return [e.token_id for e in events if isinstance(e, m.TokenReady) and e.request_id == name]


@pytest.mark.parametrize("with_worker", [True, False])
def test_answers_beside_each_other_are_those_alone(desk, with_worker):
    desk.worker.link = LinkView("ready" if with_worker else "absent", 1)
    right = {"long": alone(desk, LONG, max_tokens=6), "short": alone(desk, SHORT, max_tokens=12)}
    push_out(desk)
    events = both(desk)
    assert {name: ids_of(events, name) for name in right} == right
    reports = {event.request_id: event.report for event in events if isinstance(event, m.Finished)}
    assert reports["short"].tokens_worker == 0
    assert (reports["long"].tokens_worker > 0) == with_worker and reports["long"].fallbacks == ()


def test_several_short_ones_in_a_row_do_not_stop_the_long_one(desk):
    """Each short one arrives when the one before ends; the long one goes on between their steps."""
    desk.worker.link = LinkView("absent")
    desk.ask(LONG, "long", max_tokens=2)
    desk.until(m.PrefillAdvanced)
    steps = []
    for number in range(4):
        desk.ask(tokens(20, number), f"short {number}", max_tokens=200)
        steps += desk.until(m.Finished)
        if steps[-1].request_id == "long":
            break
    advanced = [e for e in steps if isinstance(e, m.PrefillAdvanced) and e.request_id == "long"]
    assert advanced, "the long read went on while short ones were served"


def test_a_request_that_outgrows_the_short_sequence_goes_on_in_the_main_one(desk):
    prompt, n = tokens(500, 5), N_SHORT_CTX - 500 + 40
    right = alone(desk, prompt, max_tokens=n, credit=1000)
    push_out(desk)
    desk.ask(LONG, "long", max_tokens=200, credit=1)
    desk.until(m.TokenReady)
    desk.ask(prompt, "short", max_tokens=n, credit=1000)
    events = []
    while len(ids_of(events, "short")) < N_SHORT_CTX - 500 + 1:
        events += desk.until(m.TokenReady)
    assert not any(isinstance(event, m.Finished) for event in events)
    desk.queue.cancel(b"peer", "long")  # the main lane is free now
    while not (isinstance(events[-1], m.Finished) and events[-1].request_id == "short"):
        events += desk.until(m.Finished)
    assert ids_of(events, "short") == right and events[-1].reason == "length"
    assert desk.run(prompt, max_tokens=3)[0] == right[:3], "and the next request may reuse its rows"


@pytest.mark.parametrize("victim", ["long", "short"])
def test_a_cancel_frees_its_lane_and_leaves_the_other_alone(desk, victim):
    right = {
        "long": alone(desk, LONG, max_tokens=6),
        "short": alone(desk, SHORT, max_tokens=300, credit=1000),
    }
    push_out(desk)
    desk.ask(LONG, "long", max_tokens=6, credit=1)
    events = desk.until(m.PrefillAdvanced)
    desk.ask(SHORT, "short", max_tokens=300, credit=5)
    events += desk.until(m.TokenReady)
    desk.queue.cancel(b"peer", victim)
    for name in ("long", "short"):
        desk.queue.grant(b"peer", name, 1000)
    ends = {}
    while len(ends) < 2:
        events += desk.until(m.Finished)
        ends[events[-1].request_id] = events[-1]
    survivor = "short" if victim == "long" else "long"
    assert ends[victim].reason == "cancelled" and ends[survivor].reason == "length"
    assert ids_of(events, survivor) == right[survivor]
    for name, prompt in (("long", LONG), ("short", SHORT)):
        assert desk.run(prompt, max_tokens=6)[0] == right[name][:6]


def test_an_error_in_one_lane_leaves_the_other_alone(desk):
    right = alone(desk, LONG, max_tokens=6)
    push_out(desk)
    desk.ask(LONG, "long", max_tokens=6)
    events = desk.until(m.PrefillAdvanced)
    desk.ask([512], "bad")
    desk.ask(SHORT, "late", deadline_s=0.0)
    while not (isinstance(events[-1], m.Finished) and events[-1].request_id == "long"):
        events += desk.until(m.Finished | m.Failed)
    failed = {event.request_id: event for event in events if isinstance(event, m.Failed)}
    assert "511" in failed["bad"].detail and failed["late"].code == LinkDeadlineError.code
    assert ids_of(events, "long") == right


def test_a_prompt_that_is_not_short_waits_and_a_short_one_overtakes_it(desk):
    desk.worker.link = LinkView("absent")
    desk.ask(LONG, "long", max_tokens=2)
    desk.until(m.PrefillAdvanced)
    desk.ask(tokens(700, 3), "waits", max_tokens=2)
    desk.ask(tokens(40, 4), "overtakes", max_tokens=2)
    events = []
    for _ in range(3):
        events += desk.until(m.Finished)
    begun = [event.request_id for event in events if isinstance(event, m.PrefillAdvanced)]
    assert begun.index("overtakes") < begun.index("waits") and "long" in begun[: begun.index("waits")]


def test_the_short_lane_reuses_its_own_prefix_so_that_a_chat_may_grow(desk):
    """A second turn of more than 512 tokens is short when all but 512 are held."""
    desk.worker.link = LinkView("absent")
    desk.ask(LONG, "long", max_tokens=100, credit=1)
    desk.until(m.TokenReady)
    first, second = SHORT, np.concatenate([SHORT, tokens(300, 6)])
    desk.run(first, name="first", max_tokens=2)
    ids, finished = desk.run(second, name="second", max_tokens=2)
    assert finished.report.tokens_cache == 256
    desk.queue.cancel(b"peer", "long")
    desk.until(m.Finished)
    assert desk.run(second, name="third", max_tokens=2)[0] == ids


def test_short_requests_leave_a_long_conversation_alone(desk):
    """They go to the short lane also while nobody else is there; the long one is continued from where it was."""
    desk.worker.link = LinkView("absent")
    push_out(desk)
    desk.run(LONG, max_tokens=2)
    for seed in range(3):
        ids, finished = desk.run(tokens(300, 30 + seed), max_tokens=3)
        assert len(ids) == 3 and finished.report.tokens_cache == 0
    _, finished = desk.run(np.concatenate([LONG, tokens(100, 7)]), max_tokens=2)
    assert finished.report.tokens_cache == 2048


def test_a_conversation_that_became_long_takes_its_rows_along_to_the_main_lane(desk):
    desk.worker.link = LinkView("absent")
    chat = tokens(900, 41)  # its first turns fit the short lane, the last does not
    right = alone(desk, chat, max_tokens=4)
    push_out(desk)
    desk.run(LONG, max_tokens=2)
    for n in (400, 600):
        _, finished = desk.run(chat[:n], max_tokens=2)
    assert finished.report.tokens_cache == 256
    ids, finished = desk.run(chat, max_tokens=4)
    assert ids == right and finished.report.tokens_cache == 512


class StepClock:
    """A clock that each look moves on by nothing, and each step of the engine by one second."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def test_while_both_compute_steps_alternate_and_the_short_one_is_next(engines):
    """One step is one second: the order of steps is the policy itself."""
    _arch, engine, _far, sequence = engines
    clock = StepClock()
    desk = Desk(engine, None, 0, short_sequence=sequence, start=False, clock=clock)
    order = []
    for lane, name in ((desk.compute._main, "main"), (desk.compute._short, "short")):

        def counted(wait_s, lane=lane, advance=lane.advance, name=name):
            if not lane.step.ends:
                clock.now_s += 1.0
                order.append(name)
            return advance(wait_s)

        lane.advance = counted
    desk.ask(LONG, "long", max_tokens=5, deadline_s=1000.0)
    turn_the_crank(desk, 3)
    desk.ask(SHORT, "short", max_tokens=4, deadline_s=1000.0)
    turn_the_crank(desk, 30)
    assert order[:3] == ["main"] * 3 and order[3] == "short", "it starts at the next step's border"
    together = order[3 : len(order) - order[::-1].index("short")]
    assert all(a != b for a, b in itertools.pairwise(together)), "half and half"
    desk.queue.close()
    desk.compute.run()


def test_a_cancelled_read_ends_at_the_next_step_and_its_lane_is_free(engines):
    _arch, engine, _far, sequence = engines
    desk = Desk(engine, None, 0, short_sequence=sequence, start=False)
    desk.ask(LONG, "long")
    desk.ask(SHORT, "short", max_tokens=50)
    turn_the_crank(desk, 4)
    assert desk.queue.counts() == (2, 0)
    done = max(
        e.tokens_done for e in desk.told() if isinstance(e, m.PrefillAdvanced) and e.request_id == "long"
    )
    desk.queue.cancel(b"peer", "long")
    turn_the_crank(desk, 2)  # one of them may be the other lane's
    end = [event for event in desk.told() if isinstance(event, m.Finished)]
    assert [(event.request_id, event.reason) for event in end] == [("long", "cancelled")]
    assert done < len(LONG) and desk.queue.counts() == (1, 0)
    desk.queue.cancel(b"peer", "short")
    turn_the_crank(desk, 1)
    assert desk.queue.counts() == (0, 0)


def turn_the_crank(desk, n_turns):
    """The loop's body, from the test's own thread."""
    for _ in range(n_turns):
        desk.compute._admit()
        if lane := desk.compute._next_lane():
            desk.compute._advance(lane)
