"""The worker's service with a device's slowness and faults in it: everything else is device.service's own.

Runs on the compute thread. Made by device.worker when something is emulated.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from common.errors import FingerprintError, OutOfMemoryError, RemoteProtocolError
from common.wire import base_frames as base
from common.wire import extension_frames as ext
from common.wire.fingerprint import difference, fingerprint
from common.wire.frames import Frame
from device.emulator.link import FRAME_OF
from device.emulator.stand_in import StandIn
from device.mirror import TailMirror, TailRun
from device.service import Answer, TailService, Terms

OTHER_VERSION = ext.EXTENSION_VERSION + 1
OTHER_TEXT = "arch another\n"


class EmulatedService(TailService):
    """A TailService that computes as slowly as `stand_in` says and goes wrong when it says."""

    def __init__(self, mirror: TailMirror, terms: Terms, stand_in: StandIn) -> None:
        super().__init__(mirror, terms)
        self._stand_in = stand_in

    def answer(self, frame: Frame, seq: int, queue_s: float, gone: Callable[[], bool]) -> Answer:
        self._stand_in.thaw.wait()
        self._stand_in.gate.moment("during", FRAME_OF[frame.TYPE])
        self._stand_in.thaw.wait()
        return super().answer(frame, seq, queue_s, gone)

    def _hello3(self, hello: ext.Hello3) -> Answer:
        if self._stand_in.spoils_greeting("wrong-version"):
            raise RemoteProtocolError(
                f"the host speaks extension versions {hello.ext_min} to {hello.ext_max} and this worker "
                f"{OTHER_VERSION}: run the same version of outrigger on both"
            )
        answer = super()._hello3(hello)
        if not self._stand_in.spoils_greeting("foreign-model"):
            return answer
        text = OTHER_TEXT + hello.text
        assert isinstance(answer.frame, ext.Hello3Ok)
        frame = replace(answer.frame, text=text, fingerprint=fingerprint(text))
        return Answer(frame, FingerprintError(difference(hello.text, text)))

    def _run(
        self, chunk: base.Chunk | ext.Chunk2, want: int, gone: Callable[[], bool]
    ) -> tuple[TailRun, float]:
        if self._stand_in.memory_fails():
            raise OutOfMemoryError("the emulated device has no memory for this chunk")
        ran, compute_ms = super()._run(chunk, want, gone)
        longer_ms = compute_ms * (self._stand_in.slow - 1)
        time.sleep(longer_ms / 1000)
        return ran, compute_ms + longer_ms
