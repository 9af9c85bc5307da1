"""The worker's service for pages with a device's slowness and faults in it: the rest is device.page_service's own.

Runs under the desk's lock. Made by device.worker when something is emulated.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from common.errors import OutOfMemoryError
from common.wire import attention_base_frames as base
from common.wire import attention_extension_frames as ext
from common.wire.frames import Frame
from device.emulator.link import PAGE_WORDS
from device.emulator.stand_in import StandIn
from device.page_service import PageService

QUERIES = (ext.Attn2Ok, base.AttnOk)


class EmulatedPageService(PageService):
    """A PageService that attends as slowly as `stand_in` says and goes wrong when it says."""

    def __init__(self, stand_in: StandIn, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._stand_in = stand_in

    def answer(self, frame: Frame, seq: int, queue_s: float) -> Frame:
        self._stand_in.thaw.wait()
        self._stand_in.gate.moment("during", PAGE_WORDS.frame_of[frame.TYPE])
        self._stand_in.thaw.wait()
        if isinstance(frame, ext.Append2 | base.Append) and self._stand_in.memory_fails():
            raise OutOfMemoryError(f"out of memory at {self.n_keys} keys: the emulated device has no more")
        answer = super().answer(frame, seq, queue_s)
        if not isinstance(answer, QUERIES):
            return answer
        longer_ms = answer.total_ms * (self._stand_in.slow - 1)
        time.sleep(longer_ms / 1000)
        return replace(answer, total_ms=answer.total_ms + longer_ms)
