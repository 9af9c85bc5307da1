"""Both doors lead to the same trip, and over ZeroMQ nobody who is slow, gone or rude disturbs anybody else.

Method: the real gateway over real sockets (rig.py), clients of plain pyzmq and msgpack (foreign.py), OpenAI's shapes of
the same requests over HTTP to compare with, a client killed for real, and frames from hypothesis.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from contextlib import contextmanager

import msgpack
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.limits import PUBLIC_REPLIES_MAX
from common.wire import messages as m
from services.gateway.public_door import Manners
from services.runtime.bus import new_key_pair
from services.runtime.endpoints import CurveKeys
from tests.services.gateway.foreign import WAIT_MS, ForeignClient, foreign_client, text_of, token_ids_of
from tests.services.gateway.rig import N_CTX, Rig, stay_silent
from tests.services.gateway.test_server import TEXTS, fields, wild

pytestmark = pytest.mark.model


@pytest.fixture
def client(rig):
    with foreign_client(rig.listens["zmq"]) as client:
        yield client


def endless(ids_sent: dict[str, int]):
    """A host that writes until it is cancelled, within its credit; counts what it sent."""

    async def behave(host, ask, ids, peer):
        sent = 0
        while not host.cancelled(ask.request_id):
            if sent < host.n_granted[ask.request_id]:
                await host.send(m.TokenReady(ask.request_id, sent, int(ids[-1])), peer)
                sent += 1
                ids_sent[ask.request_id] = sent
            await asyncio.sleep(0.001)
        await host.send(m.Finished(ask.request_id, "cancelled", len(ids), sent, m.ReadReport()), peer)

    return behave


def asked(rig) -> list[m.Generate]:
    return [message for message in rig.host.told if isinstance(message, m.Generate)]


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


# --- slow, gone, too many


def test_a_burst_of_a_thousand_is_answered_one_by_one_and_others_are_served_meanwhile(rig):
    rig.say("hello")
    with foreign_client(rig.listens["zmq"]) as burst, foreign_client(rig.listens["zmq"]) as other:
        for number in range(1000):
            burst.ask(str(number))
        other.say(type="tokenize", id="t", body={"content": "a"})
        assert other.hear()["type"] == "tokens"
        ends: dict[str, str] = {}
        while len(ends) < 1000:
            heard = burst.hear()
            if heard["type"] in ("finished", "error"):
                assert heard["id"] not in ends, "ended twice"
                ends[heard["id"]] = heard.get("reason") or heard["code"]
        assert set(ends.values()) <= {"stop", "server_busy"} and "stop" in ends.values()
        other.ask("a")
        assert text_of(other.answer("a")) == "hello"
        burst.ask("again")
        assert text_of(burst.answer("again")) == "hello"
    rig.until(lambda: len(rig.table) == 0)


def test_a_client_that_never_reads_is_cut_and_told_so_when_it_reads_again(rig):
    """Over ipc, whose buffers are small; with streams whose tokens it has credit for, and with replies."""
    rig.say(" a" * 400)
    unread = rig.metric("outrigger_zmq_dropped_total", reason="unread")
    with (
        foreign_client(rig.listens["zmq_ipc"], rcvhwm=1) as deaf,
        foreign_client(rig.listens["zmq"]) as other,
    ):
        for number in range(20):
            deaf.ask(str(number), credit=100_000)
        rig.until(
            lambda: len(asked(rig)) == 20 and len(rig.table) == 0
        )  # it never reads; the host is done all the same
        other.ask("a")
        assert text_of(other.answer("a")) == " a" * 400
        junk = [b"OTR1", msgpack.packb({"type": "ping", "id": "", "junk": "x" * 60})]
        for _ in range(4 * PUBLIC_REPLIES_MAX):
            deaf.socket.send_multipart(junk)
        rig.until(
            lambda: rig.metric("outrigger_zmq_dropped_total", reason="unread") > unread + PUBLIC_REPLIES_MAX
        )
        other.ask("b")
        assert text_of(other.answer("b")) == " a" * 400
        lost = deaf.hear_until("lost")[-1]
        assert lost["n_messages"] > PUBLIC_REPLIES_MAX
        deaf.say(type="ping", id="p")
        assert deaf.hear_until("pong")[-1]["ids"] == []
        deaf.ask("anew")
        assert text_of(deaf.answer("anew")) == " a" * 400


VICTIM = """
import sys, msgpack, zmq
socket = zmq.Context().socket(zmq.DEALER)
socket.connect(sys.argv[1])
ask = {"type": "generate", "id": "v", "credit": int(sys.argv[2]), "body": {"prompt": "hi"}}
socket.send_multipart([b"OTR1", msgpack.packb(ask)])
while True:
    if msgpack.unpackb(socket.recv_multipart()[1])["type"] == "piece":
        print("streaming", flush=True)
