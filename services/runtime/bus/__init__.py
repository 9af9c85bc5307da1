"""The bus: typed messages over ZeroMQ. This package is the only one that imports zmq.

    Asker, Owner                  for asyncio: one reader task per socket feeds a queue; a recv is never cancelled
    BlockingAsker, BlockingOwner  for a thread of its own: recv with a deadline and an optional hot window

    ForeignOwner, ForeignAsker    the same pair for programs that are not ours: plain frames (common.wire.public)
    Publisher, Listener           events for whoever subscribes

An asker (DEALER) connects, an owner (ROUTER) binds. What a message may be and what its numbers mean is decided in
common.wire.codec and services.runtime.conversation; this package only moves frames. Nothing is dropped in silence: a
message that cannot leave raises the route's error, one that must not be used is counted and told as a BusEvent.

Arrays travel without a copy (from 64 KiB on), so an array given to `send` must not be changed afterwards.
"""

from services.runtime.bus.blocking import BlockingAsker, BlockingOwner
from services.runtime.bus.channel import (
    CONNECT_WAIT_S,
    EventSink,
    libzmq_version,
    new_key_pair,
    public_key_of,
)
from services.runtime.bus.foreign import (
    ForeignAsker,
    ForeignOwner,
    Listener,
    PeerGoneError,
    PeerStuckError,
    Publisher,
)
from services.runtime.bus.tasks import Asker, Owner
from services.runtime.conversation import BusEvent, Received

__all__ = [
    "CONNECT_WAIT_S",
    "Asker",
    "BlockingAsker",
    "BlockingOwner",
    "BusEvent",
    "EventSink",
    "ForeignAsker",
    "ForeignOwner",
    "Listener",
    "Owner",
    "PeerGoneError",
    "PeerStuckError",
    "Publisher",
    "Received",
    "libzmq_version",
    "new_key_pair",
    "public_key_of",
]
