"""Aim: a peer that does not read loses its requests, is told so when it speaks again, and costs nobody else anything.

Method: a real route whose gateway's end is not read until its pipe is full; then boxes that run over, with everything
that is sent collected in a list.
"""

from __future__ import annotations

import asyncio

import pytest

from common.errors import ServiceError
from common.wire import messages as m
from common.wire.routes import GENERATE
from services.mac import outbox as outbox_module
from services.mac.outbox import NOT_READ, Outbox
from services.runtime.bus import Asker, Owner
from services.runtime.endpoints import route_endpoint

WAIT_S = 20.0
N_TOKENS = 8 * GENERATE.hwm
ENDED = m.Finished("r", "length", 1, N_TOKENS, m.ReadReport())


def token(index, name="r"):
    return m.TokenReady(name, index, 7)


def test_tokens_that_pile_up_before_a_slow_gateway_are_never_lost_in_silence(tmp_path):
    async def talk():
        run_dir = tmp_path / "run"
        run_dir.mkdir(mode=0o700)
        endpoint = route_endpoint(run_dir, GENERATE)
        lost = []

        def lose(peer, why):
            lost.append(why)
            return ["r"]

        async with Owner(GENERATE, endpoint) as owner, Asker(GENERATE, endpoint) as gateway:
            box = Outbox(lambda message, peer: owner.send(message, to=peer), lose)
            running = asyncio.create_task(box.run())
            await gateway.send(m.AskStatus(), wait_s=WAIT_S)
            peer = (await owner.receive()).peer
            for index in range(N_TOKENS):
                box.put(peer, token(index))
                await box.flush()
            box.put(peer, ENDED)
            await box.flush()
            assert len(lost) == 1 and "does not read" in lost[0]
            heard = [
                (await gateway.receive()).message for _ in range(GENERATE.hwm)
            ]  # now there is room again
            await gateway.send(m.AskStatus(), wait_s=WAIT_S)
            box.heard((await owner.receive()).peer)
            while not isinstance(heard[-1], m.Failed):
                try:
                    heard.append((await asyncio.wait_for(gateway.receive(), 1.0)).message)
                except TimeoutError:
                    box.heard(peer)  # it was full still: the gateway asks for the status every second
            running.cancel()
        *tokens, failed = heard
        assert [each.index for each in tokens] == list(range(len(tokens))) and len(tokens) < N_TOKENS
        assert failed == m.Failed("r", ServiceError.code, NOT_READ)

    asyncio.run(talk())


def test_a_box_that_runs_over_costs_the_peer_that_fills_it(monkeypatch):
    monkeypatch.setattr(outbox_module, "OUTBOX_MESSAGES_MAX", 8)

    async def talk():
        sent, lost = [], []

        async def send(message, peer):
            sent.append((peer, message))

        def lose(peer, why):
            lost.append((peer, why))
            return ["r"] if peer == b"greedy" else []

        box = Outbox(send, lose)
        box.put(b"modest", token(0, "mine"))
        for index in range(7):
            box.put(b"greedy", token(index))
        box.put(b"modest", token(1, "mine"))
        box.put(b"greedy", token(7))
        box.put(b"greedy", ENDED)
        running = asyncio.create_task(box.run())
        await box.flush()
        assert lost == [(b"greedy", "7 messages wait for it")]
        assert sent == [(b"modest", token(0, "mine")), (b"modest", token(1, "mine"))]
        box.heard(b"modest")
        box.heard(b"greedy")
        await box.flush()
        assert sent[2:] == [(b"greedy", m.Failed("r", ServiceError.code, NOT_READ))]
        box.put(b"greedy", token(0))
        await box.flush()
        assert sent[3:] == [(b"greedy", token(0))], "a later request of the same name is another one"
        running.cancel()

    asyncio.run(talk())


@pytest.mark.parametrize("n_peers", [5, 40])
def test_peers_that_never_speak_again_are_forgotten(n_peers):
    async def talk():
        sent = []

        async def send(message, peer):
            if gone:
                raise ServiceError("gone")
            sent.append((peer, message))

        gone = True
        box = Outbox(send, lambda _peer, _why: [])
        running = asyncio.create_task(box.run())
        peers = [b"%d" % number for number in range(n_peers)]
        for peer in peers:
            box.put(peer, ENDED)
        await box.flush()
        gone = False
        for peer in peers:
            box.heard(peer)
        await box.flush()
        assert len(sent) == min(n_peers, outbox_module.OWED_PEERS_MAX)
        running.cancel()

    asyncio.run(talk())
