"""The host's end of the residual channel for tests: a blocking socket and a Link, nothing of the bridge's."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from common.limits import N_CTX_MAX
from common.wire import base_frames as base
from common.wire import extension_frames as ext
from common.wire.fingerprint import fingerprint
from common.wire.frames import RESIDUAL, Frame
from common.wire.layout import Payload
from common.wire.link import Arrived, Link, Role
from common.wire.rows import decode_rows
from common.wire.stream import FrameReader, FrameWriter

ANSWER_S_MAX = 30.0


class HostEnd:
    """Connects, greets when asked, asks one thing at a time or many. `heard` raises EOFError when the worker closes."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.sock = socket.create_connection(address)
        self.sock.settimeout(ANSWER_S_MAX)
        self.link = Link(Role.HOST)
        self._reader = FrameReader(RESIDUAL.magic, self.link.bytes_max)
        self._arrived: list[Arrived] = []

    def send(self, frame: Frame, **options) -> None:
        writer = FrameWriter()
        writer.add(self.link.send(frame, time.monotonic(), **options))
        while writer:
            writer.advance(self.sock.sendmsg(writer.buffers()))

    def heard(self) -> Frame:
        """The next frame that is not a PING (those are answered)."""
        while True:
            while not self._arrived:
                n = self.sock.recv_into(self._reader.buffer())
                if n == 0:
                    raise EOFError("the worker closed the connection")
                for raw in self._reader.advance(n):
                    self._arrived.append(self.link.receive(raw, time.monotonic()))
            frame = self._arrived.pop(0).frame
            if not isinstance(frame, base.Ping):
                return frame
            self.send(base.Pong())

    def ask(self, frame: Frame, **options) -> Frame:
        self.send(frame, **options)
        return self.heard()

    def greet(self, spec, first: int, **changes) -> ext.Hello3Ok:
        answer = self.ask(hello3(spec, first, **changes), epoch=time.time_ns())
        assert isinstance(answer, ext.Hello3Ok), answer
        return answer

    def close(self) -> None:
        self.sock.close()


def hello3(spec, first: int, **changes) -> ext.Hello3:
    """A greeting for layers [first, n) of the model in `spec`."""
    text = changes.pop("text", None) or spec.fingerprint_text(first)
    fields = dict(
        ext_min=1, ext_max=1, boot_id=7, features=3, lse_base=1, kv_type=1, page_tokens=4096, group_pages=4,
        frame_mib_max=256, window=4, split_layer=first, n_layer_full=spec.n_layer_full, n_embd=spec.n_embd,
        n_vocab=spec.n_vocab, n_ctx=1024, device="a test", fingerprint=fingerprint(text), text=text,
    )  # fmt: skip
    return ext.Hello3(**(fields | changes))


@contextmanager
def host_end(address: tuple[str, int]) -> Iterator[HostEnd]:
    """A HostEnd that is closed at the end."""
    end = HostEnd(address)
    try:
        yield end
    finally:
        end.close()


def chunk2(residual, position, want=0, dtype=base.DTYPE_F32) -> ext.Chunk2:
    kind = np.float32 if dtype == base.DTYPE_F32 else np.float16
    return ext.Chunk2(position, len(residual), dtype, want, Payload(np.ascontiguousarray(residual, kind)))


def split_output(ack):
    """(logits, sections) of an answer to a chunk."""
    output = ack.output.joined()
    logits = np.frombuffer(output[: 4 * ack.n_logits], np.float32)
    rest = output[4 * ack.n_logits :]
    return logits, decode_rows(rest) if len(rest) else []


def mirror_at(host: HostEnd) -> int:
    """Where the worker's mirror stands: a rewind to a far point moves nothing and says it."""
    return host.ask(ext.Trim2(N_CTX_MAX)).n_valid
