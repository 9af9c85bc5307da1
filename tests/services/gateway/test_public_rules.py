"""Over ZeroMQ nobody who is slow, gone or too many disturbs anybody else, and everybody is told what became of it.

Method: the real gateway over real sockets (rig.py), clients of plain pyzmq and msgpack (foreign.py) that flood, never
read, fall silent, take nothing, or are killed for real.
"""

from __future__ import annotations

import signal
import subprocess
import sys

import msgpack
import pytest

from common.limits import PUBLIC_REPLIES_MAX
from common.wire import messages as m
from services.gateway.public_door import Manners
from tests.services.gateway.foreign import asked, endless, foreign_client, text_of
from tests.services.gateway.rig import Rig, stay_silent

pytestmark = pytest.mark.model


@pytest.fixture
def client(rig):
    with foreign_client(rig.listens["zmq"]) as client:
        yield client


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


@pytest.mark.parametrize(
    ("credit", "tokens_max"), [(1, 3), (100_000, None)], ids=["nothing to send", "in full flow"]
)
def test_a_client_killed_in_the_middle_of_a_stream_is_cancelled_and_no_other(rig, client, credit, tokens_max):
    rig.host.behave = endless({}, tokens_max)
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
    client.say(type="ping", id="p")
    assert client.hear_until("pong")[-1]["ids"] == ["a"]
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
