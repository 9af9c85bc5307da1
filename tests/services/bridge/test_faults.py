"""Aim: the bridge under every kind of fault: failures come at once with their cause, and the link comes back.

Method: a bridge in this process, an emulated worker in another; faults are armed over its control channel.
"""

from __future__ import annotations

import re
from contextlib import closing

import pytest

from common.config import BridgeSettings
from common.errors import LinkDeadlineError
from common.wire import messages as m
from services.bridge.places import Place
from tests.device.conftest import cases  # noqa: F401  (the tiny models)
from tests.device.emulator.test_stand_in import ControlEnd
from tests.device.worker_process import worker_process

from .conftest import link_hello


@pytest.fixture(scope="module")
def emulated(cases):  # noqa: F811
    with worker_process(cases["llama"].tail, "--emulate", "loopback") as worker:
        yield worker


@pytest.fixture
def case(cases):  # noqa: F811
    return cases["llama"]


@pytest.fixture
def up(case, emulated, bridged):
    bridge, mac = bridged(emulated.link, emulated.control[1], answer_s_min=0.4)
    mac.attach(link_hello(case))
    mac.up = mac.told(m.LinkUp)
    return bridge, mac


def arm(worker, script: str) -> None:
    with closing(ControlEnd(worker.control)) as control:
        assert control.ask(f"fault {script}")["ok"]


def test_a_link_comes_up_with_the_workers_pace_and_an_empty_mirror(up) -> None:
    _, mac = up
    assert mac.up.token_ms > 0 and mac.up.rtt_us > 0
    mac.send(m.RewindMirror, 1000)
    assert mac.heard()[0].n_valid == 0


def test_the_first_chunk_of_a_frozen_worker_is_late_after_its_own_pace(case, emulated, up) -> None:
    """The pace is known from the opening, so nobody waits the 60 s that a first chunk would be given unmeasured."""
    _, mac = up
    arm(emulated, "freeze 3 before chunk 1")
    mac.run(case.residual(256), 0)
    failed, _ = mac.heard()
    assert (failed.code, failed.cause) == (LinkDeadlineError.code, "deadline")
    given_s = float(re.search(r"within ([\d.]+) s", failed.detail)[1])
    assert given_s < BridgeSettings().answer_s_first, "the deadline came from somewhere else than the pace"
    assert mac.told(m.LinkDown).cause == "deadline"
    assert mac.told(m.LinkUp).token_ms > 0


@pytest.mark.parametrize("script", ["cut in chunk 2", "cut answering chunk 2", "flip answering chunk 2"])
def test_what_is_in_flight_fails_at_once_and_the_link_comes_back(case, emulated, up, script: str) -> None:
    bridge, mac = up
    lives = bridge.value("worker_epoch")
    arm(emulated, script)
    residual = case.residual(512)
    tickets = [mac.run(residual[i : i + 256], i, m.WANT_ROWS) for i in (0, 256)]
    done, failed = mac.heard()[0], mac.heard()[0]
    assert [done.ticket, failed.ticket] == tickets
    assert isinstance(failed, m.LinkFailed)
    if script != "cut in chunk 2":  # a reset may overtake the answer before it
        assert isinstance(done, m.ChunkDone)
    assert failed.cause == ("damaged" if "flip" in script else "down")
    again = mac.told(m.LinkUp)
    assert again.token_ms > 0
    assert bridge.value("worker_epoch") == lives + 1


def test_a_flipped_request_is_refused_and_the_link_stays(case, emulated, up) -> None:
    bridge, mac = up
    arm(emulated, "flip in chunk 1")
    mac.run(case.residual(256), 0)
    assert mac.heard()[0].cause == "damaged"
    mac.run(case.residual(256), 0)
    assert isinstance(mac.heard()[0], m.ChunkDone)
    assert bridge.value("worker_up") == 1


def test_a_suspended_worker_fails_what_is_in_flight_at_once_and_is_told(case, emulated, bridged) -> None:
    bridge, mac = bridged(emulated.link, emulated.control[1], answer_s_min=600.0)
    mac.attach(link_hello(case))
    mac.told(m.LinkUp)
    while mac.told(m.WorkerReported).state != "serving":
        pass
    arm(emulated, "suspend 1 during chunk 1")
    mac.run(case.residual(256), 0)
    mac.run(case.residual(256), 256)
    answers = [mac.heard()[0] for _ in range(2)]
    if isinstance(answers[0], m.ChunkDone):  # it was computed in the moment between the notice and the sleep
        answers.pop(0)
    assert answers[0].cause == "suspended"
    assert answers[-1].cause in ("suspended", "down"), (
        "the second may have come when the link was closed already"
    )
    assert all("suspends it" in failed.detail for failed in answers)
    while mac.told(m.WorkerReported).state != "suspending":
        pass
    assert mac.told(m.LinkUp).token_ms > 0
    assert bridge.value("worker_up") == 1


def test_a_restarted_worker_is_timed_anew(case, emulated, up) -> None:
    _, mac = up
    arm(emulated, "restart 0.5 now")
    assert mac.told(m.LinkDown).cause == "down"
    assert mac.told(m.LinkUp).token_ms > 0


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("wrong-version", "run the same version of outrigger on both"),
        ("foreign-model", "host and worker hold different models"),
    ],
)
def test_a_worker_that_does_not_fit_is_told_by_name(case, emulated, bridged, kind, says) -> None:
    arm(emulated, f"{kind} before hello 1")
    _, mac = bridged(emulated.link, emulated.control[1])
    mac.attach(link_hello(case))
    down = mac.told(m.LinkDown)
    assert down.final and says in down.detail
    mac.run(case.residual(4), 0)
    assert says in mac.heard()[0].detail


def test_memory_and_heat_become_metrics(emulated, up) -> None:
    bridge, mac = up
    arm(emulated, "memory-low for 5 now; slow 1.5 for 5 now")
    while mac.told(m.WorkerReported).avail_mb > 64:
        pass
    assert 0 < bridge.value("worker_available_bytes") <= 64 << 20
    while mac.told(m.WorkerReported).thermal != 2:
        pass
    assert bridge.value("worker_thermal_state") == 2


def test_places_are_tried_until_a_worker_greets(case, emulated, bridged) -> None:
    bridge, mac = bridged(("auto", emulated.link[1]), emulated.control[1])
    mac.attach(link_hello(case))
    assert "no worker was found" in mac.told(m.LinkDown).detail
    there = Place(*emulated.link, emulated.control[1], via="usb")
    bridge.bridge.pump.offer([Place("127.0.0.1", 1, 1), Place("127.0.0.1", 2, 2), there], "")
    assert mac.told(m.LinkUp).token_ms > 0
    assert bridge.bridge.pump.place == there
