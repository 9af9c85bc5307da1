"""The bridge between the bus and a real worker: answers come home, and whatever happens to the worker, the cable or
the mac process, every request is answered once and the link comes back.

Faults are real: the worker is another process that is killed, frozen and started again; the peer that speaks wrongly
is a socket of this test.
"""

from __future__ import annotations

import json
import signal
import socket
import time

import numpy as np
import pytest

from common.errors import LinkDeadlineError, LinkDownError, NonFiniteError, PositionError, StaleEpochError
from common.wire import base_frames as base
from common.wire import messages as m
from common.wire.frames import HEADER, RESIDUAL, encode
from common.wire.rows import decode_rows, encode_rows
from tests.device.worker_process import worker_process

from .conftest import MacEnd, link_hello

EVERYTHING = m.WANT_ROWS | m.WANT_STATE


@pytest.fixture
def case(cases):
    return cases["qwen35"]


@pytest.fixture
def worker(case):
    with worker_process(case.tail) as worker:
        yield worker


@pytest.fixture
def up(bridged, case, worker):
    """A bridge whose link is up, and the mac's end of it."""
    bridge, mac = bridged(worker.link, worker.control[1], answer_s_first=20.0)
    mac.attach(link_hello(case))
    mac.told(m.LinkUp)
    return bridge, mac


def as_bytes(sections):
    return [(str(s), bytes(np.ascontiguousarray(s.data))) for s in sections]


def test_a_read_crosses_the_bridge_and_its_rows_come_home(case, up):
    bridge, mac = up
    span, residual = case.span, case.residual(300)
    mac.run(residual[:256], 0, EVERYTHING)
    mac.run(residual[256:], 256, EVERYTHING)
    for ticket, (begin, end) in enumerate(((0, 256), (256, 300)), 1):
        done, (blob,) = mac.heard()
        span.run(residual[begin:end], begin)
        assert (done.ticket, done.n_tokens, done.link_epoch) == (ticket, end - begin, mac.epoch)
        assert 0 < done.compute_ms <= done.round_trip_ms
        assert as_bytes(decode_rows(blob)) == as_bytes(span.export_rows(begin, end))
    mac.send(m.PullRows, 0, 300, m.ROWS_KV | m.ROWS_STATE)
    pulled, (blob,) = mac.heard()
    assert pulled.blob_bytes == len(blob)
    assert as_bytes(decode_rows(blob)) == as_bytes(span.export_rows(0, 300))
    assert bridge.value("link_bytes_total", direction="out", kind="residual") > residual.nbytes
    assert bridge.value("link_bytes_total", direction="in", kind="rows") > len(blob)
    assert bridge.value("worker_up") == 1 and bridge.value("link_rtt_seconds_count") > 0


def test_requests_may_be_sent_ahead_of_their_turn(case, up):
    """Push, chunks, pull, rewind in one breath: the bridge keeps them until the link may carry them."""
    _, mac = up
    span, residual = case.span, case.residual(60)
    span.run(residual[:20], 0)
    blob = encode_rows(span.export_rows(0, 20)).joined()
    both = m.ROWS_KV | m.ROWS_STATE
    mac.send(m.RewindMirror, 0)
    mac.send(m.PushRows, both, 20, len(blob), arrays=[blob])
    for begin in (20, 30, 40, 50):
        mac.run(residual[begin : begin + 10], begin)
    mac.send(m.PullRows, 60, 60, m.ROWS_STATE)  # behind it a rewind overtakes no chunk
    mac.send(m.RewindMirror, 30)
    answers = [mac.heard()[0] for _ in range(8)]
    assert [answer.ticket for answer in answers] == list(range(1, 9))
    assert [a.n_valid for a in answers if isinstance(a, m.MirrorAt)] == [0, 20, 20], (
        "20: a state that crossed is kept"
    )
    assert sum(isinstance(answer, m.ChunkDone) for answer in answers) == 4


