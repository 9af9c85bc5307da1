"""A ZeroMQ client as a stranger writes it from docs/zeromq.md, of pyzmq and msgpack; and a host that never ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgpack
import zmq

from common.wire import messages as m

WAIT_MS = 20_000
"""For what must happen: long, because a busy machine is no failure."""
ENDS = ("finished", "cancelled", "error", "tokens", "content", "state")


class ForeignClient:
    """One DEALER socket."""

    def __init__(self, socket: zmq.Socket) -> None:
        self.socket = socket

    def say(self, **message: Any) -> None:
        self.socket.send_multipart([b"OTR1", msgpack.packb(message)])

    def ask(self, ask_id: str, credit: int = 256, report: bool = False, **body: Any) -> None:
        """Ask for an answer; a chat unless the body has a prompt."""
        if "prompt" not in body:
            body = {"messages": [{"role": "user", "content": "hi"}]} | body
        self.say(type="generate", id=ask_id, body=body, credit=credit, report=report)

    def hear(self) -> dict[str, Any]:
        """The next message that means something."""
        while True:
            assert self.socket.poll(WAIT_MS), "nothing was heard"
            version, message = self.socket.recv_multipart()
            assert version == b"OTR1"
            heard = msgpack.unpackb(message)
            if heard["type"] != "alive":
                return heard

    def hear_until(self, *types: str, ask_id: str | None = None) -> list[dict[str, Any]]:
        """Messages up to one of these types (of this id)."""
        heard = [self.hear()]
        while heard[-1]["type"] not in types or ask_id not in (None, heard[-1].get("id")):
            heard.append(self.hear())
        return heard

    def answer(self, ask_id: str, *, grants: bool = True) -> list[dict[str, Any]]:
        """All messages of one request up to its end, granting what was taken; others' are skipped."""
        heard = []
        while not heard or heard[-1]["type"] not in ENDS:
            message = self.hear()
            if message.get("id") == ask_id:
                heard.append(message)
                if grants and message["type"] == "piece" and message["n_tokens"]:
                    self.say(type="grant", id=ask_id, credit=message["n_tokens"])
        return heard


@contextmanager
def foreign_client(endpoint: str, **options: int) -> Iterator[ForeignClient]:
    """A client that is connected inside the block. `options`: of its socket, by pyzmq's names."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    for name, value in options.items():
        setattr(socket, name, value)
    socket.connect(endpoint)
    try:
        yield ForeignClient(socket)
    finally:
        socket.close()
        context.term()


def text_of(heard: list[dict[str, Any]], choice: int = 0) -> str:
    """The joined text of a choice."""
    return "".join(each["text"] for each in heard if each["type"] == "piece" and each["choice"] == choice)


def token_ids_of(heard: list[dict[str, Any]]) -> list[int]:
    return [token_id for each in heard if each["type"] == "piece" for token_id in each["token_ids"]]


def endless(ids_sent: dict[str, int], tokens_max: int | None = None):
    """A host that writes until it is cancelled (or falls silent after `tokens_max`), within its credit; counts."""

    async def behave(host, ask, ids, peer):
        sent = 0
        while not host.cancelled(ask.request_id):
            if sent < min(host.n_granted[ask.request_id], tokens_max or 1 << 30):
                await host.send(m.TokenReady(ask.request_id, sent, int(ids[-1])), peer)
                sent += 1
                ids_sent[ask.request_id] = sent
            await asyncio.sleep(0.001)
        await host.send(m.Finished(ask.request_id, "cancelled", len(ids), sent, m.ReadReport()), peer)

    return behave


def asked(rig) -> list[m.Generate]:
    return [message for message in rig.host.told if isinstance(message, m.Generate)]
