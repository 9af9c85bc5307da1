"""A cancelled read costs the worker no more than the ubatch at hand: chunks past a TRIM2 that waits are not run.

Method: the real compute thread over a real tail; everything is queued before it starts, so that the order is certain.
"""

from __future__ import annotations

import threading
import time

import pytest

from common.engine.engine import Engine
from common.errors import LinkDownError
from common.wire import extension_frames as ext
from device.compute import ComputeThread, Work
from device.mirror import TailMirror
from device.service import TailService, Terms

from .host_end import chunk2


class Client:
    """A connection that keeps what it is told."""

    peer, closed = "a test", False

    def __init__(self):
        self.told, self.complete = [], threading.Event()

    def reply(self, frame):
        self.told.append(frame)
        if isinstance(frame, ext.Ok2):
            self.complete.set()

    def fail(self, error, n_valid):
        raise error


@pytest.fixture
def service(case):
    with Engine.load(case.tail, n_ctx=1024, n_threads=1) as engine:
        mirror = TailMirror(engine)
        mirror.attach(case.first)
        yield TailService(mirror, Terms(1, "a test", window=4))


def run(service, client, frames):
    """Queue all frames, then start: answers in order."""
    compute = ComputeThread(service)
    for seq, frame in enumerate(frames, 1):
        compute.submit(Work(client, frame, seq, time.monotonic()))
    compute.start()
    assert client.complete.wait(60)
    assert compute.stop(60)
    return client.told


@pytest.mark.parametrize("n_kept", [0, 256, 512])
def test_chunks_past_a_waiting_trim_are_answered_without_being_run(case, service, n_kept):
    chunks = [chunk2(case.residual(256), position) for position in (0, 256, 512)]
    told = run(service, Client(), [*chunks, ext.Trim2(n_kept)])
    n_run = n_kept // 256
    assert [type(frame) for frame in told] == [ext.Chunk2Ack] * n_run + [ext.Err2] * (3 - n_run) + [ext.Ok2]
    assert service.n_chunks == n_run
    refused = told[n_run:-1]
    assert [frame.answers for frame in refused] == list(range(n_run + 1, 4))
    assert {frame.code for frame in refused} == {LinkDownError.code}
    assert {frame.n_valid for frame in refused} == {n_kept} and told[-1].n_valid == n_kept


def test_another_clients_trim_and_a_trim_that_was_done_stop_nothing(case, service):
    told = run(
        service,
        Client(),
        [ext.Snapshot(0), ext.Trim2(0), chunk2(case.residual(256), 0), chunk2(case.residual(9), 256)],
    )
    assert [type(frame) for frame in told] == [ext.Ok2, ext.Ok2, ext.Chunk2Ack, ext.Chunk2Ack]
