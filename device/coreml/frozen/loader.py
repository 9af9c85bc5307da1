"""Performs one attempt to load a page: in a thread of its own with a deadline, then the golden question.

Loading cannot be interrupted: an attempt that passes its deadline is left to itself, and `Loader.stuck` says so until
it returns; its page is then closed, never used. Decides nothing else. Called by the builder and `device-check`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.errors import OutriggerError, PageLoadError
from device.coreml.accuracy import row_errors
from device.coreml.frozen.load_policy import Attempt, Cause, LoadLimits, judge
from device.coreml.frozen.runtime import KernelPage, LoadedPage, PageRuntime
from device.coreml.page_program import PagePartial
from device.coreml.page_rows import PageConstants
from device.coreml.template import Template

GOLDEN_ROWS = 4


@dataclass(frozen=True)
class Golden:
    """A question and its right answer, computed from the page's own constants by ordinary kernels."""

    queries: np.ndarray  # f32 [n_head_kv, n, head_dim_k]
    answer: PagePartial

    @classmethod
    def of(cls, constants: PageConstants) -> Golden:
        g = constants.geometry
        n = min(GOLDEN_ROWS, g.n_rows)
        rng = np.random.default_rng(g.page_tokens)
        queries = rng.standard_normal((g.n_head_kv, n, g.head_dim_k), dtype=np.float32) / np.sqrt(
            g.head_dim_k
        )
        return cls(queries, KernelPage(g, constants.by_name()).ask(queries))

    def error(self, found: PagePartial) -> float:
        """Worst of the relative output errors and the log-sum-exp errors."""
        right = self.answer.o.astype(np.float64) / self.answer.l[..., None]
        lse = self.answer.m + np.log(self.answer.l.astype(np.float64))
        return max(row_errors(found, (right, lse)))


class Loader:
    """One attempt at a time. `clock` gives seconds; `thread` results are handed over through a condition."""

    def __init__(
        self, runtime: PageRuntime, limits: LoadLimits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.runtime, self.limits, self.clock = runtime, limits, clock
        self._hung: threading.Thread | None = None

    @property
    def stuck(self) -> bool:
        """Whether an attempt that passed its deadline is still running; nothing else may be loaded meanwhile."""
        return self._hung is not None and self._hung.is_alive()

    def attempt(self, template: Template, path: Path, golden: Golden) -> tuple[Attempt, LoadedPage | None]:
        """Load `path` and ask the golden question. Never raises for what a device may do; leftovers are cleaned."""
        assert not self.stuck, "one attempt at a time"
        began_s, began_unix_s = self.clock(), time.time()
        page, failure = self._load(template, path, began_unix_s)
        if page is not None:
            failure = self._check(page, golden)
            if failure is not None:
                page.close()
                page = None
        ended_s = self.clock()
        cause, text = failure or (None, "")
        if failure is not None and not self.stuck:
            self.runtime.clean(path, began_unix_s)
        return Attempt(cause, text, ended_s, ended_s - began_s), page

    def _load(
        self, template: Template, path: Path, began_unix_s: float
    ) -> tuple[LoadedPage | None, tuple[Cause, str] | None]:
        outcome: list[LoadedPage | PageLoadError | Exception] = []
        late = threading.Event()
        handing_over = threading.Lock()

        def run() -> None:
            try:
                result: LoadedPage | Exception = self.runtime.load(template, path)
            except Exception as error:  # whatever the device throws is an attempt that failed
                result = error
            with handing_over:
                outcome.append(result)
                if late.is_set():  # nobody waits any more: give back what it took
                    if not isinstance(result, Exception):
                        result.close()
                    self.runtime.clean(path, began_unix_s)

        thread = threading.Thread(target=run, name="page-load", daemon=True)
        thread.start()
        thread.join(self.limits.deadline_s)
        with handing_over:
            if not outcome:
                late.set()
                self._hung = thread
                return None, (Cause.HANG, f"no answer within {self.limits.deadline_s:g} s")
        result = outcome[0]
        if isinstance(result, PageLoadError):
            known = result.cause in set(Cause)
            return None, (Cause(result.cause) if known else Cause.OTHER, str(result))
        if isinstance(result, Exception):
            return None, (Cause.OTHER, f"{type(result).__name__}: {result}")
        return result, None

    def _check(self, page: LoadedPage, golden: Golden) -> tuple[Cause, str] | None:
        began_s = self.clock()
        try:
            answer = page.ask(golden.queries)
        except OutriggerError as error:
            return Cause.WRONG, str(error)
        except Exception as error:  # a runtime may refuse its first question in words of its own
            return Cause.OTHER, f"{type(error).__name__}: {error}"
        ask_s = self.clock() - began_s
        return judge(page.placement, self.runtime.placement, ask_s, golden.error(answer), self.limits)
