"""Between client and host nothing hangs: who leaves is cancelled, who is lost is told, what waits says so.

Method: the real gateway over real sockets (rig.py); the host's end of the bus dies, stalls or overfills on purpose.
"""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from common.wire import messages as m
from tests.services.gateway.rig import WAIT_S, Rig, chat_body, events, stay_silent

pytestmark = pytest.mark.model


def asked(rig) -> list[m.Generate]:
    return [message for message in rig.host.told if isinstance(message, m.Generate)]


def open_chat(rig, **fields) -> socket.socket:
    """A client that sent its request and reads nothing yet."""
    body = json.dumps(chat_body(**fields)).encode()
    raw = socket.create_connection(("127.0.0.1", rig.port), timeout=WAIT_S)
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    raw.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return raw


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_cancels_its_request_and_no_other(rig, stream):
    rig.host.behave = stay_silent
    stays, leaves = open_chat(rig, stream=stream), None
    rig.until(lambda: len(asked(rig)) == 1)
    leaves = open_chat(rig, stream=stream)
    rig.until(lambda: len(asked(rig)) == 2)
    first, second = (ask.request_id for ask in asked(rig))
    leaves.close()
    rig.until(lambda: rig.host.cancelled(second))
    assert not rig.host.cancelled(first)
    assert rig.request("GET", "/health")[0] == 200
    stays.close()
    rig.until(lambda: rig.host.cancelled(first) and len(rig.table) == 0)


def test_a_client_that_leaves_in_the_middle_of_a_stream_cancels_it(rig):
    async def write_until_cancelled(host, ask, ids, peer):
        index = 0
        while not host.cancelled(ask.request_id):
            await host.send(m.TokenReady(ask.request_id, index, int(ids[-1])), peer)
            index += 1
            await asyncio.sleep(0.005)
        await host.send(m.Finished(ask.request_id, "cancelled", len(ids), index, m.ReadReport()), peer)

    rig.host.behave = write_until_cancelled
    raw = open_chat(rig, stream=True)
    assert b"200 OK" in raw.recv(4096)
    raw.close()
    rig.until(lambda: rig.host.cancelled(asked(rig)[0].request_id) and len(rig.table) == 0)


def test_long_waits_are_told_in_comments(rig):
    async def behave(host, ask, ids, peer):
        await host.send(m.Queued(ask.request_id, 3), peer)
        await asyncio.sleep(0.45)
        for n_done in (256, 512):
            await host.send(m.PrefillAdvanced(ask.request_id, n_done, 2048), peer)
            await asyncio.sleep(0.25)
        await host.write(ask, peer, [])

    rig.host.behave = behave
    with rig.connection() as connection:
        connection.request(
            "POST",
            "/v1/chat/completions",
            json.dumps(chat_body(stream=True)),
            {"Content-Type": "application/json"},
        )
        found, comments = events(connection.getresponse())
    assert found[-1] == "[DONE]"
    assert "waiting, 3 requests come first" in comments
    assert any(comment.startswith("read ") and " of 2048 tokens in" in comment for comment in comments)


def test_a_dead_host_ends_streams_with_an_event_and_a_new_one_serves_again(smollm2):
    with Rig(smollm2) as rig:
        rig.host.behave = stay_silent
        with rig.connection() as connection:
            connection.request(
                "POST",
                "/v1/chat/completions",
                json.dumps(chat_body(stream=True)),
                {"Content-Type": "application/json"},
            )
            response = connection.getresponse()
            assert response.status == 200
            rig.do(rig.host.close())
            found, _ = events(response)
        assert "the host process was lost" in found[-1]["error"]["message"]
        assert (found[-1]["error"]["type"], found[-1]["error"]["code"]) == (
            "server_error",
            "service_unavailable",
        )

        status, health = rig.request("GET", "/health")
        assert status == 503 and health["reason"] == "the host process does not answer"
        status, refused = rig.chat()
        assert status == 503 and "the host process does not answer" in refused["error"]["message"]

        rig.say("back again")
        rig.do(rig.host.open())
        rig.until(lambda: rig.request("GET", "/health")[0] == 200)
        status, answer = rig.chat()
        assert status == 200 and answer["choices"][0]["message"]["content"] == "back again"


def test_health_tells_a_stuck_compute_thread_and_a_host_that_is_not_ready(smollm2):
    with Rig(smollm2, beat_s_max=1.5) as rig:
        rig.host.beats = False
        rig.until(lambda: rig.request("GET", "/health")[0] == 503)
        assert "compute thread has not taken a turn" in rig.request("GET", "/health")[1]["reason"]
        rig.host.beats = True
        rig.until(lambda: rig.request("GET", "/health")[0] == 200)
        rig.host.state = "draining"
        rig.until(lambda: rig.request("GET", "/health")[0] == 503)
        assert rig.request("GET", "/health")[1]["reason"] == "the host process is stopping"


def test_a_full_queue_answers_429_and_empties_again(smollm2):
    with Rig(smollm2, waiting_max=1) as rig:
        rig.host.behave = stay_silent
        clients = [open_chat(rig), open_chat(rig)]
        rig.until(lambda: len(asked(rig)) == 2)
        status, body = rig.chat()
        assert status == 429 and body["error"]["type"] == "rate_limit_error"
        for client in clients:
            client.close()
        rig.until(lambda: len(rig.table) == 0)
        rig.say("room")
        assert rig.chat()[0] == 200
        assert rig.metric("outrigger_requests_total", outcome="busy") == 1
        assert rig.metric("outrigger_requests_total", outcome="cancelled") == 2


def test_a_key_is_required_when_one_is_set(smollm2):
    with Rig(smollm2, api_key="sésame") as rig:
        rig.say("open")
        assert rig.request("GET", "/health")[0] == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "sésame"}):
            status, body = rig.request("GET", "/v1/models", **_encoded(headers))
            assert (status, body["error"]["code"]) == (401, "invalid_api_key")
        good = _encoded({"Authorization": "Bearer sésame", "Host": "my-mac.example"})
        assert rig.request("GET", "/v1/models", **good)[0] == 200


def _encoded(headers: dict[str, str]) -> dict[str, str]:
    """http.client speaks Latin-1; a key travels as UTF-8 bytes."""
    return {name: value.encode().decode("latin-1") for name, value in headers.items()}


def test_a_request_is_timed_and_counted(smollm2):
    with Rig(smollm2) as rig:
        rig.say("one two three")
        assert rig.chat()[0] == 200
        assert rig.chat(max_tokens=1)[0] == 200
        assert rig.chat(temperature=9)[0] == 400
        for outcome in ("stop", "length", "refused"):
            assert rig.metric("outrigger_requests_total", outcome=outcome) == 1
        assert rig.metric("outrigger_time_to_first_token_seconds_count") == 2
        assert rig.metric("outrigger_inter_token_latency_seconds_count") == 2
        assert rig.metric("outrigger_e2e_request_latency_seconds_count") == 3


def test_draining_lets_an_answer_end_and_takes_no_other(smollm2):
    with Rig(smollm2) as rig:
        rig.host.behave = stay_silent
        client = open_chat(rig)
        rig.until(lambda: len(asked(rig)) == 1)
    # leaving the rig drained it: the answer that could not end was told so
    answer = client.recv(65536)
    assert answer.startswith(b"HTTP/1.1 503") and b"this server is stopping" in answer
    client.close()
