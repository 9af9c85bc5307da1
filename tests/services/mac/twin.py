"""The far end of route "residual" in this process: a second engine runs the tail in a thread, behind the same channel.

The in-memory twin of bridge, cable and worker, for tests of the pipeline. `spoil` may change or swallow each answer.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from common.engine.engine import Engine
from common.errors import LinkDownError
from common.wire import messages as m
from common.wire.rows import decode_rows, encode_rows

Spoil = Callable[[m.Message, bytes], tuple[m.Message, bytes] | None]


class TailTwin:
    """A ResidualChannel whose other end is a real LayerSpan over layers [split_layer, n)."""

    def __init__(self, engine: Engine, split_layer: int) -> None:
        self.span = engine.span(split_layer, engine.spec.n_layer_full)
        self._engine = engine
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

    def close(self) -> None:
        self._inbox.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (item := self._inbox.get()) is not None:
            message, arrays = item
            answer, blob = self._answer(message, arrays)
            if self.spoil is not None:
                spoiled = self.spoil(answer, blob)
                if spoiled is None:
                    continue
                answer, blob = spoiled
            self._outbox.put(SimpleNamespace(message=answer, frames=(memoryview(blob),)))

    def _answer(self, message: m.Message, arrays: list[bytes]) -> tuple[m.Message, bytes]:
        epoch, ticket = message.link_epoch, message.ticket
        try:
            match message:
                case m.RunChunk():
                    return self._run(message, arrays[0])
                case m.RewindMirror(n=n):
                    n = n if n == self.span.n_valid or not self._recurrent else 0
                    self.span.truncate(min(n, self.span.n_valid))
                case m.PushRows(n_valid_after=n):
                    self._push(decode_rows(arrays[0]), n)
        except Exception as error:
            return m.LinkFailed(epoch, ticket, 400, "refused", str(error)), b""
        return m.MirrorAt(epoch, ticket, self.span.n_valid), b""

    @property
    def _recurrent(self) -> bool:
        spec = self._engine.spec
        return any(spec.kind(layer) == "recurrent" for layer in range(self.span.first, self.span.last))

    def _run(self, ask: m.RunChunk, residual: bytes) -> tuple[m.Message, bytes]:
        rows = np.frombuffer(residual, np.float32).reshape(ask.n_tokens, ask.n_embd)
        started = time.perf_counter()
        self.span.run(rows, ask.position)
        ms = (time.perf_counter() - started) * 1000
        self.tokens_run += ask.n_tokens
        sections = self.span.export_rows(
            ask.position, ask.position + ask.n_tokens, kv=True, state=bool(ask.want & m.WANT_STATE)
        )
        blob = bytes(encode_rows(sections).joined())
        return m.ChunkDone(ask.link_epoch, ask.ticket, ask.n_tokens, ms, 0.0, ms, len(blob)), blob

    def _push(self, sections: list[Any], n: int) -> None:
        complete = not self._recurrent or any(s.kind > 1 for s in sections)
        if complete:
            self.span.import_rows(sections, n)
            return
        for layer in {s.layer for s in sections}:
            self._engine.span(layer, layer + 1).import_rows([s for s in sections if s.layer == layer], n)
