"""FrozenPages: the pages of one conversation's attention layers, built in the background and asked when ready.

    pages = FrozenPages(settings, template, runtime, rows, facts, folder)
    pages.start()                                   # the builder
    pages.held(layer, n_keys)                       # as keys arrive; complete pages are queued
    asked = pages.ask(layer, queries, n_tokens, n_keys)
    ...                                             # ordinary kernels attend every key outside asked.pages meanwhile
    partials = asked.wait()                         # page -> accumulator; a missing page goes to ordinary kernels too

Knows nothing of links, journals and merging. Called by the worker.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from device.coreml.frozen import plan
from device.coreml.frozen.builder import Builder, Rows
from device.coreml.frozen.load_policy import Cause, DeviceFacts
from device.coreml.frozen.plan import PageId, PageState
from device.coreml.frozen.report import FrozenReport, Histogram
from device.coreml.frozen.runtime import PageRuntime
from device.coreml.frozen.table import Entry, FrozenSettings, PageTable
from device.coreml.page_program import PagePartial
from device.coreml.template import Template

ERRORS_KEPT = 8
STOP_MARGIN_S = 30.0


class Asked:
    """A query on its way through the pages; `pages` are the numbers it was given to, oldest first."""

    def __init__(self, pages: tuple[int, ...], future: Future[dict[int, PagePartial]] | None) -> None:
        self.pages, self._future = pages, future
        self.ended_s: float | None = None
        """When the last page had answered, by time.perf_counter."""
        if future is not None:
            future.add_done_callback(self._ended)

    def _ended(self, _: Future[dict[int, PagePartial]]) -> None:
        self.ended_s = time.perf_counter()

    def wait(self) -> dict[int, PagePartial]:
        """Accumulators by page. A page that failed is missing: its keys are still to be attended."""
        return {} if self._future is None else self._future.result()


class FrozenPages:
    """See the head of this file. Methods may be called from any thread."""

    def __init__(
        self,
        settings: FrozenSettings,
        template: Template,
        runtime: PageRuntime,
        rows: Callable[[int, int, int], Rows],
        facts: Callable[[], DeviceFacts],
        folder: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`rows(layer, first, n)` gives stored rows. `folder` is ours alone: what an earlier run left is removed."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.settings, self.template, self._folder, self._clock = settings, template, folder, clock
        self._engine = runtime.engine
        # One thread asks and closes: a page is never closed under a query.
        self._asking = ThreadPoolExecutor(1, "frozen-ask")
        self.table = PageTable(settings, template.geometry, lambda page: self._asking.submit(page.close))
        self.builder = Builder(self.table, template, runtime, rows, facts, self._wait_idle, clock, folder)
        self._n_querying = 0
        self._closed = False
        self._keys_served = 0
        self._asks = Histogram()

    def start(self) -> None:
        """Start building in the background."""
        self.builder.start()

    def held(self, layer: int, n_keys: int) -> None:
        """The layer holds keys [0, n_keys) now."""
        self.table.held(layer, n_keys)

    def truncate(self, n_keys: int) -> None:
        """Every layer keeps its first `n_keys` keys."""
        self.table.truncate(n_keys)

    def free(self, n_bytes: int) -> int:
        """Keys need memory: give pages up, the highest first. Returns the bytes given back."""
        return self.table.free(n_bytes)

    def ask(self, layer: int, queries: np.ndarray, n_tokens: int, n_keys: int, first_page: int = 0) -> Asked:
        """Ask the ready pages of a layer about scaled queries f32 [n_head_kv, rows, head_dim_k]; does not wait.

        The query is for the keys from page `first_page` on up to `n_keys`. `n_tokens` decides the share of these that
        pages serve; rows are split as the program needs.
        """
        with self.table.changed:
            ready = [i.page for i in self.table.in_state(PageState.READY) if i.layer == layer]
            page_tokens = self.template.geometry.page_tokens
            pages = plan.pages_to_ask(ready, n_keys, n_tokens, page_tokens, self.settings.shares, first_page)
            if not pages or self._closed:
                return Asked((), None)
            self._n_querying += 1
            entries = [(page, self.table.entries[PageId(page, layer)]) for page in pages]
            return Asked(pages, self._asking.submit(self._ask_all, entries, queries))

    def _ask_all(self, entries: list[tuple[int, Entry]], queries: np.ndarray) -> dict[int, PagePartial]:
        answers = {}
        try:
            for page, entry in entries:
                began_s = self._clock()
                answer = self._ask_one(entry, queries)
                if answer is not None:
                    answers[page] = answer
                    entry.seconds.add(self._clock() - began_s)
                    self._asks.add(self._clock() - began_s)
                    self._keys_served += self.template.geometry.page_tokens
            return answers
        finally:
            with self.table.changed:
                self._n_querying -= 1
                self.table.changed.notify_all()

    def _ask_one(self, entry: Entry, queries: np.ndarray) -> PagePartial | None:
        """One page, in blocks of as many rows as the program takes. A failure takes the page out of use."""
        loaded, n = entry.loaded, self.template.geometry.n_rows
        if loaded is None:  # dropped or truncated since
            return None
        blocks = []
        try:
            for first in range(0, queries.shape[1], n):
                block = queries[:, first : first + n]
                key = (first, block.shape[1])
                answer = loaded.ask(block, entry.centres.get(key))
                entry.centres[key] = answer.m
                blocks.append(answer)
        except (
            Exception
        ) as error:  # whatever a runtime throws: these keys go to ordinary kernels, the query goes on
            self.table.fail(entry, Cause.OTHER, f"{type(error).__name__}: {error}")
            return None
        return PagePartial(*(np.concatenate(parts, axis=1) for parts in zip(*blocks, strict=True)))

    def _wait_idle(self) -> None:
        with self.table.changed:
            self.table.changed.wait_for(lambda: self._n_querying == 0 or self._closed)

    def report(self) -> FrozenReport:
        """A snapshot for the bridge."""
        with self.table.changed:
            entries = list(self.table.entries.items())
            states = Counter(e.state.value for _, e in entries)
            failed = [e for _, e in entries if e.state is PageState.FAILED]
            return FrozenReport(
                pages={state.value: states[state.value] for state in PageState},
                failed=dict(Counter(str(e.cause) for e in failed)),
                first_errors=tuple(e.text for e in failed)[:ERRORS_KEPT],
                keys_served=self._keys_served,
                asks={self._engine: self._asks},
                page_mean_s={(i.layer, i.page): e.seconds.mean_s for i, e in entries if e.seconds.count},
                builds=self.builder.builds,
                build_seconds=self.builder.build_seconds,
                postponed=self.builder.postponed,
            )

    def close(self) -> None:
        """Stop building, close every page, remove the files. A load that hangs is left to itself."""
        with self.table.changed:
            self._closed = True
        self.builder.stop(self.settings.limits.deadline_s + STOP_MARGIN_S)
        self.table.clear()
        self._asking.shutdown(wait=True)
        shutil.rmtree(self._folder, ignore_errors=True)
