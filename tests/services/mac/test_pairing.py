"""Aim: who takes part in the next read follows from measured times, moves only between reads, and never changes a bit.
Method: the compute thread's parts over real engines and the in-memory twin; paces are made up where needed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from common.wire import messages as m
from services.mac.pairing import Pairing
from services.mac.tally import Tally
from services.mac.worker import LinkView, Worker
from tests.services.mac.test_paces import made_up
from tests.services.mac.test_read import Rig, tokens


class Pair(Rig):
    """As the rig of reads, with a Pairing that begins them. The clock ticks with each look; no guard unless asked."""

    def __init__(self, arch, engines):
        super().__init__(arch, engines)
        self.now_s = 0.0
        self.reports = []
        self.epoch = 100
        self.worker = Worker(self.layer, rest_s=60.0)
        self.link(self.layer)
        n_layer = self.oracle.spec.n_layer_full
        self.pairing = Pairing(
            engines[0],
            self.worker,
            self.twin,
            Tally(),
            split_tokens_min=258,
            guarded=False,
            layer_pinned=False,
            on_split_layer=self.link,
            on_read=self.reports.append,
            clock=self.clock,
        )
        self.n_layer = n_layer

    def clock(self):
        self.now_s += 0.001
        return self.now_s

    def link(self, layer):
        """The worker is greeted for layers [layer, n)."""
        self.epoch += 1
        self.twin.mirror.attach(layer)
        self.worker.link = LinkView("ready", self.epoch, window=4, layer_min=2)

    def begin(self, prompt, **_how):
        return self.pairing.read(self.sequence, prompt, self.sequence.begin(prompt))

    def knows(self, host_s, worker_s):
        """Both sides' paces, in seconds a layer."""
        paces = self.pairing.paces
        for _ in range(8):
            report = made_up(host_s, worker_s, self.worker.split_layer)
            paces._n_layer, n_layer = 32, paces._n_layer
            paces.learn(report, self.worker.split_layer)
            paces._n_layer = n_layer

    def idle(self):
        n = 0
        while self.pairing.use_idle_time(self.sequence, []):
            n += 1
        return n


@pytest.fixture(scope="module", params=["llama", "qwen35"])
def engines(request, new_engine):
    return request.param, [new_engine(request.param) for _ in range(3)]


@pytest.fixture
def pair(engines):
    pair = Pair(*engines)
    yield pair
    pair.twin.close()


def test_the_first_read_uses_the_worker_and_is_learned_from(pair):
    read = pair.check(tokens(1100))
    assert read.plan.n_remote and not pair.pairing.paces.known
    pair.pairing.review()
    assert pair.pairing.paces.known and pair.reports == [read.report()]


def test_both_sides_are_timed_before_the_first_read_and_it_is_planned_from_that(pair):
    """The bridge times the worker when the link comes up, the host itself while nothing is held."""
    pair.worker.link = replace(pair.worker.link, token_ms=1e-6, rtt_us=90.0)
    n_before = pair.twin.tokens_run
    pair.idle()
    assert pair.pairing.paces.known and pair.twin.tokens_run == n_before
    assert pair.worker.split_layer == 2, "a worker as fast as that gets all that its file holds"
    read = pair.check(tokens(1100, seed=9))
    assert read.plan.start == 0 and read.report().split_layer == 2 and read.report().tokens_worker > 0
    n_timed = pair.pairing._n_timed
    pair.pairing.review()
    pair.idle()
    assert pair.pairing._n_timed == n_timed == 2


def test_a_slow_worker_is_left_out_of_the_very_first_read(pair):
    pair.pairing._layer_pinned = pair.pairing._guarded = True
    pair.worker.link = replace(pair.worker.link, token_ms=1e4, rtt_us=90.0)
    pair.idle()
    assert pair.check(tokens(1100, seed=10)).plan.bypass_reason == "slow"


def test_a_worker_that_gave_most_of_a_read_back_rests(pair):
    """Its pace as a mean over all reads may still look well; what it did last counts."""
    pair.pairing._layer_pinned = pair.pairing._guarded = True
    read = pair.check(tokens(1100, seed=11))
    pair.pairing.review()
    read.tokens_returned = 2000
    pair.pairing._open.append(read)
    assert pair.check(tokens(1100, seed=12)).plan.bypass_reason == "slow"
    pair.now_s += 70
    assert pair.check(tokens(1100, seed=13)).plan.bypass_reason in ("", "slow")
    assert pair.pairing._slow_at is None


def test_the_split_layer_moves_between_reads_and_no_bit_with_it(pair):
    """Down as far as the worker's file goes when it is fast; its states go with the new parts."""
    story = tokens(2304)
    pair.check(story[:1100])
    pair.knows(0.01, 0.0001)
    pair.idle()
    assert pair.worker.split_layer == 2 == pair.sequence.parts[0].last
    read = pair.check(story)
    assert read.plan.start == 1024 and read.report().split_layer == 2 and read.report().tokens_worker > 0
    pair.knows(0.01, 0.012)
    pair.idle()
    assert pair.worker.split_layer > 2 or pair.n_layer == 3
    assert pair.check(np.concatenate([story, tokens(250, seed=3)])).plan.start == 2304


def test_a_worker_that_gains_nothing_is_left_out_and_tried_again_after_its_rest(pair):
    pair.pairing._layer_pinned = pair.pairing._guarded = True
    pair.knows(0.01, 0.5)
    read = pair.check(tokens(1100, seed=1))
    assert read.plan.bypass_reason == "slow" and read.report().tokens_worker == 0
    pair.now_s += 50
    assert pair.check(tokens(1100, seed=2)).plan.bypass_reason == "slow"
    pair.now_s += 20
    report = pair.check(tokens(1100, seed=3)).report()
    assert report.tokens_worker or report.tokens_returned


def test_the_mirror_is_brought_up_to_date_in_idle_time(pair):
    """A turn that the host read alone is pushed before the next one asks for it."""
    story = tokens(2304)
    pair.pairing._layer_pinned = True
    pair.check(story[:1100])
    link, pair.worker.link = pair.worker.link, LinkView("absent")
    pair.check(story[:1536])
    pair.worker.link = link
    n_before = len(pair.twin.asked)
    assert pair.idle() and not pair.idle()
    pushes = [ask for ask in pair.twin.asked[n_before:] if isinstance(ask, m.PushRows)]
    assert pushes[-1].n_valid_after == 1536 == pair.twin.mirror.n_valid
    n_before = len(pair.twin.asked)
    assert pair.check(story).plan.start in (1280, 1536)
    if pair.sequence.whole.n_valid and not pair.sequence.has_recurrent:
        assert not any(isinstance(ask, m.PushRows) for ask in pair.twin.asked[n_before:])


def test_a_mirror_that_cannot_be_brought_up_to_date_rests_the_worker(pair):
    story = tokens(2304)
    pair.pairing._layer_pinned = True
    pair.check(story[:1100])
    link, pair.worker.link = pair.worker.link, LinkView("absent")
    pair.check(story[:1536])
    pair.worker.link = link
    pair.twin.spoil = lambda a, b: (m.LinkFailed(a.link_epoch, a.ticket, 601, "closed", "cut"), b"")
    pair.idle()
    pair.twin.spoil = None
    assert pair.worker.standing == "rested"
    pair.check(story)
