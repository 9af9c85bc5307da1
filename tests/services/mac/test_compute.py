"""Aim: the compute thread serves requests one after the other, ends each as it should, and survives every error.
Method: the real loop in its thread on a tiny model, the twin as worker; events are collected as they are emitted."""

from __future__ import annotations

import queue
import time

import numpy as np
import pytest

from common.errors import ContextExceededError, EngineError, LinkDeadlineError, RequestError
from common.wire import messages as m
from services.mac.compute import Compute
from services.mac.pairing import Pairing
from services.mac.requests import RequestQueue
from services.mac.tally import Tally
from services.mac.worker import LinkView, Worker
from tests.services.mac.conftest import N_CTX, SPLIT_LAYERS
from tests.services.mac.twin import TailTwin


class Desk:
    """The asking side: submits requests and collects what is emitted."""

    def __init__(
        self, engine, twin, layer, rest_s=60.0, short_sequence=None, start=True, clock=time.monotonic
    ):
        self.queue, self.events = RequestQueue(clock=clock), queue.SimpleQueue()
        self.worker = Worker(layer, rest_s=rest_s)
        self.worker.link = LinkView("ready", 1)
        self.pairing = Pairing(
            engine, self.worker, twin, Tally(), split_tokens_min=258, guarded=False, clock=clock
        )
        self.compute = Compute(
            engine,
            self.queue,
            self.worker,
            lambda _request, message: self.events.put(message),
            self.pairing,
            short_sequence=short_sequence,
        )
        self.thread = self.compute.start() if start else None

    def ask(
        self, prompt, name="r", max_tokens=5, stop=(), credit=200, deadline_s=60.0, sampling=None, **more
    ):
        sampling = sampling or m.Sampling()
        ask = m.Generate(name, len(prompt), max_tokens, sampling, tuple(stop), deadline_s, credit, **more)
        self.queue.submit(ask, np.asarray(prompt, np.int32), b"peer")

    def told(self):
        """Events that came and nobody took yet."""
        return [self.events.get() for _ in range(self.events.qsize())]

    def until(self, kind):
        """Events up to and including the first of `kind`."""
        seen = []
        while not seen or not isinstance(seen[-1], kind):
            seen.append(self.events.get(timeout=60))
        return seen

    def run(self, prompt, **how):
        """(token ids, closing event)"""
        self.ask(prompt, **how)
        events = self.until(m.Finished | m.Failed)
        ready = [event for event in events if isinstance(event, m.TokenReady)]
        assert [event.index for event in ready] == list(range(len(ready)))
        return [event.token_id for event in ready], events[-1]


@pytest.fixture(scope="module")
def engines(new_engine):
    return new_engine("qwen35"), new_engine("qwen35")


@pytest.fixture
def desk(engines):
    host, far = engines
    layer = SPLIT_LAYERS["qwen35"]
    host.span(0, host.spec.n_layer_full).truncate(0)
    twin = TailTwin(far, layer)
    desk = Desk(host, twin, layer)
    desk.twin = twin
    yield desk
    desk.queue.close()
    desk.thread.join(timeout=30)
    assert not desk.thread.is_alive()
    twin.close()


def tokens(n, seed=0):
    return np.random.default_rng(seed).integers(0, 512, n).astype(np.int32)


def test_same_tokens_with_and_without_the_worker_and_an_honest_report(desk):
    prompt = tokens(700)
    with_worker, finished = desk.run(prompt, max_tokens=8)
    report = finished.report
    assert (report.tokens_worker, report.tokens_host, report.tokens_cache) == (512, 188, 0)
    assert report.bypass_reason == "" and report.prefill_s > 0 and report.decode_s > 0
    desk.worker.link = LinkView("absent")
    without, finished = desk.run(np.concatenate([tokens(9, 1), prompt]), max_tokens=1)
    assert finished.report.bypass_reason == "absent"
    without, finished = desk.run(prompt, max_tokens=8)
    assert finished.report.tokens_cache == 0 and finished.report.tokens_worker == 0
    assert without == with_worker and len(with_worker) == 8 and finished.reason == "length"