"""


@pytest.mark.parametrize("credit", [1, 100_000], ids=["without credit", "in full flow"])
def test_a_client_killed_in_the_middle_of_a_stream_is_cancelled_and_no_other(rig, client, credit):
    rig.host.behave = endless({})
    client.ask("a")
    client.hear_until("piece")
    victim = subprocess.Popen(
        [sys.executable, "-c", VICTIM, rig.listens["zmq"], str(credit)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert victim.stdout.readline() == "streaming\n"
        mine, theirs = (ask.request_id for ask in asked(rig))
        victim.send_signal(signal.SIGKILL)
        rig.until(lambda: rig.host.cancelled(theirs))
    finally:
        victim.kill()
        victim.wait()
        victim.stdout.close()
    assert not rig.host.cancelled(mine)
    client.say(type="grant", id="a", credit=1000)
    client.hear_until("piece")
    client.say(type="cancel", id="a")
    client.hear_until("cancelled")


@pytest.fixture(scope="module")
def strict_rig(smollm2):
    """Short patience: half a second without a word, or without taking anything, is too long."""
    with Rig(smollm2, manners=Manners(lease_s=1.0, stall_s=0.4, tokens_waiting_max=40)) as rig:
        yield rig


def test_a_silent_client_loses_its_lease_and_one_that_pings_does_not(strict_rig):
    rig = strict_rig
    rig.host.behave = stay_silent
    rig.host.told.clear()
    with foreign_client(rig.listens["zmq"]) as silent, foreign_client(rig.listens["zmq"]) as lively:
        lively.ask("l")
        lively.hear_until("queued")
        silent.ask("s")
        silent.hear_until("queued")
        loud, quiet = (ask.request_id for ask in asked(rig))
        while not rig.host.cancelled(quiet):
            lively.say(type="ping", id="p")
            assert lively.hear()["ids"] == ["l"]
        heard = silent.hear()
        assert (heard["type"], heard["id"], heard["code"]) == ("error", "s", "lease_over")
        assert not rig.host.cancelled(loud)
        silent.say(type="ping", id="p")
        assert silent.hear()["ids"] == []


def test_an_answer_that_nobody_takes_ends_and_says_how_much_was_dropped(strict_rig):
    rig = strict_rig
    rig.say(" a" * 30)
    with foreign_client(rig.listens["zmq"]) as client:
        client.ask("a", credit=10)
        n_heard, heard = 0, client.hear()
        while heard["type"] != "error":
            n_heard += heard.get("n_tokens", 0)
            client.say(type="ping", id="p")  # it lives, and takes nothing
            heard = client.hear_until("piece", "error", "pong")[-1]
        assert n_heard == 10 and heard["code"] == "slow_client"
        assert "; 20 tokens were dropped" in heard["message"]


def test_an_answer_that_outgrows_what_may_wait_ends_after_what_was_kept(strict_rig):
    rig = strict_rig
    sent: dict[str, int] = {}
    rig.host.behave = endless(sent)
    rig.host.told.clear()
    with foreign_client(rig.listens["zmq"]) as client:
        client.ask("a", credit=1)
        (ask,) = _first(rig)
        rig.until(lambda: rig.host.cancelled(ask.request_id))
        client.say(type="grant", id="a", credit=1000)
        heard = client.hear_until("error")
        assert heard[-1]["code"] == "slow_client" and "more than 40 tokens wait" in heard[-1]["message"]
        n_heard = sum(each.get("n_tokens", 0) for each in heard)
        assert n_heard >= 41 and text_of(heard)


def _first(rig) -> list[m.Generate]:
    rig.until(lambda: len(asked(rig)) == 1)
    return asked(rig)


# --- frames


@pytest.mark.parametrize(
    ("frames", "ask_id", "words"),
    [
        ([b"OTR1"], "", "1 frames; a message has 2"),
        ([b"OTR2", b"\x80"], "", "frame 1 is b'OTR2'"),
        ([b"OTR1", b"\x80", b""], "", "3 frames"),
        ([b"OTR1", b""], "", "truncated"),
        ([b"OTR1", b"\xc1"], "", "frame 2"),
        ([b"OTR1", msgpack.packb([1])], "", "Expected `object`"),
        ([b"OTR1", msgpack.packb({"type": "sing", "id": "a"})], "a", "'sing'"),
        ([b"OTR1", msgpack.packb({"type": "ping"})], "", "missing required field `id`"),
        ([b"OTR1", msgpack.packb({"type": "ping", "id": "x" * 65})], "", "length <= 64"),
        ([b"OTR1", msgpack.packb({"type": "grant", "id": "a", "credit": 0})], "a", "$.credit"),
        ([b"OTR1", msgpack.packb({"type": "ping", "id": "a", "more": 1})], "a", "unknown field `more`"),
        ([b"OTR1", b"\x82\xa4type\xa4ping\xa2id\xdd\xff\xff\xff\xff"], "", "frame 2"),
        ([b"OTR1", b"\x91" * 100_000], "", "frame 2"),
    ],
)
def test_a_message_that_cannot_be_read_is_answered(rig, client, frames, ask_id, words):
    before = rig.metric("outrigger_zmq_dropped_total", reason="malformed")
    client.socket.send_multipart(frames)
    heard = client.hear()
    assert (heard["type"], heard["code"], heard["status"], heard["id"]) == ("error", "malformed", 400, ask_id)
    assert words in heard["message"]
    assert rig.metric("outrigger_zmq_dropped_total", reason="malformed") == before + 1


def test_a_frame_over_the_bound_closes_the_connection_unread(rig, client):
    client.socket.send_multipart([b"OTR1", bytes((17 << 20) + 1)])
    client.say(type="ping", id="p")  # on a new connection: the old one is closed with what was on it
    with foreign_client(rig.listens["zmq"]) as other:
        other.say(type="ping", id="q")
        assert other.hear()["id"] == "q"


def packed(value) -> bytes:
    """msgpack, which ends at 64 bits where hypothesis does not."""
    try:
        return msgpack.packb(value)
    except OverflowError:
        return b"\xc1"


names = st.sampled_from(["type", "id", "body", "credit", "report", "content", "tokens", "zzz"]) | fields
types = st.sampled_from(["generate", "grant", "cancel", "tokenize", "detokenize", "status", "ping", "sing"])
maps = st.dictionaries(names, wild | st.binary(max_size=4), max_size=5)
plausible = st.fixed_dictionaries(
    {"type": types, "id": st.sampled_from(["a", "b", ""])},
    optional={"body": maps, "credit": st.integers(-1, 9)},
)
frame = st.binary(max_size=40) | st.just(b"OTR1") | (maps | plausible).map(packed)
message = st.lists(frame, min_size=1, max_size=4) | plausible.map(lambda value: [b"OTR1", packed(value)])


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(frames=st.lists(message, min_size=1, max_size=4))
def test_no_frames_stop_the_door(shared_rig, fuzzing_client, frames):
    """Whatever is sent, the next ping is answered, and everything heard has a type."""
    for each in frames:
        fuzzing_client.socket.send_multipart(each)
    fuzzing_client.say(type="ping", id="after")
    heard = fuzzing_client.hear_until("pong", ask_id="after")
    assert all(each["type"] for each in heard)
    assert not any(each["type"] == "error" and each["status"] == 500 for each in heard)


@pytest.fixture(scope="module")
def fuzzing_client(shared_rig):
    with foreign_client(shared_rig.listens["zmq"]) as client:
        yield client
        shared_rig.say("still here")
        client.ask("end")
        assert text_of(client.answer("end")) == "still here"


# --- keys and events


def test_over_tcp_with_keys_only_pinned_clients_come_in(smollm2):
    ours, theirs, strangers = new_key_pair(), new_key_pair(), new_key_pair()
    with Rig(smollm2, keys=CurveKeys(*ours, frozenset({theirs[0]}))) as rig:
        endpoint = rig.listens["zmq"]
        with _curve_client(endpoint, ours[0], theirs) as (client, _):
            client.say(type="ping", id="p")
            assert client.hear()["type"] == "pong"
        with _curve_client(endpoint, ours[0], strangers) as (_, monitor):
            assert monitor.poll(WAIT_MS), "no word of the handshake"
            assert (
                int.from_bytes(monitor.recv_multipart()[0][:2], "little") == zmq.EVENT_HANDSHAKE_FAILED_AUTH
            )
        with foreign_client(rig.listens["zmq_ipc"]) as client:
            client.say(type="ping", id="p")
            assert client.hear()["type"] == "pong"


@contextmanager
def _curve_client(endpoint, server_public, pair):
    """A client with keys, and what the monitor tells of its handshake's failure."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.curve_publickey, socket.curve_secretkey = pair
    socket.curve_serverkey = server_public
    monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
    socket.connect(endpoint)
    try:
        yield ForeignClient(socket), monitor
    finally:
        socket.disable_monitor()
        monitor.close()
        socket.close()
        context.term()


