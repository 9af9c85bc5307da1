"""Aim: a read uses the worker exactly when there is one, it fits, and it is not resting.
Method: a Worker with a clock turned by hand."""

from __future__ import annotations

import pytest

from services.mac.worker import LinkView, Worker


class HandClock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.mark.parametrize(
    "state, standing",
    [("absent", "absent"), ("connecting", "absent"), ("ready", "ready"), ("refused", "refused")],
)
def test_standing_follows_the_link(state, standing):
    worker = Worker(20, rest_s=60)
    worker.link = LinkView(state)
    assert worker.standing == standing
    assert worker.view().state == state


def test_without_a_split_layer_it_is_off_whatever_the_link():
    worker = Worker(0, rest_s=60)
    worker.link = LinkView("ready", 1)
    assert worker.standing == "off"


def test_after_a_failure_it_rests_for_the_time_set_and_comes_back():
    clock = HandClock()
    worker = Worker(20, rest_s=60, clock=clock)
    worker.link = LinkView("ready", 1)
    worker.failed()
    assert worker.standing == "rested" and worker.view().state == "resting" and "60" in worker.view().detail
    clock.now_s += 59.9
    assert worker.standing == "rested"
    clock.now_s += 0.2
    assert worker.standing == "ready" and worker.view().state == "ready"


def test_a_lost_link_is_told_before_the_rest():
    worker = Worker(20, rest_s=60)
    worker.failed()
    assert worker.standing == "absent"
