"""No frames stop the ZeroMQ door; over tcp with keys nobody comes in who is not pinned; events tell what happens.

Method: the real gateway over real sockets (rig.py); damaged messages by hand and by hypothesis, from a client of plain
pyzmq and msgpack (foreign.py); the handshake's failure as ZeroMQ's own monitor tells it.
"""

from __future__ import annotations

from contextlib import contextmanager

import msgpack
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.wire import messages as m
from services.runtime.bus import new_key_pair
from services.runtime.endpoints import CurveKeys
from tests.services.gateway.foreign import WAIT_MS, ForeignClient, foreign_client, text_of
from tests.services.gateway.rig import N_CTX, Rig
from tests.services.gateway.test_server import fields, wild

pytestmark = pytest.mark.model


@pytest.fixture
def client(rig):
    with foreign_client(rig.listens["zmq"]) as client:
        yield client


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
