"""Bus messages to frames of the cable and back. Pure; payloads pass through as the buffers they came in.

Used by services.bridge.pump, which knows which request an answer belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import (
    FingerprintError,
    HashMismatchError,
    ModelError,
    NonFiniteError,
    OutOfMemoryError,
    OutriggerError,
    PositionError,
    WorkerBusyError,
)
from common.wire import extension_frames as ext
from common.wire import messages as m
from common.wire.base_frames import DTYPE_F32
from common.wire.frames import Frame
from common.wire.layout import Payload

CAUSES = {
    OutOfMemoryError.code: "memory",
    PositionError.code: "range",
    NonFiniteError.code: "nonfinite",
    HashMismatchError.code: "damaged",
    WorkerBusyError.code: "busy",
    ModelError.code: "refused",
    FingerprintError.code: "refused",
}

Answer = tuple[m.BridgeToMacData, tuple[memoryview, ...]]
"""A bus message and its array frames."""


def to_frame(message: m.MacToBridgeData, arrays: Sequence[memoryview]) -> Frame:
    """The request as the worker hears it."""
    match message:
        case m.RunChunk():
            return ext.Chunk2(message.position, message.n_tokens, DTYPE_F32, message.want, Payload(arrays[0]))
        case m.PushRows():
            return ext.Sync2(message.flags, message.n_valid_after, Payload(arrays[0]))
        case m.PullRows():
            return ext.StateRange2(message.p0, message.p1, message.flags)
        case m.TakeSnapshot():
            return ext.Snapshot(message.n)
        case m.RewindMirror():
            return ext.Trim2(message.n)


def to_answer(asked: m.MacToBridgeData, answer: Frame, round_trip_s: float) -> Answer:
    """The worker's answer to `asked`, as the mac process hears it."""
    epoch, ticket = asked.link_epoch, asked.ticket
    match answer:
        case ext.Chunk2Ack():
            output, n_logit_bytes = answer.output.joined(), 4 * answer.n_logits
            blob, logits = output[n_logit_bytes:], output[:n_logit_bytes]
            done = m.ChunkDone(
                epoch,
                ticket,
                answer.n_tok,
                answer.compute_ms,
                answer.queue_ms,
                round_trip_ms=1000 * round_trip_s,
                blob_bytes=len(blob),
                n_logits=answer.n_logits,
            )
            return done, (blob, logits) if answer.n_logits else (blob,)
        case ext.StateData2():
            return m.RowsPulled(epoch, ticket, answer.blob.n_bytes), (answer.blob.joined(),)
        case ext.Ok2():
            return m.MirrorAt(epoch, ticket, answer.n_valid), ()
        case ext.Err2():
            cause = CAUSES.get(answer.code, "refused")
            return m.LinkFailed(epoch, ticket, answer.code, cause, answer.text), ()
    raise TypeError(f"{answer.NAME} answers nothing")


def failed(asked: m.MacToBridgeData, error: OutriggerError) -> m.LinkFailed:
    """The answer to a request that the worker will not answer."""
    return m.LinkFailed(asked.link_epoch, asked.ticket, error.code, cause_of(error), str(error))


def cause_of(error: OutriggerError) -> str:
    """One short word for counters and reports."""
    return getattr(error, "cause", None) or CAUSES.get(error.code, "damaged")


BYTE_KINDS = ("residual", "rows", "pages", "queries", "control")


def byte_kind(frame_type: int) -> str:
    """Label of link_bytes_total."""
    if frame_type == ext.Chunk2.TYPE:
        return "residual"
    if frame_type in (ext.Chunk2Ack.TYPE, ext.Sync2.TYPE, ext.StateData2.TYPE):
        return "rows"
    return "control"
