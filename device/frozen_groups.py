"""FrozenGroups: frozen pages as whoever attends pages wants them: groups of KV pages in, accumulators out.

One frozen page is one group of KV pages of one layer. A query is given to the groups whose programs are ready, and
comes back while ordinary kernels attend every other group; a group that failed meanwhile is missing from the answer
and is attended like the others.

    frozen = open_frozen("interpreter", shape, rows, folder, budget_bytes)
    frozen.held(layer, n_keys)                                   # as rows arrive
    asked = frozen.ask(layer, q, scale, n_tokens, range(0, 5))   # asked.groups: do not attend these
    parts = asked.complete(range(0, 5), attend_here)             # all five; or wait() for what it was given to

Knows device.coreml; knows nothing of links, and nothing of where rows are kept. Called by the page store and by
frozen_source.py.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from common.attention.partial import PartialAttention
from common.config import WorkerSettings
from common.errors import SettingError
from common.limits import MIB
from common.wire.frozen import PAGES_TOLD_MAX, FrozenReport
from device import facts
from device.coreml.frozen import plan
from device.coreml.frozen.builder import Rows
from device.coreml.frozen.load_policy import DeviceFacts, LoadLimits
from device.coreml.frozen.pages import Asked, FrozenPages
from device.coreml.frozen.runtime import InterpreterRuntime, KernelRuntime, PageRuntime
from device.coreml.frozen.table import FrozenSettings
from device.coreml.geometry import PAGE_TOKENS_MAX, PAGE_TOKENS_STEP, PageGeometry
from device.coreml.template import find_template

FrozenMode = Literal["off", "interpreter", "coreml", "kernels"]
RowsOf = Callable[[int, int, int], Rows]
"""(layer, first key, n) -> (K rows u8 [n, row_bytes], V rows u8 [n, row_bytes], ggml type), on the builder's thread.
Raises EngineError when the rows are gone."""

MANY_TOKENS = 8
"""Tokens from which on a query takes the larger share."""
ELSEWHERE = LoadLimits(disk_reserve_bytes=256 * MIB, ask_s_max=3600.0, deadline_s=3600.0)
"""For runtimes without Core ML's compiler, which writes a gigabyte. Time is no reason against an oracle: a machine may
sleep meanwhile."""


@dataclass(frozen=True)
class FrozenShape:
    """The groups of a model: `layers` attend to everything; `n_rows` query rows a KV head fit one call of a program."""

    layers: tuple[int, ...]
    n_head_kv: int
    head_dim: int
    n_rows: int
    group_tokens: int


class FrozenAnswer:
    """A query on its way. `groups` are the numbers it was given to, the oldest first: all others are to be attended."""

    def __init__(self, asked: Asked, group_tokens: int) -> None:
        self.groups = asked.pages
        self.keys = 0
        """Keys that frozen pages answered for, once awaited."""
        self.ms = 0.0
        """Milliseconds from the question to the last answer, once awaited."""
        self._asked, self._group_tokens, self._began_s = asked, group_tokens, time.perf_counter()

    def wait(self) -> dict[int, PartialAttention]:
        """Accumulators f32 [n_head_kv, n_rows] by group. A group that failed is missing: attend it."""
        answers = self._asked.wait()
        if answers:
            self.keys = len(answers) * self._group_tokens
            self.ms = 1000 * ((self._asked.ended_s or time.perf_counter()) - self._began_s)
        return {page: PartialAttention(each.m, each.l, each.o) for page, each in answers.items()}

    def complete(
        self, groups: range, attend_here: Callable[[range], Sequence[PartialAttention]]
    ) -> list[PartialAttention]:
        """The partials of all `groups`, the oldest first.

        `attend_here` attends what was not given away, a run of consecutive groups at a time, while programs compute;
        then what failed meanwhile.
        """
        parts: dict[int, PartialAttention] = {}
        for run in runs_of(set(groups) - set(self.groups)):
            parts |= dict(zip(run, attend_here(run), strict=True))
        parts |= self.wait()
        for run in runs_of(set(groups) - set(parts)):
            parts |= dict(zip(run, attend_here(run), strict=True))
        return [parts[group] for group in groups]


def runs_of(numbers: set[int]) -> list[range]:
    """The numbers as ranges of consecutive ones, in order."""
    runs: list[range] = []
    for number in sorted(numbers):
        if runs and runs[-1].stop == number:
            runs[-1] = range(runs[-1].start, number + 1)
        else:
            runs.append(range(number, number + 1))
    return runs


class FrozenGroups:
    """See the head of this file. Made by `open_frozen`; methods may be called from any thread."""

    def __init__(self, pages: FrozenPages, shape: FrozenShape, engine: str) -> None:
        self.shape, self.engine = shape, engine
        self._pages = pages

    def start(self) -> None:
        """Build in the background from now on."""
        self._pages.start()

    def build_all(self) -> None:
        """Build whatever is queued, now and in this thread: for proofs that must not depend on time."""
        while self._pages.builder.build_next() == 0:
            pass

    def held(self, layer: int, n_keys: int) -> None:
        """The layer holds the keys [0, n_keys); complete groups among them are queued as far as they are wanted."""
        self._pages.held(layer, n_keys)

    def truncate(self, n_keys: int) -> None:
        """Keys from n_keys on are about to go: groups with one of them are forgotten in every layer."""
        self._pages.truncate(n_keys)

    def free(self, n_bytes: int) -> int:
        """Keys need memory: gives programs up, the highest group first. Returns the bytes given back."""
        return self._pages.free(n_bytes)

    def ask(self, layer: int, q: np.ndarray, scale: float, n_tokens: int, groups: range) -> FrozenAnswer:
        """Gives a query f32 [n_head_kv, n_rows, head_dim], unscaled, to ready groups of `groups`; does not wait.

        All rows must see all keys of these groups. `n_tokens` decides the share of their keys that programs serve.
        """
        scaled = q * np.float32(scale)
        asked = self._pages.ask(
            layer, scaled, n_tokens, groups.stop * self.shape.group_tokens, first_page=groups.start
        )
        return FrozenAnswer(asked, self.shape.group_tokens)

    def partials(
        self, layer: int, q: np.ndarray, scale: float, n_tokens: int, group_first: int, group_end: int
    ) -> dict[int, PartialAttention]:
        """`ask` and `wait` in one: for callers with nothing to do meanwhile."""
        return self.ask(layer, q, scale, n_tokens, range(group_first, group_end)).wait()

    def report(self) -> FrozenReport:
        """For `mem` and the bridge's metrics."""
        told = self._pages.report()
        asks = told.asks[self.engine]
        slowest = sorted(told.page_mean_s.items(), key=lambda page: -page[1])[:PAGES_TOLD_MAX]
        return FrozenReport(
            engine=self.engine,
            pages=told.pages,
            failed=told.failed,
            first_errors=told.first_errors,
            keys=told.keys_served,
            builds=told.builds,
            build_s=round(told.build_seconds, 6),
            asks=tuple(asks.counts),
            asks_s=round(asks.total_s, 6),
            page_ms=tuple((layer, page, round(1000 * mean_s, 3)) for (layer, page), mean_s in slowest),
            postponed=told.postponed or "",
        )

    def close(self) -> None:
        """Stops building, closes every program, removes the files."""
        self._pages.close()