def test_progress_is_told_in_ubatches(desk):
    """Two answers of the worker that are there at once count as one step."""
    desk.ask(tokens(700), max_tokens=1)
    advanced = [e for e in desk.until(m.Finished) if isinstance(e, m.PrefillAdvanced)]
    done = [e.tokens_done for e in advanced]
    assert done in ([256, 512, 700], [512, 700])
    assert {e.tokens_total for e in advanced} == {700}


def test_a_stop_token_ends_it_and_is_not_sent(desk):
    free, _ = desk.run(tokens(40), max_tokens=6)
    stop = free[3]
    ids, finished = desk.run(tokens(40), max_tokens=6, stop=[stop])
    assert ids == free[: free.index(stop)] and finished.reason == "stop"
    assert finished.n_generated == len(ids)


def test_the_context_ends_it(desk):
    ids, finished = desk.run(tokens(N_CTX - 2), max_tokens=50)
    assert finished.reason == "length" and len(ids) == 3


def test_without_credit_it_waits_and_goes_on_with_more(desk):
    desk.ask(tokens(30), max_tokens=5, credit=2)
    first = [e for e in desk.until(m.TokenReady) + desk.until(m.TokenReady) if isinstance(e, m.TokenReady)]
    beat = desk.compute.beat
    with pytest.raises(queue.Empty):
        desk.events.get(timeout=0.6)
    assert desk.compute.beat > beat, "a request without credit does not stop the heart"
    desk.queue.grant(b"peer", "r", 100)
    rest = desk.until(m.Finished)
    ids = [e.token_id for e in first + rest if isinstance(e, m.TokenReady)]
    assert ids == desk.run(tokens(30), max_tokens=5)[0]


def test_a_cancel_ends_a_read_and_what_comes_next_is_right(desk):
    desk.ask(tokens(2300), max_tokens=5)
    desk.until(m.PrefillAdvanced)
    desk.queue.cancel(b"peer", "r")
    events = desk.until(m.Finished)
    assert events[-1].reason == "cancelled" and events[-1].n_generated == 0
    ids, finished = desk.run(tokens(1500), max_tokens=4)
    assert finished.report.tokens_worker > 0
    assert ids == desk.run(tokens(1500), max_tokens=4)[0]


@pytest.mark.parametrize(
    "how, code, words",
    [
        ({"prompt": tokens(N_CTX + 1)}, ContextExceededError.code, str(N_CTX)),
        ({"prompt": tokens(0)}, RequestError.code, "empty"),
        ({"prompt": [512]}, RequestError.code, "511"),
        ({"prompt": tokens(9), "deadline_s": 0.0}, LinkDeadlineError.code, "deadline"),
        ({"prompt": tokens(9), "sampling": m.Sampling(temperature=-1)}, EngineError.code, "temperature"),
    ],
)
def test_a_bad_request_fails_alone(desk, how, code, words):
    before, _ = desk.run(tokens(300), max_tokens=3)
    _, failed = desk.run(**how)
    assert failed.code == code and words in failed.detail
    assert desk.run(tokens(300), max_tokens=3)[0] == before


def test_a_worker_lost_mid_read_costs_the_client_nothing_but_time(desk):
    prompt = tokens(1300, 7)
    right, _ = desk.run(prompt, max_tokens=6)
    desk.run(tokens(20), max_tokens=1)
    n_answers = iter(range(100))
    desk.twin.spoil = lambda a, b: (
        (m.LinkFailed(a.link_epoch, a.ticket, 601, "closed", "cut"), b"") if next(n_answers) == 3 else (a, b)
    )
    ids, finished = desk.run(prompt, max_tokens=6)
    assert ids == right and finished.report.fallbacks == ("down",)
    assert finished.report.tokens_worker < finished.report.tokens_host, "its part ended where it was lost"
    _, finished = desk.run(tokens(1300, 8), max_tokens=1)
    assert finished.report.bypass_reason == "rested", "a failed worker rests"


def test_an_error_nobody_expected_fails_the_request_and_not_the_thread(desk):
    """The worker's channel breaks in a way that is not in the tree of errors."""

    def broken(_message, *_arrays):
        raise RuntimeError("not one of ours")

    desk.twin.send = broken
    _, failed = desk.run(tokens(700), max_tokens=1)
    assert failed.code == 1 and "not one of ours" in failed.detail
    del desk.twin.send
    assert desk.run(tokens(700), max_tokens=1)[1].reason == "length"
