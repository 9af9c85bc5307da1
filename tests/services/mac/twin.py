"""The far end of route "residual" in this process: a second engine runs the tail in a thread, behind the same channel.

The in-memory twin of bridge and cable around the worker's real mirror, for tests of the pipeline. `spoil` may change or
swallow each answer.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from common.engine.engine import Engine
from common.errors import LinkDownError, OutriggerError
from common.wire import messages as m
from common.wire.rows import decode_rows, encode_rows
from device.mirror import TailMirror

Spoil = Callable[[m.Message, bytes], tuple[m.Message, bytes] | None]


class TailTwin:
    """A ResidualChannel whose other end is the worker's own TailMirror over layers [split_layer, n)."""

    def __init__(self, engine: Engine, split_layer: int) -> None:
        self.mirror = TailMirror(engine)
        self.mirror.attach(split_layer)
        self.spoil: Spoil | None = None
        self.down = False
        self.tokens_run = 0
        self.asked: list[m.Message] = []
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def send(self, message: m.Message, *arrays: Any) -> None:
        if self.down:
            raise LinkDownError("the twin is down")
        self.asked.append(message)
        self._inbox.put((message, [bytes(memoryview(a).cast("B")) for a in arrays]))

    def recv(self, timeout_s: float | None) -> Any | None:
        try:
            return self._outbox.get(timeout=timeout_s) if timeout_s else self._outbox.get_nowait()
        except queue.Empty:
            return None

    def restart(self) -> None:
        """Behind everything asked so far, forget all: as a worker does that is greeted anew."""
        self._inbox.put((None, []))

    def losses(self) -> int:
        return 0

    def close(self) -> None:
        self._inbox.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (item := self._inbox.get()) is not None:
            message, arrays = item
            if message is None:
                self.mirror.attach(self.mirror.span.first)
                continue
            try:
                answer, blob, *logits = self._answer(message, arrays)
            except OutriggerError as error:
                failed = m.LinkFailed(message.link_epoch, message.ticket, error.code, "refused", str(error))
                answer, blob, logits = failed, b"", []
            if self.spoil is not None:
                spoiled = self.spoil(answer, blob)
                if spoiled is None:
                    continue
                answer, blob = spoiled
            frames = tuple(memoryview(each) for each in (blob, *logits))
            self._outbox.put(SimpleNamespace(message=answer, frames=frames))

    def _answer(self, message: m.Message, arrays: list[bytes]) -> tuple[m.Message, bytes] | tuple[Any, ...]:
        match message:
            case m.RunChunk():
                return self._run(message, arrays[0])
            case m.RewindMirror(n=n):
                self.mirror.rewind(n)
            case m.TakeSnapshot(n=n):
                self.mirror.snapshot(n)
            case m.PushRows(flags=flags, n_valid_after=n):
                self.mirror.sync(decode_rows(arrays[0]), flags, n)
        return m.MirrorAt(message.link_epoch, message.ticket, self.mirror.n_valid), b""

    def _run(self, ask: m.RunChunk, residual: bytes) -> tuple[Any, ...]:
        rows = np.frombuffer(residual, np.float32).reshape(ask.n_tokens, ask.n_embd)
        started = time.perf_counter()
        ran = self.mirror.run(rows, ask.position, ask.want)
        ms = (time.perf_counter() - started) * 1000
        self.tokens_run += ask.n_tokens
        blob = bytes(encode_rows(ran.sections).joined())
        done = m.ChunkDone(ask.link_epoch, ask.ticket, ask.n_tokens, ms, 0.0, ms, len(blob))
        if ran.logits is None:
            return done, blob
        return msgspec.structs.replace(done, n_logits=len(ran.logits)), blob, ran.logits.tobytes()
