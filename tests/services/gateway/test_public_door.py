"""Both doors lead to the same trip: over ZeroMQ an answer, a refusal, a token id are what they are over HTTP.

Method: the real gateway over real sockets (rig.py), a client of plain pyzmq and msgpack (foreign.py), and the same
requests over HTTP to compare with.
"""

from __future__ import annotations

import asyncio

import msgpack
import pytest

from common.wire import messages as m
from tests.services.gateway.foreign import asked, endless, foreign_client, text_of, token_ids_of
from tests.services.gateway.rig import Rig, stay_silent
from tests.services.gateway.test_server import TEXTS

pytestmark = pytest.mark.model


@pytest.fixture
def client(rig):
    with foreign_client(rig.listens["zmq"]) as client:
        yield client


# --- one trip, two doors


@pytest.mark.parametrize("text", TEXTS)
def test_an_answer_is_the_same_as_over_http(rig, client, text):
    rig.say(text)
    client.ask("a", seed=5, credit=3, report=True)
    heard = client.answer("a")
    _, body = rig.request(
        "POST",
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "hi"}], "seed": 5},
        **{"X-Outrigger-Report": "1"},
    )
    end = heard[-1]
    assert heard[0]["type"] == "accepted" and heard[0]["seed"] == 5
    assert text_of(heard) == body["choices"][0]["message"]["content"] == text
    assert (end["reason"], end["usage"]) == (body["choices"][0]["finish_reason"], body["usage"])
    assert end["report"].keys() == body["outrigger"].keys()
    assert token_ids_of(heard) == rig.prompts.vocabulary.tokenize(text)
    first, second = asked(rig)
    assert first.sampling == second.sampling and first.max_tokens == second.max_tokens


def test_a_prompt_may_be_text_or_token_ids(rig, client):
    seen = []

    async def note(host, ask, ids, peer):
        seen.append(ids.tolist())
        await host.write(ask, peer, [])

    rig.host.behave = note
    client.ask("a", prompt="once upon")
    client.answer("a")
    client.ask("b", prompt=seen[0])
    client.answer("b")
    assert seen[0] == seen[1] and seen[0]


def test_stop_strings_never_leave_neither_as_text_nor_as_token_ids(rig, client):
    rig.say("one two three " * 40)
    client.ask("a", stop=["three"])
    heard = client.answer("a")
    assert (text_of(heard), heard[-1]["reason"]) == ("one two ", "stop")
    assert "three" not in b"".join(map(rig.prompts.vocabulary.piece, token_ids_of(heard))).decode()


def test_choices_and_log_probabilities_come_through(rig, client):
    async def behave(host, ask, ids, peer):
        for choice in range(2):
            told = m.TokenLogprobs(-0.5, ((65, -0.5),))
            await host.send(m.TokenReady(ask.request_id, 0, 65 + choice, choice, told), peer)
        await host.send(m.ChoiceFinished(ask.request_id, 1, "length", 1), peer)
        await host.send(m.Finished(ask.request_id, "stop", len(ids), 1, m.ReadReport(), 0), peer)

    rig.host.behave = behave
    client.ask("a", n=2, logprobs=True, top_logprobs=1)
    heard = client.answer("a")
    assert {each["choice"] for each in heard if each["type"] == "piece"} == {0, 1}
    assert [each["reason"] for each in heard if each["type"] == "choice_finished"] == ["length"]
    told = [entry for each in heard if each["type"] == "piece" for entry in each["logprobs"]]
    assert [entry["logprob"] for entry in told] == [-0.5, -0.5] and told[0].keys() >= {
        "token",
        "top_logprobs",
    }


@pytest.mark.parametrize(
    "body",
    [
        {"messages": []},
        {"prompt": "a", "temperature": 3},
        {"prompt": "a", "zzz": 1},
        {"prompt": "a", "best_of": 2},
        {"prompt": "word " * 600},
        {"prompt": [1, 99_999]},
        {"prompt": "a", "model": "gpt-4"},
    ],
    ids=["messages", "range", "unknown", "unbuilt", "long", "ids", "model"],
)
def test_a_refusal_says_what_http_says(rig, client, body):
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    status, over_http = rig.request("POST", path, body)
    client.say(type="generate", id="a", body=body)
    heard = client.hear()
    assert (heard["type"], heard["id"], heard["status"]) == ("error", "a", status)
    for ours, theirs in (("message", "message"), ("kind", "type"), ("code", "code"), ("param", "param")):
        assert heard[ours] == over_http["error"][theirs]
    assert heard["n_ctx"] == over_http["error"].get("n_ctx")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "body"),
        ({"messages": [{"role": "user", "content": "a"}], "prompt": "a"}, "body"),
        ({"prompt": "a", "stream": False}, "stream"),
        ({"prompt": "a", "stream_options": {}}, "stream_options"),
        ({"prompt": b"a"}, "body"),
        ({"prompt": "a", 5: 1}, "body"),
        ([1, 2], "body"),
        (msgpack.ExtType(5, b"x"), "body"),
    ],
)
def test_bodies_that_mean_nothing_over_zeromq_are_refused_by_name(client, body, param):
    client.say(type="generate", id="a", body=body)
    heard = client.hear()
    assert (heard["type"], heard["status"], heard["param"]) == ("error", 400, param)


