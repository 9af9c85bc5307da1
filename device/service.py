"""What the worker says to each request: frames in, frames out, on top of the tail's mirror.

One method a request; every one returns the answer's frame or raises an OutriggerError, which the compute thread turns
into ERR2 or ERR. Base and extension requests do the same work and differ in their answers. Knows no socket; called by
device.compute on the compute thread only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.errors import EngineError, FingerprintError, ModelError, OutriggerError, RemoteProtocolError
from common.limits import FRAME_BYTES_MAX, MIB
from common.wire import base_frames as base
from common.wire import extension_frames as ext
from common.wire.fingerprint import difference, fingerprint
from common.wire.frames import Frame
from common.wire.layout import Payload
from common.wire.messages import ROWS_KV, ROWS_STATE, WANT_LOGITS, WANT_TAPS
from common.wire.rows import RowSection, decode_rows, encode_rows
from device.mirror import TailMirror, TailRun

KV_TYPE_F16 = 1
"""ggml's number of the rows' type, the only one so far; fingerprints call it "f16"."""


@dataclass(frozen=True)
class Terms:
    """What this worker offers in its half of the greeting."""

    boot_id: int
    device: str
    window: int
    page_tokens: int = 4096
    group_pages: int = 4


@dataclass(frozen=True)
class Answer:
    """A frame to send; `closing` is an error after which the connection must end (the frame goes first)."""

    frame: Frame
    closing: OutriggerError | None = None


class TailService:
    """Answers for one worker process. `n_chunks` counts the chunks it ran."""

    def __init__(self, mirror: TailMirror, terms: Terms, clock: Callable[[], float] = time.monotonic) -> None:
        self.mirror = mirror
        self.terms = terms
        self.n_chunks = 0
        self._clock = clock
        self._methods: dict[type[Frame], Callable[..., Frame]] = {
            base.Reset: self._reset,
            base.Chunk: self._chunk,
            base.Trim: self._trim,
            base.Sync: self._sync,
            base.State: self._state,
            base.StateRange: self._state_range,
            ext.Chunk2: self._chunk2,
            ext.Sync2: self._sync2,
            ext.StateRange2: self._state_range2,
            ext.Snapshot: self._snapshot,
            ext.Trim2: self._trim2,
        }

    def answer(self, frame: Frame, seq: int, queue_s: float, gone: Callable[[], bool]) -> Answer:
        """The answer to `frame`, number `seq`, that waited queue_s for its turn. Raises OutriggerError.

        gone says whether its client has left, which ends a long chunk early.
        """
        if isinstance(frame, ext.Hello3):
            return self._hello3(frame)
        if isinstance(frame, base.Hello):
            return Answer(self._hello(frame))
        if isinstance(frame, (base.Chunk, ext.Chunk2)):
            return Answer(self._methods[type(frame)](frame, seq, queue_s, gone))
        return Answer(self._methods[type(frame)](frame, seq))

    def failure(self, frame: Frame | None, seq: int, error: OutriggerError) -> Frame:
        """The frame that says why `frame` was not done; frame None: its hash was wrong."""
        if frame is None or frame.stamped:
            return ext.Err2.of(seq, error.code, self.mirror.n_valid, str(error))
        return base.Err(base.bounded_text(f"E{error.code} {error}"))

    # --- greeting

    def _hello3(self, hello: ext.Hello3) -> Answer:
        if not hello.ext_min <= ext.EXTENSION_VERSION <= hello.ext_max:
            raise RemoteProtocolError(
                f"the host speaks extension versions {hello.ext_min} to {hello.ext_max} and this worker "
                f"{ext.EXTENSION_VERSION}: run the same version of outrigger on both"
            )
        if hello.lse_base != ext.LSE_BASE_NATURAL or hello.kv_type != KV_TYPE_F16:
            raise ModelError(
                f"the host asks for lse base {hello.lse_base} and KV type {hello.kv_type}; this worker has 1 (natural "
                f"logarithm) and {KV_TYPE_F16} (f16)"
            )
        self.mirror.attach(hello.split_layer)
        spec = self.mirror.spec
        output = hello.features & ext.FEATURE_OUTPUT
        text = spec.fingerprint_text(hello.split_layer, "f16", output=bool(output))
        answer = ext.Hello3Ok(
            ext_min=ext.EXTENSION_VERSION,
            ext_max=ext.EXTENSION_VERSION,
            boot_id=self.terms.boot_id,
            features=ext.FEATURE_ROW_STATE | ext.FEATURE_SNAPSHOTS | output,
            lse_base=ext.LSE_BASE_NATURAL,
            kv_type=KV_TYPE_F16,
            page_tokens=self.terms.page_tokens,
            group_pages=self.terms.group_pages,
            frame_mib_max=FRAME_BYTES_MAX // MIB,
            window=self.terms.window,
            split_layer=spec.layer_start,
            n_layer_full=spec.n_layer_full,
            n_embd=spec.n_embd,
            n_vocab=spec.n_vocab,
            n_ctx=self.mirror.engine.n_ctx,
            device=self.terms.device,
            fingerprint=fingerprint(text),
            text=text,
        )
        same = answer.fingerprint == hello.fingerprint and hello.n_embd == spec.n_embd
        return Answer(answer, None if same else FingerprintError(difference(hello.text, text)))

    def _hello(self, hello: base.Hello) -> base.HelloOk:
        spec = self.mirror.spec
        if hello.proto != base.PROTO or hello.state_format != base.STATE_FORMAT_ROWS:
            raise RemoteProtocolError(
                f"the host speaks proto {hello.proto}, state format {hello.state_format:#x}; this worker has proto "
                f"{base.PROTO} and the ROWS format {base.STATE_FORMAT_ROWS:#x} (1, llama.cpp's blob, is not supported)"
            )
        ours = (spec.n_layer_full, spec.n_embd, spec.n_vocab)
        theirs = (hello.n_layer_full, hello.n_embd, hello.n_vocab)
        if ours != theirs:
            raise FingerprintError(
                f"the host's model has (layers, width, vocabulary) = {theirs} and the worker's {ours}; "
                f"give both ends the same model"
            )
        self.mirror.attach(hello.split_layer)
        values: dict[str, Any] = dict(
            proto=base.PROTO,
            state_format=base.STATE_FORMAT_ROWS,
            layer_start=spec.layer_start,
            n_layer_full=spec.n_layer_full,
            n_layer=spec.n_layer_full - spec.layer_start,
            n_embd=spec.n_embd,
            n_vocab=spec.n_vocab,
            n_ctx=self.mirror.engine.n_ctx,
            file_bytes=spec.file_bytes,
            desc=base.bounded_text(f"{spec.arch} {spec.name}", 128),
        )
        if isinstance(hello, base.Hello2):
            return base.HelloOk2(**values, n_valid=0, session=hello.session)
        return base.HelloOk(**values)

    # --- base requests

    def _reset(self, _: base.Reset, _seq: int) -> base.ResetOk:
        self.mirror.empty()
        return base.ResetOk()

    def _chunk(
        self, chunk: base.Chunk, _seq: int, _queue_s: float, gone: Callable[[], bool]
    ) -> base.ChunkAck:
        ran, compute_ms = self._run(chunk, chunk.want & (WANT_LOGITS | WANT_TAPS), gone)
        n_logits = 0 if ran.logits is None else len(ran.logits)
        return base.ChunkAck(0, chunk.n_tok, n_logits, compute_ms, _output(ran))

    def _trim(self, trim: base.Trim, _seq: int) -> base.Ok:
        if trim.n < self.mirror.n_valid:
            if self.mirror.has_recurrent:
                self.mirror.empty()
            else:
                self.mirror.rewind(trim.n)
        return base.Ok(self.mirror.n_valid)

    def _sync(self, sync: base.Sync, _seq: int) -> base.Ok:
        self.mirror.sync(decode_rows(sync.blob.joined()), sync.flags, sync.n_valid_after)
        return base.Ok(self.mirror.n_valid)

    def _state(self, _: base.State, _seq: int) -> base.StateData:
        return base.StateData(_blob(self.mirror.rows(0, self.mirror.n_valid, ROWS_KV | ROWS_STATE)))

    def _state_range(self, asked: base.StateRange, _seq: int) -> base.StateData:
        return base.StateData(_blob(self.mirror.rows(asked.p0, asked.p1, asked.flags)))

    # --- extension requests

    def _chunk2(self, chunk: ext.Chunk2, seq: int, queue_s: float, gone: Callable[[], bool]) -> ext.Chunk2Ack:
        ran, compute_ms = self._run(chunk, chunk.want, gone)
        n_logits = 0 if ran.logits is None else len(ran.logits)
        return ext.Chunk2Ack(
            answers=seq,
            n_tok=chunk.n_tok,
            n_valid=self.mirror.n_valid,
            n_logits=n_logits,
            compute_ms=compute_ms,
            queue_ms=1000 * queue_s,
            output=_output(ran),
        )

    def _sync2(self, sync: ext.Sync2, seq: int) -> ext.Ok2:
        self.mirror.sync(decode_rows(sync.blob.joined()), sync.flags, sync.n_valid_after)
        return ext.Ok2(seq, self.mirror.n_valid)

    def _state_range2(self, asked: ext.StateRange2, seq: int) -> ext.StateData2:
        return ext.StateData2(seq, _blob(self.mirror.rows(asked.p0, asked.p1, asked.flags)))

    def _snapshot(self, asked: ext.Snapshot, seq: int) -> ext.Ok2:
        self.mirror.snapshot(asked.n)
        return ext.Ok2(seq, self.mirror.n_valid)

    def _trim2(self, trim: ext.Trim2, seq: int) -> ext.Ok2:
        return ext.Ok2(seq, self.mirror.rewind(trim.n))

    # --- inside

    def _run(
        self, chunk: base.Chunk | ext.Chunk2, want: int, gone: Callable[[], bool]
    ) -> tuple[TailRun, float]:
        """Run a chunk's residual. Returns what it left and the milliseconds it took."""
        start = self._clock()
        dtype = np.float32 if chunk.dtype == base.DTYPE_F32 else np.float16
        residual = np.frombuffer(chunk.residual.joined(), dtype).reshape(chunk.n_tok, self.mirror.n_embd)
        ran = self.mirror.run(residual.astype(np.float32, copy=False), chunk.pos0, want, gone)
        self.n_chunks += 1
        return ran, 1000 * (self._clock() - start)


def _blob(sections: list[RowSection]) -> Payload:
    """A ROWS blob that fits a frame. Raises EngineError when it does not."""
    blob = encode_rows(sections)
    if blob.n_bytes > FRAME_BYTES_MAX - 64:
        raise EngineError(
            f"{blob.n_bytes} bytes of rows do not fit a frame of {FRAME_BYTES_MAX}; ask in ranges"
        )
    return blob


def _output(ran: TailRun) -> Payload:
    """Logits, then the ROWS blob if there is anything in it."""
    pieces = [] if ran.logits is None else [ran.logits]
    return Payload(*pieces, *(_blob(ran.sections).parts if ran.sections else ()))
