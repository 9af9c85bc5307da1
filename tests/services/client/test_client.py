"""Aim: both clients give what the gateway says as typed values, or raise; nothing they are asked hangs.

Method: the real gateway over real sockets (the gateway's rig), whose host does what each test wants.
"""

from __future__ import annotations

import asyncio

import pytest

from common.errors import (
    BusyError,
    ContextExceededError,
    RequestError,
    ServiceError,
    SettingError,
    UnsupportedParameterError,
)
from common.wire import messages as m
from common.wire import public as p
from services.client import AsyncOutriggerClient, OutriggerClient, Queued, ReadingPrompt
from services.gateway.public_door import Manners
from tests.services.gateway.rig import N_CTX, Rig, stay_silent

pytestmark = pytest.mark.model

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(rig):
    with OutriggerClient(rig.listens["zmq"], events_endpoint=rig.listens["zmq_events"]) as client:
        yield client


def asked(rig) -> list[m.Generate]:
    return [message for message in rig.host.told if isinstance(message, m.Generate)]


def test_an_answer_comes_as_text_as_pieces_and_as_token_ids(rig, client):
    text = "Příliš žluťoučký 👍🏽 kůň " * 10
    rig.say(text)
    with client.generate(messages=HI, credit=8, report=True, temperature=0) as answer:
        assert "".join(answer.texts()) == text
    assert answer.finished.reason == "stop" and answer.finished.report["tokens_host"] > 0
    assert answer.accepted.n_prompt == answer.finished.usage["prompt_tokens"]
    with client.generate(prompt="hi") as answer:
        token_ids = list(answer.token_ids())
    assert token_ids == rig.prompts.vocabulary.tokenize(text)
    with client.generate(prompt=token_ids[:5]) as answer:
        assert "".join(piece.text for piece in answer) == answer.text() + text


def test_what_else_can_be_asked(rig, client):
    assert client.detokenize(client.tokenize("four score")) == "four score"
    state = client.status()
    assert (state.status, state.model, state.n_ctx) == ("ok", rig.prompts.model_name, N_CTX)
    assert state.worker.state == "absent"


def test_progress_is_told_before_the_first_piece(rig, client):
    async def behave(host, ask, ids, peer):
        await host.send(m.Queued(ask.request_id, 1), peer)
        await asyncio.sleep(0.05)
        await host.send(m.PrefillAdvanced(ask.request_id, 256, 512), peer)
        await asyncio.sleep(0.05)
        await host.write(ask, peer, [65])

    rig.host.behave = behave
    with client.generate(messages=HI) as answer:
        updates = list(answer.updates())
    assert [type(update) for update in updates[1:3]] == [Queued, ReadingPrompt]
    assert isinstance(updates[-1], p.Finished)


@pytest.mark.parametrize(
    ("asking", "kind", "words"),
    [
        ({"prompt": "word " * 600}, ContextExceededError, f"the context holds {N_CTX}"),
        ({"prompt": "a", "zzz": 1}, UnsupportedParameterError, "zzz"),
        ({"prompt": "a", "temperature": 9}, RequestError, "from 0 to 2, not 9"),
        ({"prompt": "a", "messages": HI}, RequestError, "either messages or prompt"),
        ({}, RequestError, "either messages or prompt"),
    ],
)
def test_a_refusal_is_an_exception_of_our_tree(client, asking, kind, words):
    with pytest.raises(kind, match=words), client.generate(**asking) as answer:
        answer.text()


def test_a_full_queue_and_a_broken_host_are_exceptions_too(rig, client):
    async def refuse(host, ask, ids, peer):
        code = 103 if ask.max_tokens == 1 else 400
        await host.send(m.Failed(ask.request_id, code, "so it is"), peer)

    rig.host.behave = refuse
    for n_tokens, kind in ((1, BusyError), (2, ServiceError)):
        with (
            pytest.raises(kind, match="so it is"),
            client.generate(prompt="a", max_tokens=n_tokens) as answer,
        ):
            answer.text()


def test_leaving_an_answer_cancels_it_and_no_other(rig, client):
    rig.host.behave = stay_silent
    with client.generate(prompt="a") as stays:
        assert isinstance(next(stays.updates()), p.Accepted)
        with client.generate(prompt="b") as leaves:
            next(leaves.updates())
        first, second = (ask.request_id for ask in asked(rig))
        rig.until(lambda: rig.host.cancelled(second))
        assert not rig.host.cancelled(first)
    rig.until(lambda: len(rig.table) == 0)


def test_an_answer_is_asked_for_by_its_block(client):
    with pytest.raises(ServiceError, match="with"):
        client.generate(prompt="a").text()


def test_a_gateway_that_goes_ends_every_answer_with_an_exception(smollm2):
    with Rig(smollm2) as rig:
        rig.host.behave = stay_silent
        client = OutriggerClient(rig.listens["zmq"])
        generation = client.generate(prompt="a")
        generation.__enter__()
        updates = generation.updates()
        next(updates)
    with pytest.raises(ServiceError):
        list(updates)
    generation.__exit__()
    client.close()
    with pytest.raises(ServiceError, match="closed"):
        client.status()


def test_a_client_keeps_its_lease_while_its_caller_thinks(smollm2):
    with Rig(smollm2, manners=Manners(lease_s=1.0, stall_s=60.0)) as rig:
        rig.host.behave = stay_silent
        with OutriggerClient(rig.listens["zmq"]) as client, client.generate(prompt="a") as answer:
            next(answer.updates())
            rig.do(asyncio.sleep(1.6))
            assert not rig.host.cancelled(asked(rig)[0].request_id)


def test_endpoints_beyond_this_machine_need_keys():
    with pytest.raises(SettingError, match="CURVE"):
        OutriggerClient("tcp://192.0.2.1:5570")


def test_nobody_at_the_endpoint_is_told(tmp_path):
    tmp_path.chmod(0o700)
    with (
        OutriggerClient(f"ipc://{tmp_path}/none.sock") as client,
        pytest.raises(ServiceError, match="does the gateway"),
    ):
        client.status()


def test_events_arrive_typed(rig, client):
    with client.events("request.", "status") as events:
        assert next(events).state == "ready"
        with client.generate(prompt="a") as answer:
            answer.text()
        of_requests = (event for event in events if not isinstance(event, p.StatusChanged))
        started, ended = next(of_requests), next(of_requests)
    assert isinstance(started, p.RequestStarted) and isinstance(ended, p.RequestEnded)
    assert started.request_id == ended.request_id == answer.accepted.request_id


def test_the_asyncio_client_serves_many_at_once(rig):
    rig.say("hello there " * 30)

    async def one(client: AsyncOutriggerClient, number: int) -> str:
        async with client.generate(prompt=f"{number}", credit=5) as answer:
            return await answer.text()

    async def all_of_them() -> list[str]:
        async with AsyncOutriggerClient(rig.listens["zmq_ipc"]) as client:
            assert (await client.status()).status == "ok"
            return await asyncio.gather(*(one(client, number) for number in range(20)))

    assert asyncio.run(all_of_them()) == ["hello there " * 30] * 20


def test_an_asyncio_task_that_is_cancelled_cancels_its_answer(rig):
    rig.host.behave = stay_silent

    async def main() -> None:
        async with AsyncOutriggerClient(rig.listens["zmq"]) as client:

            async def listen() -> None:
                async with client.generate(prompt="a") as answer:
                    await answer.text()

            task = asyncio.ensure_future(listen())
            while not asked(rig):  # noqa: ASYNC110 (the rig is on another thread)
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while not rig.host.cancelled(asked(rig)[0].request_id):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    asyncio.run(main())
