"""Aim: an emulated worker gives the real worker's answers, and each fault does what its line says, when it says.

Method: real worker processes, asked over both channels; faults are armed while they run, so that few processes serve.
"""

from __future__ import annotations

import json
import re
import socket
import time
from contextlib import closing

import numpy as np
import pytest

from common.errors import HashMismatchError, OutOfMemoryError
from common.wire import base_frames as base
from common.wire import extension_frames as ext
from common.wire.fingerprint import fingerprint
from common.wire.layout import Payload
from tests.device.conftest import N_CTX, cases  # noqa: F401  (the tiny models)
from tests.device.host_end import HostEnd, chunk2, host_end, mirror_at, split_output
from tests.device.worker_process import WorkerProcess, worker_process

CUT = (ConnectionError, EOFError)


class ControlEnd:
    """One command, one answer."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.sock = socket.create_connection(address)
        self.sock.settimeout(30)
        self._lines = self.sock.makefile("rb")

    def say(self, line: str) -> None:
        self.sock.sendall(line.encode() + b"\n")

    def hear(self) -> dict:
        return json.loads(self._lines.readline())

    def ask(self, line: str) -> dict:
        self.say(line)
        return self.hear()

    def close(self) -> None:
        self._lines.close()
        self.sock.close()


@pytest.fixture(scope="module")
def emulated(cases):  # noqa: F811
    """A running worker on an emulated loopback: nothing is slower, faults can be armed."""
    with worker_process(cases["llama"].tail, "--emulate", "loopback", n_ctx=N_CTX) as worker:
        yield worker


@pytest.fixture
def control(emulated: WorkerProcess):
    with closing(ControlEnd(emulated.control)) as end:
        yield end
        end.ask("mac ready")
        assert end.ask("faults")["armed"] == []


@pytest.fixture
def case(cases):  # noqa: F811
    return cases["llama"]


def arm(control: ControlEnd, script: str) -> None:
    assert control.ask(f"fault {script}")["ok"]


def greeted(worker: WorkerProcess, case) -> HostEnd:
    end = HostEnd(worker.link)
    try:
        end.greet(case.spec, case.first)
    except BaseException:
        end.close()
        raise
    return end


def right_rows(case, residual: np.ndarray) -> np.ndarray:
    return case.span.run(residual, 0, logits="last")[-1]


def test_what_a_shaped_link_carries_is_what_the_plain_worker_says(case) -> None:
    residual = case.residual(300)
    with worker_process(case.tail, "--emulate", "usb2,jitter=200us,slow=2") as worker:
        with closing(greeted(worker, case)) as host:
            for position in (0, 256):
                stop = min(300, position + 256)
                ack = host.ask(chunk2(residual[position:stop], position, want=5))
            with closing(ControlEnd(worker.control)) as control:
                assert control.ask("mem")["machine"].endswith("emulated usb2")
        logits, sections = split_output(ack)
    right = case.span
    right.run(residual[:256], 0, logits="none")
    np.testing.assert_array_equal(logits, right.run(residual[256:], 256, logits="last")[0])
    assert {section.p0 for section in sections} == {256}


def test_what_was_achieved_is_printed(case) -> None:
    with worker_process(case.tail, "--emulate", "usb2", "--faults", "cut at 3600s") as worker:
        said = worker.said
    assert re.search(r"^emulating usb2 \(40 MB/s, 250 µs round trip\)$", said[0])
    found = re.search(
        r"^achieved on this machine: (\d+) µs round trip, (\d+) MB/s in, (\d+) MB/s out$", said[1]
    )
    assert found
    assert int(found[2]) <= 42
    assert int(found[3]) <= 42
    assert said[2] == "fault armed: cut at 3600s"


@pytest.mark.parametrize("moment", ["before", "in", "during", "answering", "after"])
def test_a_cut_comes_at_its_moment(emulated, control, case, moment: str) -> None:
    arm(control, f"cut {moment} chunk 2")
    residual = case.residual(40)
    with closing(greeted(emulated, case)) as host:
        assert host.ask(chunk2(residual[:20], 0)).n_valid == 20
        host.send(chunk2(residual[20:], 20, want=4))
        if moment == "after":
            assert host.heard().n_valid == 40
        with pytest.raises(CUT):
            host.heard()
    assert control.ask("faults")["fired"][-1] == f"cut {moment} chunk 2"
    with closing(greeted(emulated, case)) as host:
        assert mirror_at(host) == 0


@pytest.mark.parametrize("frame", ["sync", "range", "trim", "snapshot", "ping", "hello"])
def test_a_cut_strikes_the_frame_it_names(emulated, control, case, frame: str) -> None:
    asked = {
        "sync": ext.Sync2(1, 0, Payload(b"")),
        "range": ext.StateRange2(0, 0, 0),
        "trim": ext.Trim2(0),
        "snapshot": ext.Snapshot(0),
        "ping": base.Ping(0),
    }
    arm(control, f"cut before {frame}")
    with closing(HostEnd(emulated.link)) as host, pytest.raises(CUT):
        host.greet(case.spec, case.first)
        host.ask(chunk2(case.residual(4), 0))
        host.ask(asked[frame])
    assert control.ask("faults")["fired"][-1] == f"cut before {frame} 1"


def test_a_flipped_request_is_refused_and_nothing_of_it_used(emulated, control, case) -> None:
    arm(control, "flip in chunk 1")
    residual = case.residual(20)
    with closing(greeted(emulated, case)) as host:
        refused = host.ask(chunk2(residual, 0))
        assert (refused.code, refused.n_valid) == (HashMismatchError.code, 0)
        logits, _ = split_output(host.ask(chunk2(residual, 0, want=1)))
    np.testing.assert_array_equal(logits, right_rows(case, residual))


def test_a_flipped_answer_is_noticed_by_its_hash(emulated, control, case) -> None:
    arm(control, "flip answering chunk 1")
    with closing(greeted(emulated, case)) as host, pytest.raises(HashMismatchError):
        host.ask(chunk2(case.residual(20), 0, want=5))


def test_a_frozen_worker_is_silent_on_both_channels_and_then_goes_on(emulated, control, case) -> None:
    arm(control, "freeze 0.6 during chunk 1")
    with closing(greeted(emulated, case)) as host:
        host.send(chunk2(case.residual(20), 0))
        host.sock.settimeout(0.3)
        with pytest.raises(TimeoutError):
            host.heard()
        control.say("mem")
        host.sock.settimeout(30)
        assert host.heard().n_valid == 20
        assert control.hear()["state"] == "serving"


def test_slow_computing_is_slow_hot_and_ends(emulated, control, case) -> None:
    residual = case.residual(256)
    with closing(greeted(emulated, case)) as host:
        usual = min(_compute_ms(host, residual) for _ in range(3))
        arm(control, "slow 20 after trim 1")
        slow = _compute_ms(host, residual)
        assert slow > 5 * usual
        assert control.ask("mem")["thermal"] == 2
        arm(control, "slow 1 now")
        assert min(_compute_ms(host, residual) for _ in range(3)) < slow


def _compute_ms(host: HostEnd, residual: np.ndarray) -> float:
    host.ask(ext.Trim2(0))
    return host.ask(chunk2(residual, 0)).compute_ms


def test_want_of_memory_is_told_and_refuses_one_chunk(emulated, control, case) -> None:
    arm(control, "out-of-memory now; memory-low for 0.3 now")
    with closing(greeted(emulated, case)) as host:
        with closing(ControlEnd(emulated.control)) as watching:
            assert watching.ask("watch")["memory_low"]
            assert control.ask("mem")["avail_mb"] <= 64
            assert not watching.hear()["memory_low"]
        refused = host.ask(chunk2(case.residual(20), 0))
        assert (refused.code, refused.n_valid) == (OutOfMemoryError.code, 0)
        assert host.ask(chunk2(case.residual(20), 0)).n_valid == 20


def test_suspending_is_told_then_silent_then_over_with_the_mirror_kept(emulated, control, case) -> None:
    with closing(greeted(emulated, case)) as host, closing(ControlEnd(emulated.control)) as watching:
        host.ask(chunk2(case.residual(20), 0))
        assert watching.ask("watch")["state"] == "serving"
        arm(control, "suspend 0.5 now")
        assert watching.hear()["state"] == "suspending"
        assert watching.hear()["state"] == "serving"
        assert mirror_at(host) == 20


def test_a_restart_is_refused_connections_and_then_another_boot(emulated, control, case) -> None:
    with closing(HostEnd(emulated.link)) as host:
        first = host.greet(case.spec, case.first).boot_id
        host.ask(chunk2(case.residual(20), 0))
        arm(control, "restart 0.3 now")
        with pytest.raises(CUT):
            host.heard()
    with pytest.raises(CUT):
        greeted(emulated, case).close()
    time.sleep(0.35)
    with closing(HostEnd(emulated.link)) as host:
        assert host.greet(case.spec, case.first).boot_id != first
        assert mirror_at(host) == 0


def test_greetings_of_another_version_and_another_model(emulated, control, case) -> None:
    arm(control, "wrong-version before hello 1; foreign-model before hello 2")
    with (
        host_end(emulated.link) as host,
        pytest.raises(AssertionError, match="extension versions 1 to 1 and this worker 2"),
    ):
        host.greet(case.spec, case.first)
    with host_end(emulated.link) as host:
        answer = host.greet(case.spec, case.first)
        assert answer.text.startswith("arch another")
        assert answer.fingerprint == fingerprint(answer.text)
        complaint = host.heard()
        assert "host and worker hold different models" in complaint.text
    greeted(emulated, case).close()


def test_a_bad_script_is_refused_on_either_way(emulated, control, case) -> None:
    assert "there is no 'explode'" in control.ask("fault explode now")["error"]
    assert "fault wants a script" in control.ask("fault")["error"]
    with (
        pytest.raises(AssertionError, match="no ready line"),
        worker_process(case.tail, "--faults", "explode now"),
    ):
        pass
