"""The host's end of the attention channel for tests: a blocking socket and an AttentionLink; and pages to push."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass

import numpy as np
import xxhash

from common.attention.partial import PartialAttention
from common.limits import APPEND_PIECE_BYTES
from common.state.pages import LINE_PAD
from common.wire import attention_base_frames as base
from common.wire import attention_extension_frames as ext
from common.wire.attention_link import AttentionLink
from common.wire.fingerprint import fingerprint
from common.wire.frames import Frame
from common.wire.grammar import Role
from common.wire.layout import Payload
from common.wire.link import Arrived
from common.wire.stream import FrameReader, FrameWriter

ANSWER_S_MAX = 60.0


@dataclass(frozen=True)
class Pages:
    """Keys and values of some layers, f16, and a CONFIG2 for their pages."""

    layers: tuple[int, ...] = (3, 7)
    n_head_kv: int = 2
    n_group: int = 3
    head_dim: int = 32
    page_tokens: int = 64
    group_pages: int = 2
    n_pages: int = 6
    seed: int = 0

    def rows(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """K and V of a layer, f16 [n_keys, n_head_kv, head_dim]."""
        rng = np.random.default_rng((self.seed, layer))
        shape = (2, self.n_pages * self.page_tokens, self.n_head_kv, self.head_dim)
        k, v = rng.standard_normal(shape, np.float32).astype(np.float16)
        return k, v

    def image(self, layer: int, page: int) -> bytes:
        """A page as it lies in the host's memory; the bytes behind each line of values are anything."""
        k, v = (rows[page * self.page_tokens : (page + 1) * self.page_tokens] for rows in self.rows(layer))
        lines = np.full((self.n_head_kv * self.head_dim, self.page_tokens + LINE_PAD), 7, np.float16)
        lines[:, : self.page_tokens] = v.reshape(self.page_tokens, -1).T
        return np.ascontiguousarray(k.swapaxes(0, 1)).tobytes() + lines.tobytes()

    def queries(self, n_tokens: int, seed: int = 1) -> np.ndarray:
        """f32 [n_head_kv, n_group * n_tokens, head_dim], numbers that f16 has."""
        rng = np.random.default_rng((self.seed, seed))
        shape = (self.n_head_kv, self.n_group * n_tokens, self.head_dim)
        return rng.standard_normal(shape, np.float32).astype(np.float16).astype(np.float32)

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def config2(self, **changes) -> ext.Config2:
        fields = dict(
            n_layer=len(self.layers), n_head_kv=self.n_head_kv, n_group=self.n_group, head_dim_k=self.head_dim,
            head_dim_v=self.head_dim, kv_type=ext.KV_TYPE_F16, page_tokens=self.page_tokens,
            group_pages=self.group_pages, many_rows=0, bytes_wanted=1 << 40, session=0, keep=0,
            layers=Payload(np.array(self.layers, "<u4")),
        )  # fmt: skip
        return ext.Config2(**(fields | changes))

    def appends(self, layer: int, page: int, piece_bytes: int = APPEND_PIECE_BYTES) -> list[ext.Append2]:
        image = self.image(layer, page)
        digest = xxhash.xxh3_64_intdigest(image)
        return [
            ext.Append2(layer, page, self.page_tokens, at, digest, Payload(image[at : at + piece_bytes]))
            for at in range(0, len(image), piece_bytes)
        ]

    def query(self, layer: int, groups: range, n_tokens: int = 1, per_group: int = 0, **changes) -> ext.Attn2:
        fields = dict(
            layer=layer, n_tok=n_tokens, group_first=groups.start, group_end=groups.stop, per_group=per_group,
            scale=self.scale, q_dtype=0, q=Payload(self.queries(n_tokens)),
        )  # fmt: skip
        return ext.Attn2(**(fields | changes))


class PageEnd:
    """Connects; asks one thing at a time, or many. `heard` raises EOFError when the worker closes."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.sock = socket.create_connection(address)
        self.sock.settimeout(ANSWER_S_MAX)
        self.link = AttentionLink(Role.HOST)
        self._reader = FrameReader(self.link.channel.magic, self.link.bytes_max)
        self._arrived: list[Arrived] = []

    def __enter__(self) -> PageEnd:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def send(self, frame: Frame, **options) -> None:
        writer = FrameWriter()
        writer.add(self.link.send(frame, time.monotonic(), **options))
        while writer:
            writer.advance(self.sock.sendmsg(writer.buffers()))

    def heard(self) -> Frame:
        while not self._arrived:
            n = self.sock.recv_into(self._reader.buffer())
            if n == 0:
                raise EOFError("the worker closed the connection")
            for raw in self._reader.advance(n):
                self._arrived.append(self.link.receive(raw, time.monotonic()))
        return self._arrived.pop(0).frame

    def ask(self, frame: Frame, **options) -> Frame:
        self.send(frame, **options)
        return self.heard()

    def greet(self, epoch: int | None = None) -> ext.Hello3Ok:
        answer = self.ask(hello3(), epoch=epoch or time.time_ns())
        assert isinstance(answer, ext.Hello3Ok), answer
        return answer

    def push(self, pages: Pages, n_pages: int | None = None, first: int = 0, piece_bytes: int = 4096) -> None:
        """All layers' pages, one piece after the other; each must be taken."""
        for page in range(first, pages.n_pages if n_pages is None else n_pages):
            for layer in pages.layers:
                for piece in pages.appends(layer, page, piece_bytes):
                    answer = self.ask(piece)
                    assert isinstance(answer, ext.Ok2), answer
                assert answer.n_now == (page + 1) * pages.page_tokens

    def attend(self, pages: Pages, layer: int, groups: range, n_tokens: int = 1, per_group: int = 0):
        """The parts of the answer to pages.query."""
        answer = self.ask(pages.query(layer, groups, n_tokens, per_group))
        assert isinstance(answer, ext.Attn2Ok), answer
        return parts_of(answer, pages, n_tokens)


def parts_of(answer: ext.Attn2Ok, pages: Pages, n_tokens: int) -> list[PartialAttention]:
    """Accumulators of an answer, oldest first."""
    values = np.frombuffer(answer.parts.joined(), np.float32)
    rows, n = (answer.n_parts, pages.n_head_kv, pages.n_group * n_tokens), answer.n_parts
    count = int(np.prod(rows))
    m, l = values[:count].reshape(rows), values[count : 2 * count].reshape(rows)  # noqa: E741
    o = values[2 * count :].reshape(*rows, pages.head_dim)
    return [PartialAttention(m[part], l[part], o[part]) for part in range(n)]


def hello3(**changes) -> ext.Hello3:
    fields = dict(
        ext_min=1, ext_max=1, boot_id=7, features=4, lse_base=1, kv_type=1, page_tokens=0, group_pages=0,
        frame_mib_max=256, window=4, split_layer=0, n_layer_full=0, n_embd=0, n_vocab=0, n_ctx=0, device="a test",
        fingerprint=fingerprint(""), text="",
    )  # fmt: skip
    return ext.Hello3(**(fields | changes))


def base_query(q: np.ndarray, layer: int = 0, n_keys: int = 0, scale: float = 1 / 16) -> Frame:
    """ATTN or ATTN_BIG with blocks f16 [n_blocks, n_head_kv, 48, 256]."""
    n_tokens = len(q) * base.QUERY_TOKENS
    cls = base.Attn if len(q) == 1 else base.AttnBig
    return cls(layer, n_tokens, n_keys, scale, Payload(np.ascontiguousarray(q, np.float16)))
