"""Aim: a channel admits only whom it should: one owner, bounded frames, holders of pinned keys.

Method: real sockets over ipc and loopback tcp, right and wrong keys.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.errors import ServiceError, SettingError
from common.wire import messages as m
from common.wire.routes import GENERATE, LIFE, RESIDUAL
from services.runtime.bus import Asker, BlockingAsker, BlockingOwner, Owner, new_key_pair
from services.runtime.endpoints import CurveKeys, route_endpoint
from tests.services.runtime.bus.talk import WAIT_S, chunk, run


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