def test_the_workers_refusals_come_home_and_the_link_stays(case, up):
    bridge, mac = up
    bad = case.residual(8)
    bad[1, 1] = np.nan
    mac.run(case.residual(8), 5)
    mac.run(bad, 0)
    mac.run(case.residual(8), 0, EVERYTHING)
    answers = [mac.heard()[0] for _ in range(3)]
    assert [(a.code, a.cause) for a in answers[:2]] == [
        (PositionError.code, "range"),
        (NonFiniteError.code, "nonfinite"),
    ]
    assert isinstance(answers[2], m.ChunkDone)
    mac.residual.send(m.RunChunk(mac.epoch, 99, 8, 4, 3, 0), np.zeros((4, 3), np.float32))
    refused, _ = mac.heard()
    assert refused.ticket == 99 and "4 tokens have" in refused.detail
    assert bridge.value("worker_up") == 1


def test_another_epoch_is_answered_and_counted_not_forwarded(case, up):
    bridge, mac = up
    for epoch in (mac.epoch - 1, mac.epoch + 1, 0):
        ticket = mac.send(m.RunChunk, 0, *case.residual(4).shape, 0, arrays=[case.residual(4)], epoch=epoch)
        failed, _ = mac.heard()
        assert (failed.ticket, failed.code) == (ticket, StaleEpochError.code)
    assert bridge.value("link_frames_dropped_total", reason="stale_epoch") == 3
    mac.send(m.RewindMirror, 10)
    assert mac.heard()[0].n_valid == 0


def test_a_killed_worker_fails_everything_at_once_and_comes_back(case, cases, bridged):
    with worker_process(case.tail) as first:
        bridge, mac = bridged(first.link, first.control[1])
        mac.attach(link_hello(case))
        before = mac.told(m.LinkUp)
        tickets = [mac.run(case.residual(256), 256 * i) for i in range(2)]
        tickets += [mac.send(m.RewindMirror, 512), mac.send(m.RewindMirror, 0)]
        first.signal(signal.SIGKILL)
        answers = [mac.heard()[0] for _ in tickets]
        assert [answer.ticket for answer in answers] == tickets
        failures = [answer for answer in answers if isinstance(answer, m.LinkFailed)]
        assert failures and {f.code for f in failures} == {LinkDownError.code}
        assert answers[-len(failures) :] == failures, "what was done before the kill was answered first"
        assert not mac.told(m.LinkDown).final
        mac.run(case.residual(4), 0)
        assert mac.heard()[0].code == LinkDownError.code
        with worker_process(case.tail, "--port", str(first.link[1])):
            again = mac.told(m.LinkUp)
            assert again.link_epoch > before.link_epoch
            mac.run(case.residual(4), 0)
            assert isinstance(mac.heard()[0], m.ChunkDone)
    assert bridge.value("worker_epoch") == 2


def test_a_frozen_worker_is_found_by_its_deadline(case, worker, bridged):
    _, mac = bridged(worker.link, worker.control[1], answer_s_first=1.0, answer_s_min=0.5)
    mac.attach(link_hello(case))
    mac.told(m.LinkUp)
    worker.signal(signal.SIGSTOP)
    tickets = [mac.run(case.residual(256), 0), mac.run(case.residual(256), 256)]
    answers = [mac.heard()[0] for _ in tickets]
    assert [a.ticket for a in answers] == tickets
    assert {a.code for a in answers} == {LinkDeadlineError.code}
    down = mac.told(m.LinkDown)
    assert down.cause == "deadline" and not down.final
    worker.signal(signal.SIGCONT)
    mac.told(m.LinkUp)
    mac.run(case.residual(256), 0)
    assert isinstance(mac.heard()[0], m.ChunkDone)


def test_another_model_is_final_and_says_what_differs(case, worker, bridged):
    _, mac = bridged(worker.link)
    mac.attach(
        link_hello(case, fingerprint_text=case.spec.fingerprint_text(case.first).replace("64x", "65x", 1))
    )
    down = mac.told(m.LinkDown)
    assert down.final and down.cause == "refused"
    assert "65x" in down.detail and "64x" in down.detail and "outrigger worker --model TAIL" in down.detail
    assert "\n" not in down.detail
    mac.attach(link_hello(case, split_layer=case.first - 1))
    assert f"-L {case.first - 1} TAIL" in mac.told(m.LinkDown).detail
    mac.attach(link_hello(case))
    assert mac.told(m.LinkUp).hello.split_layer == case.first


