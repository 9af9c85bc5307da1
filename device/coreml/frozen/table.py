"""The table of frozen pages: which page is in which state, what it failed by, where its files are.

One lock guards it; the builder, the queries and the worker meet here and nowhere else. It applies what `plan` decides
and decides nothing itself. Called by FrozenPages and the builder.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from device.coreml.frozen import plan
from device.coreml.frozen.load_policy import Attempt, Cause, LoadLimits
from device.coreml.frozen.plan import PageId, PageState
from device.coreml.frozen.report import Histogram
from device.coreml.frozen.runtime import LoadedPage
from device.coreml.geometry import PageGeometry


@dataclass(frozen=True)
class FrozenSettings:
    """Layers that have pages, memory they may take together, and the constants of the policy."""

    layers: tuple[int, ...]
    budget_bytes: int
    shares: tuple[tuple[int, float], ...] = plan.SHARES
    limits: LoadLimits = field(default_factory=LoadLimits)

    def __post_init__(self) -> None:
        plan.check_shares(self.shares)


@dataclass
class Entry:
    """One page of the table."""

    state: PageState = PageState.QUEUED
    attempts: list[Attempt] = field(default_factory=list)
    cause: Cause | None = None
    text: str = ""
    """What it failed by: the first error's words."""
    path: Path | None = None
    loaded: LoadedPage | None = None
    centres: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    """(first row, rows) of a block of queries -> its last maxima f32 [n_head_kv, rows]."""
    seconds: Histogram = field(default_factory=Histogram)


class PageTable:
    """Entries by PageId. Methods take the lock, which may be held already; wait on `changed` for news."""

    def __init__(
        self, settings: FrozenSettings, geometry: PageGeometry, close: Callable[[LoadedPage], None]
    ) -> None:
        """`close` gives a loaded page back once no query can be using it."""
        self.settings, self.geometry = settings, geometry
        self.changed = threading.Condition(threading.RLock())
        self.entries: dict[PageId, Entry] = {}
        self._close = close
        self._slots: list[Path] = []

    def held(self, layer: int, n_keys: int) -> None:
        """Queue the pages of a layer that are complete, within budget, and worth having."""
        s = self.settings
        per_layer = plan.budget_pages(s.budget_bytes, self.geometry.weight_bytes, len(s.layers))
        with self.changed:
            for page in range(plan.pages_wanted(n_keys, self.geometry.page_tokens, per_layer, s.shares)):
                self.entries.setdefault(PageId(page, layer), Entry())
            self.changed.notify_all()

    def truncate(self, n_keys: int) -> None:
        """Forget every page that holds a key at or above `n_keys`."""
        with self.changed:
            for page_id in plan.truncated(self.entries, n_keys, self.geometry.page_tokens):
                self.release(self.entries.pop(page_id))

    def free(self, n_bytes: int) -> int:
        """Drop ready pages, the highest first, until `n_bytes` are given back. Returns the bytes given back."""
        freed = 0
        with self.changed:
            for page_id in plan.drop_order(self.in_state(PageState.READY)):
                if freed >= n_bytes:
                    break
                self.release(self.entries[page_id])
                self.entries[page_id].state = PageState.DROPPED
                freed += self.geometry.weight_bytes
        return freed

    def requeue_dropped(self) -> None:
        """Memory is ample again: the lowest dropped page may be built once more."""
        with self.changed:
            dropped = self.in_state(PageState.DROPPED)
            if dropped:
                self.entries[min(dropped)] = Entry()

    def fail(self, entry: Entry, cause: Cause, text: str) -> None:
        """Take a page out of use for good."""
        with self.changed:
            self.release(entry)
            entry.state, entry.cause, entry.text = PageState.FAILED, cause, text

    def in_state(self, state: PageState) -> list[PageId]:
        """Ids in one state, in the order of building."""
        with self.changed:
            return sorted(page_id for page_id, entry in self.entries.items() if entry.state is state)

    def release(self, entry: Entry) -> None:
        """Close a page and keep its files as a slot for the next one."""
        with self.changed:
            if entry.loaded is not None:
                self._close(entry.loaded)
                entry.loaded = None
            if entry.path is not None:
                self._slots.append(entry.path)
                entry.path = None

    def take_slot(self) -> Path | None:
        """Files of a page that nobody needs any more, if there are any."""
        with self.changed:
            return self._slots.pop() if self._slots else None

    def clear(self) -> None:
        with self.changed:
            for entry in self.entries.values():
                self.release(entry)
            self.entries.clear()
            self.changed.notify_all()
