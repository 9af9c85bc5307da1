"""Aim: threads exchange chunks to the bit, and a deadline ends a wait without losing what comes late.

Method: a thread owns the residual route and echoes; the test asks.
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import ExitStack, contextmanager

import pytest

from common.wire import messages as m
from common.wire.routes import RESIDUAL
from services.runtime.bus import BlockingAsker, BlockingOwner
from services.runtime.endpoints import route_endpoint
from tests.services.runtime.bus.talk import WAIT_S, chunk


@contextmanager
def echo_of_rows(endpoint, **kwargs):
    """A thread that owns the residual route and sends every chunk's bytes back as its rows."""

    def serve():
        with BlockingOwner(RESIDUAL, endpoint, **kwargs) as owner:
            while (received := owner.recv(WAIT_S)) is not None and isinstance(received.message, m.RunChunk):
                (residual,) = received.frames
                done = m.ChunkDone(1, received.message.ticket, 0, 0.0, 0.0, 0.0, residual.nbytes)
                owner.send(done, residual, to=received.peer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        thread.join(WAIT_S)
        assert not thread.is_alive()


@pytest.mark.parametrize("hot_s", [0.0, 0.05])
@pytest.mark.parametrize("n_tokens", [0, 1, 256])
def test_chunks_go_out_and_home_to_the_bit(run_dir, hot_s, n_tokens):
    endpoint = route_endpoint(run_dir, RESIDUAL)
    with echo_of_rows(endpoint), BlockingAsker(RESIDUAL, endpoint) as asker:
        for ticket in range(4):
            message, residual = chunk(ticket, n_tokens, 2048)
            asker.send(message, residual, wait_s=WAIT_S)
            received = asker.recv(WAIT_S, hot_s=hot_s)
            assert received.message.ticket == ticket
            assert bytes(received.frames[0]) == residual.tobytes()
        asker.send(m.RewindMirror(1, 1, 0))


def test_a_deadline_returns_nothing_and_the_late_message_is_still_there(run_dir):
    endpoint = route_endpoint(run_dir, RESIDUAL)
    with BlockingOwner(RESIDUAL, endpoint) as owner, BlockingAsker(RESIDUAL, endpoint) as asker:
        assert asker.recv(0) is None
        assert asker.recv(0.02) is None
        assert asker.recv(0.02, hot_s=1.0) is None
        asker.send(m.RewindMirror(1, 1, 0), wait_s=WAIT_S)
        peer = owner.recv(WAIT_S).peer
        owner.send(m.MirrorAt(1, 1, 5), to=peer)
        assert asker.recv(WAIT_S).message.n_valid == 5


def test_an_asker_notices_that_its_owner_went_away_without_being_told(run_dir):
    endpoint = route_endpoint(run_dir, RESIDUAL)
    with BlockingAsker(RESIDUAL, endpoint) as asker:
        with BlockingOwner(RESIDUAL, endpoint) as owner:
            asker.send(m.RewindMirror(1, 1, 0), wait_s=WAIT_S)
            assert owner.recv(WAIT_S).message == m.RewindMirror(1, 1, 0)
            assert asker.losses() == 0
        give_up_at = time.monotonic() + WAIT_S
        while not asker.losses():
            assert time.monotonic() < give_up_at
        assert asker.losses() == 1 and asker.recv(0) is None


def test_a_thread_waits_for_its_route_and_other_sockets_at_once(run_dir):
    endpoint = route_endpoint(run_dir, RESIDUAL)
    with ExitStack() as stack:
        owner = stack.enter_context(BlockingOwner(RESIDUAL, endpoint))
        asker = stack.enter_context(BlockingAsker(RESIDUAL, endpoint))
        near, far = (stack.enter_context(end) for end in socket.socketpair())
        assert owner.wait(0, near) == []
        far.send(b"x")
        assert owner.wait(WAIT_S, near) == [near]
        asker.send(m.RewindMirror(1, 1, 0), wait_s=WAIT_S)
        while owner not in (ready := owner.wait(WAIT_S)):
            assert ready == []
        assert owner.recv(0).message == m.RewindMirror(1, 1, 0)
