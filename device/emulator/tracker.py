"""Which frame each byte of a stream belongs to: reads headers as they pass, keeps 16 bytes, copies nothing else.

Used by device.emulator.link on both directions of a connection, so that a fault can strike a named frame at a named
byte. Trusts nothing and judges nothing: the worker behind it does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from common.wire.frames import HEADER


@dataclass(frozen=True)
class Passing:
    """Something that happened at byte `at` of the bytes given: a frame of `type` began, was half there, or ended.

    [first, at) are the bytes of its payload among those given, up to this event.
    """

    event: str
    type: int
    first: int
    at: int


class FrameTracker:
    """Feed it every byte of one direction, in order."""

    def __init__(self) -> None:
        self._head = bytearray()
        self._type = 0
        self._left = 0  # bytes of the payload still to come
        self._half_left = 0  # when so many are left, half of them have come

    def feed(self, view: memoryview) -> Iterator[Passing]:
        """Events among these bytes, in their order."""
        at = 0
        while at < len(view):
            if not self._left:
                take = min(HEADER.size - len(self._head), len(view) - at)
                self._head += view[at : at + take]
                at += take
                if len(self._head) < HEADER.size:
                    return
                _magic, self._type, self._left = HEADER.unpack(memoryview(self._head))
                self._head, self._half_left = bytearray(), self._left // 2
                yield Passing("began", self._type, at, at)
                if not self._left:
                    yield Passing("half", self._type, at, at)
                    yield Passing("ended", self._type, at, at)
                continue
            first, take = at, min(self._left, len(view) - at)
            until_half = self._left - self._half_left
            if 0 < until_half <= take:
                yield Passing("half", self._type, first, first + until_half)
            at += take
            self._left -= take
            if not self._left:
                yield Passing("ended", self._type, first, at)
