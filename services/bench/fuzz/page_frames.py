"""Hostile frames of the attention channel: what a host might say to a worker that holds pages of one small form.

Pure; used by services.bench.fuzz.pages and tests.
"""

from __future__ import annotations

import random
import time

import numpy as np
import xxhash

from common.limits import N_CTX_MAX
from common.wire import attention_base_frames as base
from common.wire import attention_extension_frames as ext
from common.wire.fingerprint import fingerprint
from common.wire.frames import ATTENTION, Frame, encode
from common.wire.layout import Payload
from services.bench.fuzz.frames import FrameMaker, Hostile

LAYERS, N_HEAD_KV, N_GROUP, HEAD_DIM, PAGE_TOKENS, GROUP_PAGES = (1, 5), 2, 3, 32, 64, 2
IMAGE_BYTES = 2 * N_HEAD_KV * HEAD_DIM * (PAGE_TOKENS + PAGE_TOKENS + 32)
BYTES_WANTED = 16 * IMAGE_BYTES


def hello3() -> ext.Hello3:
    """An honest greeting."""
    return ext.Hello3(
        ext_min=1, ext_max=1, boot_id=1, features=4, lse_base=1, kv_type=1, page_tokens=0, group_pages=0,
        frame_mib_max=256, window=4, split_layer=0, n_layer_full=0, n_embd=0, n_vocab=0, n_ctx=0, device="fuzz",
        fingerprint=fingerprint(""), text="",
    )  # fmt: skip


def config2(session: int = 0, keep: int = 0, bytes_wanted: int = BYTES_WANTED) -> ext.Config2:
    """Pages of the form that all frames here have."""
    layers = Payload(np.array(LAYERS, "<u4"))
    return ext.Config2(
        len(LAYERS), N_HEAD_KV, N_GROUP, HEAD_DIM, HEAD_DIM, ext.KV_TYPE_F16, PAGE_TOKENS, GROUP_PAGES, 0,
        bytes_wanted, session, keep, layers,
    )  # fmt: skip


def opening(epoch: int | None = None) -> tuple[int, list[bytes]]:
    """(epoch, the frames) by which an honest host begins, up to a group of pages; each is answered."""
    epoch = epoch or time.time_ns()
    frames = hello3(), config2(), *(page(number, LAYERS[0], number) for number in range(GROUP_PAGES))
    return epoch, [
        b"".join(encode(ATTENTION, frame, epoch=epoch, seq=seq)) for seq, frame in enumerate(frames, 1)
    ]


def page(number: int, layer: int, seed: int) -> ext.Append2:
    """A whole page, with its right hash."""
    image = random.Random(seed).randbytes(IMAGE_BYTES // 2)
    image = np.frombuffer(image, np.int8).astype(np.float16).tobytes()  # finite numbers
    return ext.Append2(layer, number, PAGE_TOKENS, 0, xxhash.xxh3_64_intdigest(image), Payload(image))


def query(
    layer: int, first: int, end: int, n_tokens: int = 1, per_group: int = 0, q: bytes = b""
) -> ext.Attn2:
    """A query of the right length; of zeros, if nothing else is given."""
    n_bytes = 4 * N_HEAD_KV * N_GROUP * n_tokens * HEAD_DIM
    return ext.Attn2(layer, n_tokens, first, end, per_group, 0.25, 0, Payload(q or bytes(n_bytes)))


class PageFrameMaker(FrameMaker):
    """Makes them from `rng` alone."""

    channel = ATTENTION
    wild = (ext.Append2, ext.Attn2, ext.Truncate2, ext.Fetch2, ext.Config2)
    short = ext.Truncate2
    greetings = (base.Hello, base.HelloOk)

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng, n_embd=HEAD_DIM)

    def _request(self, epoch: int, seq: int) -> Hostile:
        """A request that is well formed and often asks for what is not held."""
        rng, layer = self._rng, self._rng.choice((*LAYERS[:1] * 5, *LAYERS, 0, 511))
        frame: Frame
        match rng.randrange(7):
            case 0 | 1:
                first = rng.choice((0, 0, 0, 1, 1000))
                end, n_tokens = first + rng.choice((1, 1, 1, 2, 500)), rng.choice((1, 2, 7))
                n_bytes = 4 * N_HEAD_KV * N_GROUP * n_tokens * HEAD_DIM
                q = rng.randbytes(n_bytes) if rng.random() < 0.5 else b""
                frame = query(layer, first, end, n_tokens, rng.randrange(2), q)
            case 2 | 3:
                frame = page(rng.choice((0, 1, 2, 3, 9, N_CTX_MAX)), layer, rng.randrange(9))
            case 4:
                frame = ext.Fetch2(layer, rng.choice((0, 1, 50)))
            case 5:
                frame = ext.Truncate2(rng.choice((0, 128, 65, 300, N_CTX_MAX)))
            case _:
                if rng.random() < 0.5:
                    wanted = rng.choice((0, 1, BYTES_WANTED, 2**63))
                    frame = config2(rng.randrange(3), rng.randrange(2), min(wanted, 8 * BYTES_WANTED))
                else:
                    ping = base.Ping(rng.randrange(5000), Payload(rng.randbytes(rng.randrange(100))))
                    return Hostile("ping", b"".join(encode(ATTENTION, ping)), "answer", False)
        data = b"".join(encode(ATTENTION, frame, epoch=epoch, seq=seq))
        return Hostile(frame.NAME.lower(), data, "answer", True)

    def _rows(self, epoch: int, seq: int) -> Hostile:
        """A piece of a page that lies about its place, its length or its hash."""
        rng = self._rng
        piece = ext.Append2(
            rng.choice((*LAYERS, 2)),
            rng.choice((0, 1, 2)),
            rng.choice((PAGE_TOKENS, PAGE_TOKENS, 0, 63, N_CTX_MAX)),
            rng.choice((0, 0, 1, 100, IMAGE_BYTES, 2**32 - 1)),
            rng.getrandbits(64),
            Payload(rng.randbytes(rng.choice((0, 1, 100, IMAGE_BYTES, IMAGE_BYTES + 1)))),
        )
        data = b"".join(encode(ATTENTION, piece, epoch=epoch, seq=seq))
        return Hostile("piece", data, "answer", True)

    def _unasked_answer(self, epoch: int, seq: int) -> Hostile:
        ok = ext.Ok2(self._rng.randrange(5), 0)
        return Hostile("answer", b"".join(encode(ATTENTION, ok, epoch=epoch, seq=seq)), "unknown", False)
