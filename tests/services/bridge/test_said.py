"""Aim: people learn of each trouble with the worker once, with what to do, and of its end.

Method: a real worker, wrong at first and right later, at the same port.
"""

from __future__ import annotations

import time

from common.wire import messages as m
from services.launch.ports import free_ports
from tests.device.worker_process import worker_process

from .conftest import WAIT_S, link_hello


def wait_for(condition):
    until = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_refusal_is_told_once_and_its_end_too(cases, bridged):
    case, other = cases["qwen35"], cases["llama"]
    with worker_process(other.tail) as wrong:
        bridge, mac = bridged(wrong.link, wrong.control[1])
        mac.attach(link_hello(case))
        assert mac.told(m.LinkDown).final
        wait_for(lambda: bridge.said)
        assert bridge.said[0].startswith("worker refused: ")
        mac.attach(link_hello(case))
        assert mac.told(m.LinkDown).final
        assert len(bridge.said) == 1
        mac.attach(link_hello(other))
        mac.told(m.LinkUp)
        wait_for(lambda: len(bridge.said) > 1)
    assert bridge.said[1] == "the worker is linked"


def test_a_worker_that_is_not_there_is_told(cases, bridged):
    bridge, mac = bridged(("127.0.0.1", free_ports(1)[0]))
    mac.attach(link_hello(cases["qwen35"]))
    assert not mac.told(m.LinkDown).final
    wait_for(lambda: bridge.said)
    assert bridge.said[0].startswith("no worker: cannot connect")