def open_frozen(
    mode: FrozenMode,
    shape: FrozenShape,
    rows: RowsOf,
    folder: Path,
    budget_bytes: int,
    shares: Sequence[tuple[int, float]] = plan.SHARES,
    runtime: PageRuntime | None = None,
) -> FrozenGroups | None:
    """Frozen pages by one kind of runtime, not building yet; None for "off". `folder` keeps templates and pages.

    `runtime` takes the place of the mode's own. Raises SettingError where a group cannot be a program, PageLoadError
    where the runtime is not to be had, PackageError without coremltools.
    """
    if mode == "off":
        return None
    geometry = _geometry(shape)
    runtime = runtime or _runtime(mode, folder)
    limits = LoadLimits() if mode == "coreml" else ELSEWHERE
    settings = FrozenSettings(shape.layers, budget_bytes, tuple(shares), limits)
    template = find_template(geometry, folder / "templates")
    pages = FrozenPages(settings, template, runtime, rows, lambda: _facts(folder), folder / "pages")
    return FrozenGroups(pages, shape, runtime.engine)


def open_by_settings(
    settings: WorkerSettings, shape: FrozenShape, rows: RowsOf, folder: Path
) -> FrozenGroups | None:
    """`open_frozen` as the worker's settings say, building in the background; None when they say off. Raises as it."""
    shares = ((1, settings.frozen_share), (MANY_TOKENS, settings.frozen_share_many))
    groups = open_frozen(settings.frozen, shape, rows, folder, settings.frozen_mib * MIB, shares)
    if groups is not None:
        groups.start()
    return groups


def _geometry(shape: FrozenShape) -> PageGeometry:
    if shape.group_tokens % PAGE_TOKENS_STEP or not PAGE_TOKENS_STEP <= shape.group_tokens <= PAGE_TOKENS_MAX:
        raise SettingError(
            f"a group of {shape.group_tokens} keys cannot be a frozen page: page_tokens times group_pages must be a "
            f"multiple of {PAGE_TOKENS_STEP} up to {PAGE_TOKENS_MAX}"
        )
    return PageGeometry(shape.n_head_kv, shape.head_dim, shape.head_dim, shape.n_rows, shape.group_tokens)


def _runtime(mode: FrozenMode, folder: Path) -> PageRuntime:
    if mode == "interpreter":
        return InterpreterRuntime()
    if mode == "kernels":
        return KernelRuntime()
    from device.coreml.frozen.coreml_runtime import CoreMLRuntime  # refuses to start off Apple systems

    return CoreMLRuntime(folder / "compiled")


def _facts(folder: Path) -> DeviceFacts:
    memory_bytes = facts.memory()["avail_mb"] * MIB
    return DeviceFacts(shutil.disk_usage(folder).free, memory_bytes, facts.thermal())
