"""Aim: messages cross the real sockets whole and in order, and what cannot cross is told, never dropped in silence.

Method: askers and owners over ipc and loopback tcp in one process; foreign peers are raw ZeroMQ sockets.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import numpy as np
import pytest
import zmq

from common.errors import LinkDownError, LocalProtocolError, ServiceError, SettingError
from common.wire import messages as m
from common.wire.routes import GENERATE, LIFE, RESIDUAL
from services.runtime.bus import Asker, BlockingAsker, BlockingOwner, Owner, new_key_pair
from services.runtime.endpoints import CurveKeys, route_endpoint

WAIT_S = 20.0
"""For what must happen: long, because a busy machine is no failure."""


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


async def until(condition):
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 (what is waited for happens inside ZeroMQ)
            await asyncio.sleep(0.005)


def chunk(ticket: int, n_tokens: int = 2, n_embd: int = 8) -> tuple[m.RunChunk, np.ndarray]:
    residual = np.random.default_rng(ticket).standard_normal((n_tokens, n_embd)).astype(np.float32)
    return m.RunChunk(1, ticket, 0, n_tokens, n_embd, 0), residual


def test_a_request_and_its_answers(run_dir):
    async def talk():
        endpoint = route_endpoint(run_dir, GENERATE)
        async with Owner(GENERATE, endpoint) as owner, Asker(GENERATE, endpoint) as asker:
            token_ids = np.arange(1000, dtype=np.int32)
            asked = m.Generate("r", 1000, 5, m.Sampling(), (2,), 60.0, 256)
            await asker.send(asked, token_ids)
            received = await owner.receive()
            assert received.message == asked
            assert np.array_equal(np.frombuffer(received.frames[0], np.int32), token_ids)
            for index in range(5):
                await owner.send(m.TokenReady("r", index, 7), to=received.peer)
            answers = []
            async for received in asker:
                answers.append(received.message.index)
                if len(answers) == 5:
                    break
            assert answers == [0, 1, 2, 3, 4]

    run(talk())


def test_a_cancelled_receive_loses_nothing(run_dir):
    async def talk():
        endpoint = route_endpoint(run_dir, LIFE)
        async with Owner(LIFE, endpoint) as launch, Asker(LIFE, endpoint, name="mac") as mac:
            got = []

            async def impatient():
                while len(got) < 200:
                    task = asyncio.create_task(launch.receive())
                    await asyncio.sleep(0)
                    if not task.done():
                        task.cancel()
                    try:
                        got.append((await task).message.work)
                    except asyncio.CancelledError:
                        await asyncio.sleep(0.001)

            reader = asyncio.create_task(impatient())
            for work in range(200):
                await mac.send(m.Beat("mac", 1, work))
            async with asyncio.timeout(WAIT_S):
                await reader
            assert got == list(range(200))
            assert not launch.conversation.dropped

    run(talk())


def test_many_tasks_may_send_at_once_without_a_gap(run_dir):
    async def talk():
        endpoint = route_endpoint(run_dir, LIFE)
        async with Owner(LIFE, endpoint) as launch, Asker(LIFE, endpoint, name="mac") as mac:
            await asyncio.gather(*(mac.send(m.Beat("mac", 1, work)) for work in range(300)))
            got = [(await launch.receive()).message.work for _ in range(300)]
            assert sorted(got) == list(range(300))
            assert not launch.conversation.dropped

    run(talk())


def test_an_owner_that_never_came_is_an_error_of_the_route(run_dir):
    async def talk():
        for route, error in ((GENERATE, ServiceError), (RESIDUAL, LinkDownError)):
            async with Asker(route, route_endpoint(run_dir, route)) as asker:
                message = m.AskStatus() if route is GENERATE else m.TakeSnapshot(1, 1, 0)
                with pytest.raises(error, match=f"route {route.name}: no connection to {route.owner}"):
                    await asker.send(message, wait_s=0.05)
                with pytest.raises(error, match=r"no connection to .* in 0.05 s"):
                    await asker.wait_connected(0.05)

    run(talk())


def test_a_task_that_cannot_wait_is_refused_while_another_waits_for_the_owner(run_dir):
    """pyzmq queues a send behind a task that polls for room: that must be an error now, not a send some day."""

    async def talk():
        endpoint = route_endpoint(run_dir, GENERATE)
        async with Asker(GENERATE, endpoint) as asker:
            waiting = asyncio.create_task(asker.send(m.Cancel("patient"), wait_s=WAIT_S))
            await asyncio.sleep(0.05)
            with pytest.raises(ServiceError, match="no connection"):
                await asker.send(m.Cancel("hasty"), wait_s=0)
            async with Owner(GENERATE, endpoint) as owner:
                assert (await owner.receive()).message == m.Cancel("patient")
                await waiting
                await asker.send(m.Cancel("later"))
                assert (await owner.receive()).message == m.Cancel("later")

    run(talk())


def test_an_asker_that_left_is_an_error_and_an_event(run_dir):
    async def talk():
        events = []
        endpoint = route_endpoint(run_dir, GENERATE)
        async with Owner(GENERATE, endpoint, on_event=events.append) as owner:
            async with Asker(GENERATE, endpoint) as asker:
                await asker.send(m.AskStatus())
                peer = (await owner.receive()).peer
            with pytest.raises(ServiceError, match="gateway is gone"):
                while True:
                    await owner.send(m.Queued("r", 0), to=peer)
                    await asyncio.sleep(0.01)
            assert events[-1].kind == "lost_peer"

    run(talk())


def test_a_restarted_owner_is_found_again_and_told(run_dir):
    async def talk():
        events = []
        endpoint = route_endpoint(run_dir, GENERATE)
        async with Asker(GENERATE, endpoint, on_event=events.append) as asker:
            for life in range(2):
                async with Owner(GENERATE, endpoint) as owner:
                    await asker.send(m.AskStatus(), wait_s=WAIT_S)
                    received = await owner.receive()
                    await owner.send(m.Queued("r", life), to=received.peer)
                    assert (await asker.receive()).message.ahead == life
                    assert asker.connected
                await until(lambda: not asker.connected)
        assert [event.kind for event in events] == ["joined", "lost_peer", "restarted", "lost_peer"]

    run(talk())


def test_a_newer_asker_of_the_same_name_takes_over(run_dir):
    async def talk():
        events = []
        endpoint = route_endpoint(run_dir, GENERATE)
        async with (
            Owner(GENERATE, endpoint, on_event=events.append) as owner,
            Asker(GENERATE, endpoint) as old,
            Asker(GENERATE, endpoint) as new,
        ):
            for asker in (old, new):
                await asker.send(m.AskStatus())
                await owner.receive()
            await old.send(m.AskStatus())
            await until(lambda: owner.conversation.dropped["stale"] == 1)
            await new.send(m.Cancel("r"))
            assert (await owner.receive()).message == m.Cancel("r")
        assert [event.kind for event in events] == ["joined", "restarted", "stale"]

    run(talk())


def test_a_peer_that_does_not_read_is_an_error_not_a_growing_queue(run_dir):
    narrow = replace(RESIDUAL, hwm=2)

    async def talk():
        endpoint = route_endpoint(run_dir, RESIDUAL)
        with BlockingAsker(narrow, endpoint) as asker:  # never calls recv
            async with Owner(narrow, endpoint) as owner:
                asker.send(m.TakeSnapshot(1, 1, 0), wait_s=WAIT_S)
                peer = (await owner.receive()).peer
                blob = bytes(1 << 20)
                with pytest.raises(LinkDownError, match="mac does not read; 2 messages wait for it"):
                    for ticket in range(100):
                        await owner.send(m.RowsPulled(1, ticket, len(blob)), blob, to=peer)

    run(talk())


def test_a_frame_over_the_bound_never_arrives_and_the_peer_is_cut_off(run_dir):
    strict = replace(RESIDUAL, frame_bytes_max=1000)
    events = []
    endpoint = route_endpoint(run_dir, RESIDUAL)
    with (
        BlockingOwner(strict, endpoint) as owner,
        BlockingAsker(RESIDUAL, endpoint, on_event=events.append) as asker,
    ):
        message, residual = chunk(1)
        asker.send(message, residual, wait_s=WAIT_S)
        assert owner.recv(WAIT_S).message == message
        message, residual = chunk(2, n_tokens=64)
        asker.send(message, residual)
        asker.recv(0.3)
        assert owner.recv(0) is None
        assert [event.kind for event in events] == ["lost_peer"]


def test_foreign_peers_are_counted_and_harm_nobody(run_dir):
    async def talk():
        events = []
        endpoint = route_endpoint(run_dir, GENERATE)
        async with (
            Owner(GENERATE, endpoint, on_event=events.append) as owner,
            Asker(GENERATE, endpoint) as asker,
        ):
            with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
                stranger.linger = 1000
                stranger.connect(endpoint)
                stranger.send_multipart([b"hello", b"world"])
                stranger.send(b"")
                await until(lambda: owner.conversation.dropped["foreign"] == 2)
            await asker.send(m.AskStatus())
            assert (await owner.receive()).message == m.AskStatus()

    run(talk())


def test_a_second_owner_is_refused(run_dir):
    endpoint = route_endpoint(run_dir, LIFE)
    with BlockingOwner(LIFE, endpoint), pytest.raises(ServiceError, match="another process already serves"):
        BlockingOwner(LIFE, endpoint)
    BlockingOwner(LIFE, endpoint).close()


def test_a_port_in_use_is_named():
    with BlockingOwner(LIFE, "tcp://127.0.0.1:0") as first:
        assert not first.endpoint.endswith(":0")
        with pytest.raises(ServiceError, match=r"cannot bind tcp://127.0.0.1:\d+"):
            BlockingOwner(LIFE, first.endpoint)


def test_an_unsayable_message_raises_and_sends_nothing(run_dir):
    async def talk():
        endpoint = route_endpoint(run_dir, GENERATE)
        async with Owner(GENERATE, endpoint) as owner, Asker(GENERATE, endpoint) as asker:
            with pytest.raises(LocalProtocolError):
                await asker.send(m.Queued("r", 0))
            await asker.send(m.AskStatus())
            assert (await owner.receive()).seq == 1

    run(talk())


def test_a_closed_channel_ends_its_readers(run_dir):
    async def talk():
        owner = Owner(GENERATE, route_endpoint(run_dir, GENERATE))
        reader = asyncio.create_task(anext_or_end(owner))
        await asyncio.sleep(0.01)
        await owner.close()
        assert await reader == "ended"
        with pytest.raises(ServiceError, match="closed"):
            await owner.receive()

    async def anext_or_end(channel):
        async for _ in channel:
            return "message"
        return "ended"

    run(talk())


# --- threads ----------------------------------------------------------------------------------------------------


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
        asker.send(m.TakeSnapshot(1, 1, 0))


def test_a_deadline_returns_nothing_and_the_late_message_is_still_there(run_dir):
    endpoint = route_endpoint(run_dir, RESIDUAL)
    with BlockingOwner(RESIDUAL, endpoint) as owner, BlockingAsker(RESIDUAL, endpoint) as asker:
        assert asker.recv(0) is None
        assert asker.recv(0.02) is None
        assert asker.recv(0.02, hot_s=1.0) is None
        asker.send(m.TakeSnapshot(1, 1, 0), wait_s=WAIT_S)
        peer = owner.recv(WAIT_S).peer
        owner.send(m.MirrorAt(1, 1, 5), to=peer)
        assert asker.recv(WAIT_S).message.n_valid == 5


def test_a_thread_waits_for_its_route_and_other_sockets_at_once(run_dir):
    endpoint = route_endpoint(run_dir, RESIDUAL)
    with ExitStack() as stack:
        owner = stack.enter_context(BlockingOwner(RESIDUAL, endpoint))
        asker = stack.enter_context(BlockingAsker(RESIDUAL, endpoint))
        near, far = (stack.enter_context(end) for end in socket.socketpair())
        assert owner.wait(0, near) == []
        far.send(b"x")
        assert owner.wait(WAIT_S, near) == [near]
        asker.send(m.TakeSnapshot(1, 1, 0), wait_s=WAIT_S)
        while owner not in (ready := owner.wait(WAIT_S)):
            assert ready == []
        assert owner.recv(0).message == m.TakeSnapshot(1, 1, 0)


# --- keys ----------------------------------------------------------------------------------------------------


def curve(own, *pinned):
    return CurveKeys(own[0], own[1], frozenset(key[0] for key in pinned))


def test_an_address_beyond_loopback_needs_keys():
    for endpoint in ("tcp://0.0.0.0:0", "tcp://192.0.2.1:9", "tcp://*:0", "tcp://some.host:9"):
        with pytest.raises(SettingError, match="needs CURVE keys"):
            BlockingOwner(LIFE, endpoint)
        with pytest.raises(SettingError, match="needs CURVE keys"):
            BlockingAsker(LIFE, endpoint, name="mac")


def test_pinned_keys_on_both_sides_let_messages_through():
    server, client = new_key_pair(), new_key_pair()

    async def talk():
        async with (
            Owner(GENERATE, "tcp://127.0.0.1:0", keys=curve(server, client)) as owner,
            Asker(GENERATE, owner.endpoint, keys=curve(client, server)) as asker,
        ):
            await asker.send(m.AskStatus(), wait_s=WAIT_S)
            received = await owner.receive()
            await owner.send(m.Queued("r", 3), to=received.peer)
            assert (await asker.receive()).message.ahead == 3

    run(talk())


@pytest.mark.parametrize(
    "wrong", ["client key not pinned", "server key not the pinned one", "no keys at all"]
)
def test_anybody_else_is_kept_out(wrong):
    server, client, stranger = new_key_pair(), new_key_pair(), new_key_pair()
    keys = {
        "client key not pinned": curve(stranger, server),
        "server key not the pinned one": curve(client, stranger),
        "no keys at all": None,
    }[wrong]

    async def talk():
        async with (
            Owner(GENERATE, "tcp://127.0.0.1:0", keys=curve(server, client)) as owner,
            Asker(GENERATE, owner.endpoint, keys=keys) as asker,
        ):
            with pytest.raises(ServiceError, match="no connection"):
                await asker.send(m.AskStatus(), wait_s=0.3)
            assert owner._queue.empty()

    run(talk())


def test_an_asker_pins_exactly_one_owner():
    own = new_key_pair()
    with pytest.raises(SettingError, match="an asker pins one key"):
        BlockingAsker(LIFE, "tcp://127.0.0.1:9", name="mac", keys=curve(own))


def test_secrets_are_not_printed():
    own = new_key_pair()
    assert own[1].decode() not in repr(curve(own, own))
