"""Hostile streams against the link state machine of either end, in this process, however they are cut.

What must hold: nothing but a RemoteProtocolError ever comes out, memory is asked for only within the bound of the
frame's type and the link's phase, and a link that has refused is not asked again. Used by services.bench.verify_fuzz,
services.bench.fuzz.guided and tests.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from common.errors import RemoteProtocolError
from common.wire import extension_frames as ext
from common.wire.attention_link import AttentionLink, QueryShape
from common.wire.grammar import Phase
from common.wire.layout import Payload
from common.wire.link import Link, Refused, Role
from common.wire.rows import decode_rows
from common.wire.stream import FrameReader
from services.bench.fuzz import page_frames
from services.bench.fuzz.frames import FrameMaker
from services.bench.fuzz.page_frames import PageFrameMaker

N_EMBD = 64
EPOCH = 7


@dataclass
class CodecCounts:
    """What came of the frames."""

    outcomes: Counter[str] = field(default_factory=Counter)

    @property
    def frames(self) -> int:
        """Frames that a link looked at; those behind one that ended it are not counted."""
        return sum(self.outcomes[name] for name in ("arrived", "refused", "dropped", "ended"))


class BoundedReader(FrameReader):
    """A FrameReader that fails the run when it lends more memory than the link allows for the frame at hand."""

    def __init__(self, link: Link) -> None:
        self.bound = 0

        def asked(frame_type: int) -> int:
            self.bound = link.bytes_max(frame_type)
            return self.bound

        super().__init__(link.channel.magic, asked)

    def buffer(self) -> memoryview:
        lent = super().buffer()
        assert not self.in_payload or len(lent) <= self.bound, f"{len(lent)} bytes lent, bound {self.bound}"
        return lent


def feed(role: Role, stream: bytes, cut: int, greeted: Callable[[Role], Link] | None = None) -> Counter[str]:
    """Let a greeted link of `role` receive `stream` in turns of `cut` bytes; what came of it, by name.

    Anything but RemoteProtocolError that a link raises is raised here, too. greeted: makes the link, by default
    greeted_link.
    """
    link = (greeted or greeted_link)(role)
    reader, outcomes, at = BoundedReader(link), Counter[str](), 0
    try:
        while at < len(stream):
            buffer = reader.buffer()
            n = min(len(buffer), cut, len(stream) - at)
            buffer[:n] = stream[at : at + n]
            at += n
            for raw in reader.advance(n):
                event = link.receive(raw, 0.0)
                outcomes["dropped" if event is None else type(event).__name__.lower()] += 1
                if event is not None and not isinstance(event, Refused):
                    _look_inside(event.frame, outcomes)
                    link.pending.clear()  # as if answered at once
    except RemoteProtocolError:
        outcomes["ended"] += 1
    return outcomes


def greeted_link(role: Role) -> Link:
    """A link after the greeting, at which the other side's next stamped frame is number 1."""
    link = Link(role)
    link.phase, link.epoch, link.n_embd = Phase.EXTENDED, EPOCH, N_EMBD
    return link


def greeted_page_link(role: Role) -> Link:
    """The same of the attention channel, configured."""
    link = AttentionLink(role)
    link.phase, link.epoch = Phase.EXTENDED, EPOCH
    link.shape = QueryShape(page_frames.N_HEAD_KV, page_frames.N_GROUP, page_frames.HEAD_DIM)
    return link


def _look_inside(frame: object, outcomes: Counter[str]) -> None:
    """Decode blobs as their receiver would."""
    blob = getattr(frame, "blob", None)
    if isinstance(frame, ext.Sync2 | ext.StateData2) and isinstance(blob, Payload):
        try:
            decode_rows(blob.joined())
            outcomes["rows"] += 1
        except RemoteProtocolError:
            outcomes["rows refused"] += 1


def fuzz_codec(seed: int, n_frames: int, *, pages: bool = False) -> CodecCounts:
    """Streams of hostile frames to both roles until n_frames were looked at. pages: of the attention channel."""
    rng, counts = random.Random(seed), CodecCounts()
    maker = PageFrameMaker(rng) if pages else FrameMaker(rng, N_EMBD)
    greeted = greeted_page_link if pages else greeted_link
    while counts.frames < n_frames:
        stream, seq = b"", 1
        for _ in range(rng.randrange(1, 30)):
            hostile = maker.frame(EPOCH, seq)
            stream += hostile.data
            seq += hostile.numbered
        role = Role.WORKER if rng.random() < 0.8 else Role.HOST
        counts.outcomes += feed(role, stream, rng.choice((1, 13, 4096, 1 << 20)), greeted)
    return counts
