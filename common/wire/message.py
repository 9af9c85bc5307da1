"""The two roots of everything said on the bus: Message, which travels, and Part, a piece of one.

Typed and frozen (msgspec, msgpack). Used by the files that declare messages.
"""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Root of all bus messages. `frame_bytes` is the length of every array frame that follows the message."""

    @property
    def frame_bytes(self) -> tuple[int, ...]:
        """Bytes of each trailing array frame, in order. Most messages have none."""
        return ()


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A piece of a message; has no tag of its own."""
