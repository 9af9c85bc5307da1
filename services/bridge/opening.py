"""The first words after the greeting: a few PINGs and two chunks of zeros, so that pace and round trip are known.

A deadline for the first chunk of a read must not be a guess of minutes: the worker shows here how long a chunk takes.
The first of the two is slow for once (graphs are built), so the second counts. A worker of a known boot that was timed
before is only pinged. Pure: says what to send next and hears the answers; used by services.bridge.pump.
"""

from __future__ import annotations

import statistics

import numpy as np

from common.errors import WorkerRefusedError
from common.limits import UBATCH_TOKENS
from common.wire import base_frames as base
from common.wire import extension_frames as ext
from common.wire.frames import Frame
from common.wire.layout import Payload

PING_DATA = bytes(16)
PINGS = 9
CHUNKS = 2


class Opening:
    """One opening. `next` gives each frame to send when nothing is unanswered, None when all was said."""

    def __init__(self, n_embd: int, n_ctx: int, token_ms: float | None) -> None:
        """token_ms: the worker's pace, if it is known already; then no chunk is sent."""
        self.token_ms = token_ms
        self._n_tokens = min(UBATCH_TOKENS, n_ctx // CHUNKS)
        self._n_embd = n_embd
        self._round_trips_s: list[float] = []
        self._n_chunks = 0 if token_ms is None else CHUNKS
        self._emptied = token_ms is not None

    @property
    def rtt_us(self) -> float:
        """Median round trip, microseconds."""
        return 1e6 * statistics.median(self._round_trips_s)

    def next(self) -> Frame | None:
        """What to say now."""
        if len(self._round_trips_s) < PINGS:
            return base.Ping(len(PING_DATA), Payload(PING_DATA))
        if self._n_chunks < CHUNKS:
            zeros = Payload(np.zeros((self._n_tokens, self._n_embd), np.float32))
            return ext.Chunk2(self._n_chunks * self._n_tokens, self._n_tokens, base.DTYPE_F32, 0, zeros)
        return None if self._emptied else ext.Trim2(0)

    def took(self, answer: Frame, round_trip_s: float) -> None:
        """Hear the answer. Raises WorkerRefusedError when it is a refusal."""
        match answer:
            case base.Pong():
                self._round_trips_s.append(round_trip_s)
            case ext.Chunk2Ack():
                self._n_chunks += 1
                self.token_ms = answer.compute_ms / answer.n_tok
            case ext.Ok2():
                self._emptied = True
            case ext.Err2():
                raise WorkerRefusedError(f"the worker cannot run a chunk: {answer.text}")


class Paces:
    """What the last worker's pace was, in ms a token, as long as it is the same boot: layers are taken for alike."""

    def __init__(self) -> None:
        self._known: tuple[int, float] | None = None

    def keep(self, boot_id: int, n_layer: int, token_ms: float | None) -> None:
        """Remember what its n_layer layers take; None is not worth it."""
        if token_ms is not None:
            self._known = boot_id, token_ms / n_layer

    def of(self, boot_id: int, n_layer: int) -> float | None:
        """The pace of n_layer layers, if it is this worker's."""
        if self._known is None or self._known[0] != boot_id:
            return None
        return self._known[1] * n_layer