def test_attaching_again_begins_a_new_life(case, up):
    _, mac = up
    first = mac.epoch
    mac.run(case.residual(8), 0)
    assert isinstance(mac.heard()[0], m.ChunkDone)
    mac.attach(link_hello(case))
    assert mac.told(m.LinkUp).link_epoch > first
    mac.send(m.RewindMirror, 8)
    assert mac.heard()[0].n_valid == 0, "the mirror is empty in a new life"


def test_a_second_bridge_is_told_that_the_worker_is_busy(case, worker, up, tmp_path):
    from .conftest import BridgeThread

    other_dir = tmp_path / "other"
    other_dir.mkdir(mode=0o700)
    bridge, mac = BridgeThread(other_dir, worker.link), MacEnd(other_dir)
    try:
        mac.attach(link_hello(case))
        down = mac.told(m.LinkDown)
        assert down.cause == "busy" and not down.final and "stop that host first" in down.detail
        _, first = up
        first.run(case.residual(4), 0)
        assert isinstance(first.heard()[0], m.ChunkDone)
    finally:
        mac.close()
        bridge.close()


def test_a_vanished_mac_gives_the_worker_back(case, up, run_dir, worker):
    bridge, mac = up
    mac.run(case.residual(8), 0)
    mac.heard()
    mac.link.close()
    mac.residual.close()
    until = time.monotonic() + 20
    while bridge.value("worker_up") and time.monotonic() < until:
        time.sleep(0.05)
    assert bridge.value("worker_up") == 0
    again = MacEnd(run_dir)
    try:
        again.attach(link_hello(case))
        again.told(m.LinkUp)
        again.send(m.RewindMirror, 8)
        assert again.heard()[0].n_valid == 0
    finally:
        again.close()


def test_detaching_closes_and_stays_closed(case, up):
    bridge, mac = up
    mac.link.send(m.DetachWorker())
    while bridge.value("worker_up"):
        time.sleep(0.01)
    mac.run(case.residual(4), 0)
    assert mac.heard()[0].code == LinkDownError.code


def test_memory_heat_and_state_are_reported_and_phases_shown(case, up, worker):
    _, mac = up
    reported = mac.told(m.WorkerReported)
    assert reported.avail_mb > 0 and reported.state == "serving"
    for phase in ("reading", "writing", "done"):
        mac.link.send(m.ShowPhase(phase, 1, 2, 3))
    with socket.create_connection(worker.control) as control, control.makefile("rw") as lines:
        shown = ""
        while shown != "done":
            lines.write("mem\n")
            lines.flush()
            shown = json.loads(lines.readline())["phase"]


def test_no_worker_configured_is_final(case, bridged):
    _, mac = bridged(("", 50060))
    mac.attach(link_hello(case))
    down = mac.told(m.LinkDown)
    assert down.final and "OUTRIGGER_WORKER_HOST" in down.detail


def test_nobody_listening_is_told_once_and_tried_again(case, bridged):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    _, mac = bridged(("127.0.0.1", port))
    mac.attach(link_hello(case))
    down = mac.told(m.LinkDown)
    assert not down.final and f"127.0.0.1:{port}" in down.detail and "outrigger worker" in down.detail
    with worker_process(case.tail, "--port", str(port)):
        assert mac.told((m.LinkUp, m.LinkDown)).__class__ is m.LinkUp, "the same complaint is not told twice"


@pytest.mark.parametrize(
    ("words", "cause", "final"),
    [
        (b"".join(encode(RESIDUAL, base.Err("unknown message type 64"))), "base_peer", True),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "damaged", True),
        (b"".join(encode(RESIDUAL, base.Ok(3))), "damaged", True),
        (b"", "down", False),
    ],
    ids=["base peer", "http", "wrong message", "silent"],
)
def test_a_peer_that_is_no_worker_is_named(case, bridged, words, cause, final):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)
        _, mac = bridged(listener.getsockname())
        mac.attach(link_hello(case))
        peer, _ = listener.accept()
        peer.settimeout(20)
        _, _, n_bytes = HEADER.unpack(memoryview(peer.recv(HEADER.size, socket.MSG_WAITALL)))
        assert len(peer.recv(n_bytes, socket.MSG_WAITALL)) == n_bytes
        peer.sendall(words)
        peer.close()
        down = mac.told(m.LinkDown)
    assert (down.cause, down.final) == (cause, final), down
    if cause == "base_peer":
        assert "base protocol only" in down.detail and "unknown message type 64" in down.detail
