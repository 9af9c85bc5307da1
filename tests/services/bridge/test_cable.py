"""Aim: what came whole over the cable is handed on, even when the connection ends right behind it; then that is told.
Method: a plain socket in the worker's place says something and breaks."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from common.errors import LinkDownError, RemoteProtocolError
from common.metrics import Metrics
from common.wire import base_frames as base
from common.wire.frames import RESIDUAL, encode
from services.bridge.cable import Cable

COMPLAINT = b"".join(encode(RESIDUAL, base.Err(text="no such layer")))
GARBAGE = bytes(64)


@pytest.fixture
def ends() -> Iterator[tuple[Cable, socket.socket]]:
    """(our cable, the other end), connected."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        cable = Cable(door.getsockname(), Metrics("bridge"), time.monotonic())
        there, _ = door.accept()
        with there:
            while not cable.connected:
                cable.turn(time.monotonic())
            yield cable, there
        cable.abandon()


def arrive(cable: Cable) -> list[str]:
    """Names of the frames of the next turn that brings some, or its error."""
    until_s = time.monotonic() + 10
    while time.monotonic() < until_s:
        if events := cable.turn(time.monotonic()):
            return [event.frame.NAME for event in events]
        time.sleep(0.001)
    raise AssertionError("nothing came")


def test_what_came_before_bytes_of_no_frame_is_handed_on_first(ends) -> None:
    cable, there = ends
    there.sendall(COMPLAINT + GARBAGE)
    assert arrive(cable) == ["ERR"]
    assert cable.due_at() == 0.0, "the owner must not sleep on it"
    for look in (lambda: cable.check(time.monotonic()), lambda: cable.turn(time.monotonic())):
        with pytest.raises(RemoteProtocolError, match="magic"):
            look()


def test_last_words_are_read_when_sending_fails(ends) -> None:
    cable, there = ends
    there.sendall(COMPLAINT)
    there.close()
    time.sleep(0.05)  # the goodbye of the other end is here before we speak: the second word then breaks
    for word in (bytes(16), bytes(16)):
        cable._writer.add([memoryview(word)])
        cable._flush()
        time.sleep(0.05)
    assert arrive(cable) == ["ERR"]
    with pytest.raises(LinkDownError, match="broke"):
        cable.check(time.monotonic())
