"""The one builder of frozen pages: rows to constants, constants to disk, disk to a loaded page.

Two builders make every load three times slower on the device, so there is one. Between its steps it waits until no
query runs; a step that has begun is finished (the longest of our own takes tens of milliseconds, the load itself runs
in the device's compiler). Called by FrozenPages, which starts it; tests call `build_next` themselves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from common.errors import EngineError, PageLoadError
from device.coreml.frozen import plan
from device.coreml.frozen.load_policy import (
    Attempt,
    Cause,
    DeviceFacts,
    GiveUp,
    Load,
    WaitUntil,
    decide,
    postponed,
)
from device.coreml.frozen.loader import Golden, Loader
from device.coreml.frozen.plan import PageId, PageState
from device.coreml.frozen.runtime import PageRuntime
from device.coreml.frozen.table import Entry, PageTable
from device.coreml.page_rows import PageConstants
from device.coreml.template import Template

IDLE_POLL_S = 2.0
"""How often a builder with nothing to do looks at the device again."""

Rows = tuple[np.ndarray, np.ndarray, int]
"""K rows u8 [n, row_bytes], V rows u8 [n, row_bytes], ggml type."""


class Builder:
    """`rows(layer, first, n)` gives stored rows, `facts()` the state of the device, `wait_idle()` returns when no query
    runs, `clock()` gives seconds. `folder` takes the pages' files."""

    def __init__(
        self,
        table: PageTable,
        template: Template,
        runtime: PageRuntime,
        rows: Callable[[int, int, int], Rows],
        facts: Callable[[], DeviceFacts],
        wait_idle: Callable[[], None],
        clock: Callable[[], float],
        folder: Path,
    ) -> None:
        self.table, self.template, self.runtime = table, template, runtime
        self._rows, self._facts, self._wait_idle, self._clock, self._folder = (
            rows,
            facts,
            wait_idle,
            clock,
            folder,
        )
        self._loader = Loader(runtime, table.settings.limits, clock)
        self._constants = PageConstants.allocate(template.geometry)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self.builds, self.build_seconds = 0, 0.0
        self.postponed: str | None = None
        """Why nothing is built at the moment, if the device is the reason."""

    def start(self) -> None:
        assert self._thread is None, "there is one builder"
        self._thread = threading.Thread(target=self._run, name="frozen-build", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        self._stopping.set()
        with self.table.changed:
            self.table.changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stopping.is_set():
            wait_s = self.build_next()
            with self.table.changed:
                if wait_s and not self._stopping.is_set():
                    self.table.changed.wait(wait_s)

    def build_next(self) -> float:
        """Build at most one page; returns the seconds after which to look again (0: at once)."""
        chosen, wait_s = self._choose()
        if chosen is None:
            return wait_s
        page_id, entry = chosen
        began_s = self._clock()
        try:
            self._build(page_id, entry)
        except EngineError as error:
            self.table.fail(entry, Cause.ROWS, str(error))
        except OSError as error:
            self.table.fail(entry, Cause.DISK, str(error))
        except PageLoadError as error:  # the template itself did not compile
            self._ended(entry, Attempt(Cause.COMPILE, str(error), self._clock(), self._clock() - began_s))
        self.builds += 1
        self.build_seconds += self._clock() - began_s
        return 0.0

    def _choose(self) -> tuple[tuple[PageId, Entry] | None, float]:
        """The next page to build, or how long to wait. Pages that are given up become failed here."""
        facts, limits, now_s = self._facts(), self.table.settings.limits, self._clock()
        page_bytes = self.template.geometry.weight_bytes
        if facts.memory_free_bytes < limits.memory_margin_bytes:  # keys come first
            self.table.free(limits.memory_margin_bytes - facts.memory_free_bytes)
        elif plan.may_rebuild(facts.memory_free_bytes, limits.memory_margin_bytes, page_bytes):
            self.table.requeue_dropped()
        short = postponed(facts, page_bytes, limits)
        self.postponed = "a load hangs" if self._loader.stuck else short.text if short else None
        wait_s = IDLE_POLL_S
        if self.postponed:
            return None, wait_s
        with self.table.changed:
            for page_id in self.table.in_state(PageState.QUEUED):
                entry = self.table.entries[page_id]
                step = decide(entry.attempts, facts, page_bytes, limits, now_s)
                if isinstance(step, Load):
                    entry.state = PageState.BUILDING
                    return (page_id, entry), 0.0
                if isinstance(step, WaitUntil):
                    wait_s = min(wait_s, max(step.at_s - now_s, 0.01))
                elif isinstance(step, GiveUp):
                    self.table.fail(entry, step.cause, step.text)
        return None, wait_s

    def _build(self, page_id: PageId, entry: Entry) -> None:
        page_tokens = self.template.geometry.page_tokens
        self._wait_idle()
        k_rows, v_rows, ggml_type = self._rows(page_id.layer, page_id.page * page_tokens, page_tokens)
        self._constants.fill(k_rows, v_rows, ggml_type)
        golden = Golden.of(self._constants)
        self._wait_idle()
        path = self._folder / f"layer-{page_id.layer}-page-{page_id.page}-{self.builds}{self.runtime.suffix}"
        self.runtime.write(self.template, self._constants, path, self.table.take_slot())
        self._wait_idle()
        attempt, loaded = self._loader.attempt(self.template, path, golden)
        with self.table.changed:
            entry.path, entry.loaded = path, loaded
            self._ended(entry, attempt)
            if self.table.entries.get(page_id) is not entry:
                self.table.release(entry)  # truncated while it was built

    def _ended(self, entry: Entry, attempt: Attempt) -> None:
        """Record an attempt. A failed page is queued again: `decide` says whether there is another attempt."""
        with self.table.changed:
            entry.attempts.append(attempt)
            if attempt.cause is None:
                entry.state = PageState.READY
            else:
                self.table.release(entry)
                entry.state = PageState.QUEUED
            self.table.changed.notify_all()
