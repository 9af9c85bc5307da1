"""The attention channel under fire: what `live.fuzz` needs to know of it.

Used by services.bench.verify_fuzz and tests.
"""

from __future__ import annotations

import random

from common.wire import attention_base_frames as base
from common.wire import attention_extension_frames as ext
from common.wire.attention_grammar import ATTENTION_RULES
from common.wire.frames import ATTENTION, encode
from services.bench.fuzz import page_frames
from services.bench.fuzz.live import PONG_BYTES, HostileHost, LiveCounts, fuzz
from services.bench.fuzz.page_frames import GROUP_PAGES, LAYERS, PAGE_TOKENS, PageFrameMaker


class PageSubject:
    """See live.Subject."""

    rules = ATTENTION_RULES
    ping = b"".join(encode(ATTENTION, base.Ping(PONG_BYTES)))

    def maker(self, rng: random.Random) -> PageFrameMaker:
        """See Subject."""
        return PageFrameMaker(rng)

    def opening(self) -> tuple[int, list[bytes]]:
        """See Subject."""
        return page_frames.opening()

    def check(self, host: HostileHost, epoch: int) -> str:
        """Ask for the group that was pushed."""
        seq = len(self.opening()[1]) + 1
        host.say(b"".join(encode(ATTENTION, page_frames.query(LAYERS[0], 0, 1), epoch=epoch, seq=seq)))
        answer = host.hear()
        right = isinstance(answer, ext.Attn2Ok) and answer.n_keys == GROUP_PAGES * PAGE_TOKENS
        return "" if right else f"an honest host's query was answered {answer}"


def fuzz_pages(address: tuple[str, int], seed: int, n_frames: int) -> LiveCounts:
    """`fuzz` of the attention channel."""
    return fuzz(address, PageSubject(), seed, n_frames)