def test_events_tell_requests_of_both_doors_and_the_workers_coming_and_going(rig, client):
    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.linger = 0
    try:
        socket.subscribe(b"")
        socket.connect(rig.listens["zmq_events"])

        def event():
            assert socket.poll(WAIT_MS)
            topic, version, body = socket.recv_multipart()
            told = msgpack.unpackb(body)
            assert (topic.decode(), version) == (told["type"], b"OTR1")
            return told

        hello = event()
        assert (hello["type"], hello["state"], hello["worker"]) == ("status", "ready", "absent")
        rig.say("hi")
        client.ask("a")
        accepted = client.answer("a")[0]
        started, ended = event(), event()
        assert started["request_id"] == ended["request_id"] == accepted["request_id"]
        assert (started["type"], started["n_prompt"]) == ("request.started", accepted["n_prompt"])
        assert (ended["type"], ended["outcome"]) == ("request.ended", "stop")
        assert rig.chat()[0] == 200
        again = event()
        assert (again["type"], again["seq"]) == ("request.started", started["seq"] + 1)
        assert event()["type"] == "request.ended"
        for state, kind in (("ready", "worker.up"), ("resting", "worker.down")):
            view = m.WorkerView(state, "it said so", 20, "a phone")
            status = m.HostStatus("ready", "test", N_CTX, rig.host.n_vocab, 0, 0, view, 1)
            rig.run(lambda status=status: rig.events.status(status))
            told = [event(), event()]
            assert [each["type"] for each in told] == [kind, "status"]
            assert told[1]["worker"] == state
    finally:
        socket.close()
        context.term()