def test_text_goes_to_token_ids_and_back_and_status_is_healths(rig, client):
    client.say(type="tokenize", id="1", body={"content": "four score"})
    tokens = client.hear()["tokens"]
    client.say(type="detokenize", id="2", body={"tokens": tokens})
    assert client.hear() == {"type": "content", "id": "2", "content": "four score"}
    client.say(type="status", id="3")
    assert client.hear()["state"] == rig.request("GET", "/health")[1]


def test_without_a_host_everything_that_needs_one_says_so(smollm2):
    with Rig(smollm2) as rig, foreign_client(rig.listens["zmq"]) as client:
        rig.do(rig.host.close())
        rig.until(lambda: rig.channel.why_not() is not None)
        client.say(type="status", id="1")
        assert (client.hear()["status"]) == 503
        client.ask("2")
        assert client.hear()["code"] == "service_unavailable"
        client.say(type="tokenize", id="3", body={"content": "a"})
        assert client.hear()["type"] == "tokens"


# --- credit, cancelling, ids


def test_tokens_come_by_credit_and_the_host_never_waits_for_it(rig, client):
    rig.say(" a" * 300)
    client.ask("a", credit=10)
    heard = client.hear_until("piece")
    while sum(each.get("n_tokens", 0) for each in heard) < 10:
        heard.append(client.hear())
    rig.until(lambda: len(rig.table) == 0)  # the host is done: nobody kept it waiting
    client.say(type="ping", id="p")
    assert client.hear() == {"type": "pong", "id": "p", "ids": ["a"], "lease_s": 60.0}
    client.say(type="grant", id="a", credit=50)
    more = client.hear()
    assert (more["type"], more["n_tokens"]) == ("piece", 50), "what waited comes as one message"
    client.say(type="grant", id="a", credit=1000)
    rest = client.hear_until("finished")
    assert text_of([*heard, more, *rest]) == " a" * 300


def test_cancelling_ends_one_request_and_its_id_is_free_again(rig, client):
    rig.host.behave = endless({})
    client.ask("a")
    client.hear_until("piece")
    client.ask("b")
    client.hear_until("accepted", ask_id="b")
    client.say(type="cancel", id="a")
    client.hear_until("cancelled", ask_id="a")
    first, second = (ask.request_id for ask in asked(rig))
    rig.until(lambda: rig.host.cancelled(first))
    assert not rig.host.cancelled(second)
    client.ask("a")
    client.hear_until("accepted", ask_id="a")
    client.say(type="cancel", id="nobody")  # late, not wrong
    for ask_id in "ab":
        client.say(type="cancel", id=ask_id)
        client.hear_until("cancelled", ask_id=ask_id)
    rig.until(lambda: len(rig.table) == 0)


def test_an_id_in_use_is_refused_and_its_request_goes_on(rig, client):
    rig.host.behave = stay_silent
    client.ask("a")
    client.hear_until("queued")
    client.ask("a")
    heard = client.hear()
    assert (heard["id"], heard["code"], heard["param"]) == ("", "duplicate_id", "id")
    client.say(type="cancel", id="a")
    assert client.hear()["type"] == "cancelled"


def test_progress_is_told(rig, client):
    async def behave(host, ask, ids, peer):
        await host.send(m.Queued(ask.request_id, 2), peer)
        await asyncio.sleep(0.05)
        await host.send(m.PrefillAdvanced(ask.request_id, 256, 512), peer)
        await asyncio.sleep(0.05)
        await host.write(ask, peer, [])

    rig.host.behave = behave
    client.ask("a")
    heard = client.answer("a")
    assert [each["type"] for each in heard] == ["accepted", "queued", "reading", "finished"]
    assert (heard[1]["ahead"], heard[2]["tokens_done"], heard[2]["tokens_total"]) == (2, 256, 512)
