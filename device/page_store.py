"""PageStore: the pages that a worker holds for a host, within a budget of bytes, and attention over them.

A cache and never the only copy: whatever is dropped here, the host has elsewhere. Pages of a layer are the positions
[0, n_keys) without gaps, whole pages of ours (`put_piece`) or rows of base hosts (`append_rows`). Attention runs on the
host's own kernels, and groups are folded in the one order, so that its bits are the host's. Knows no frames; used by
page_service.py, by one thread at a time (rows are also read by the builder of frozen pages, behind the lock).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import xxhash

from common.attention.order import fold_groups
from common.attention.partial import PartialAttention, fold_all
from common.engine.kv_source import QueryRows
from common.engine.page_graph import PageRef
from common.engine.page_kernel import PageKernel
from common.errors import (
    EngineError,
    HashMismatchError,
    NonFiniteError,
    OutOfMemoryError,
    PositionError,
    UnsupportedOperationError,
)
from common.ggml.backend import Backend
from common.ggml.tensor import F16
from common.limits import N_CTX_MAX
from common.state.pages import n_pages
from device.coreml.frozen.builder import Rows
from device.frozen_groups import FrozenGroups
from device.held_group import HeldForm, HeldGroup

OpenFrozen = Callable[[HeldForm, Callable[[int, int, int], Rows]], FrozenGroups | None]


@dataclass(frozen=True)
class Granted:
    """What the worker makes room for: `n_keys` keys of every layer were kept from before."""

    n_bytes: int
    tokens_max: int
    n_keys: int


@dataclass(frozen=True)
class HeldAnswer:
    """Accumulators, oldest groups first, and how they came about."""

    parts: list[PartialAttention]
    n_keys: int
    n_keys_frozen: int
    frozen_ms: float
    generic_ms: float


@dataclass
class _Coming:
    """A page of a layer of which some pieces came."""

    page: int
    n_bytes: int
    hasher: xxhash.xxh3_64


def _no_frozen(form: HeldForm, rows: Callable[[int, int, int], Rows]) -> None:
    """A worker without frozen pages."""


class PageStore:
    """`budget_bytes` is asked at each configuration. `n_calls` counts queries, `n_held` keys of the fullest layer."""

    def __init__(
        self, backend: Backend, budget_bytes: Callable[[], int], open_frozen: OpenFrozen = _no_frozen
    ) -> None:
        self.form: HeldForm | None = None
        self.n_calls = 0
        self.frozen: FrozenGroups | None = None
        self._backend, self._budget_bytes, self._open_frozen = backend, budget_bytes, open_frozen
        self._lock = threading.RLock()
        self._granted, self._session, self._by_rows = Granted(0, 0, 0), 0, False
        self._groups: dict[int, HeldGroup] = {}
        self._n_keys: dict[int, int] = {}
        self._coming: dict[int, _Coming] = {}
        self._runs: dict[tuple[int, int, int], tuple[PageRef, ...]] = {}
        self._kernel: PageKernel | None = None

    @property
    def n_held(self) -> int:
        """Keys of the layer that has most."""
        return max(self._n_keys.values(), default=0)

    @property
    def n_keys(self) -> int:
        """Keys that every layer holds."""
        return min(self._n_keys.values(), default=0)

    def n_held_by(self, layer: int) -> int:
        """Keys of one layer. Raises EngineError when it has no pages."""
        self._configured(layer, by_rows=self._by_rows)
        return self._n_keys[layer]

    # --- making room

    def configure(
        self,
        form: HeldForm,
        bytes_wanted: int,
        *,
        session: int = 0,
        keep: bool = False,
        by_rows: bool = False,
    ) -> Granted:
        """Make room for pages of this form; others are dropped. by_rows: they are filled row by row.

        keep: pages of the same form and session stay. Raises EngineError where the kernels cannot have this form, and
        then leaves everything as it was when it is the form of many rows.
        """
        if form.many_rows == "products" and not self._backend.device.is_cpu:
            raise UnsupportedOperationError(
                f"many rows as 'products' are NumPy's, on pages in a processor's memory; this worker computes on "
                f"{self._backend.name} and has 'kernels' only: have a worker on a processor, or write kernels into "
                f"the host's file checks/many-rows-*"
            )
        same = keep and session != 0 and (form, session, by_rows) == (self.form, self._session, self._by_rows)
        if not same:
            self.drop()
        n_held_bytes = sum(group.n_bytes for group in self._groups.values())
        n_groups_max = N_CTX_MAX // form.group_tokens
        n_groups = min(
            min(bytes_wanted, self._budget_bytes() + n_held_bytes) // form.group_bytes, n_groups_max
        )
        n_groups = max(n_groups, len(self._groups))
        if not same:
            self._kernel = PageKernel(self._backend, form.shape, form.many_rows)
            self._n_keys = dict.fromkeys(form.layers, 0)
            self.form, self._session, self._by_rows = form, session, by_rows
            self.frozen = None if by_rows else self._open_frozen(form, self._frozen_rows)
        self._granted = Granted(n_groups * form.group_bytes, n_groups * form.group_tokens, self.n_keys)
        return self._granted

    def drop(self) -> None:
        """Forget everything; the memory is free afterwards."""
        with self._lock:
            if self.frozen is not None:
                self.frozen.close()
            if self._kernel is not None:
                self._kernel.close()
            for group in self._groups.values():
                group.close()
            self._groups, self._n_keys, self._coming, self._runs = {}, {}, {}, {}
            self.form = self._kernel = self.frozen = None
            self._granted, self._session = Granted(0, 0, 0), 0

    # --- what comes

    def put_piece(self, layer: int, page: int, offset: int, piece: np.ndarray, image_xxh3: int) -> int:
        """Take bytes [offset, offset + len) u8 of a page's image; returns the keys that the layer holds now.

        Raises PositionError, OutOfMemoryError, HashMismatchError (the page is then not held).
        """
        form = self._configured(layer, by_rows=False)
        at, group = page * form.page_tokens, page // form.group_pages
        if offset == 0:
            self._begin_page(form, layer, page)
        coming = self._coming.get(layer)
        if coming is None or (coming.page, coming.n_bytes) != (page, offset):
            raise PositionError(
                f"byte {offset} of page {page} of layer {layer} does not follow what came last"
            )
        if offset + len(piece) > form.image_bytes:
            raise PositionError(f"a page has {form.image_bytes} bytes, not {offset + len(piece)}")
        self._groups[group].write(layer, page % form.group_pages, offset, piece)
        coming.hasher.update(piece)
        coming.n_bytes += len(piece)
        if coming.n_bytes == form.image_bytes:
            del self._coming[layer]
            if coming.hasher.intdigest() != image_xxh3:
                raise HashMismatchError(f"page {page} of layer {layer} does not have the hash it should have")
            self._n_keys[layer] = at + form.page_tokens
            if (page + 1) % form.group_pages == 0:
                self._group_whole(layer, group)
        return self._n_keys[layer]

    def _begin_page(self, form: HeldForm, layer: int, page: int) -> None:
        at = page * form.page_tokens
        self._coming.pop(layer, None)
        if at > self._n_keys[layer]:
            raise PositionError(
                f"page {page} of layer {layer} begins at key {at}; the layer holds {self._n_keys[layer]}"
            )
        self._need(at, form.page_tokens, clear=False)
        if at < self._n_keys[layer]:
            if self.frozen is not None:
                self.frozen.truncate(at)
            self._n_keys[layer] = at
        self._coming[layer] = _Coming(page, 0, xxhash.xxh3_64())

    def _need(self, first_key: int, n: int, *, clear: bool) -> None:
        """Have memory for the keys [first_key, first_key + n) of every layer. Raises OutOfMemoryError."""
        form, end = self.form, first_key + n
        assert form is not None, "asked after a configuration"
        if end > self._granted.tokens_max:
            raise OutOfMemoryError(f"out of memory at {self._granted.tokens_max} keys: no more was granted")
        for number in range(first_key // form.group_tokens, n_pages(end, form.group_tokens)):
            if number in self._groups:
                continue
            if self.frozen is not None and form.group_bytes > self._budget_bytes():
                self.frozen.free(form.group_bytes)
            try:
                self._groups[number] = HeldGroup(form, number, self._backend, clear=clear)
            except OutOfMemoryError as error:
                raise OutOfMemoryError(
                    f"out of memory at {number * form.group_tokens} keys: {error}"
                ) from error

    def _group_whole(self, layer: int, group: int) -> None:
        form = self.form
        assert form is not None and self._kernel is not None, "pages came"
        if group == 0 and layer == form.layers[0]:
            self._kernel.reserve(self._groups[0].refs[layer], form.n_group, form.group_pages)
        if self.frozen is not None:
            self.frozen.held(layer, self._n_keys[layer])

    def append_rows(self, layer: int, pos0: int, k_rows: np.ndarray, v_rows: np.ndarray) -> int:
        """Take rows u8 [n, row_bytes] of keys and values, token-major; returns the keys that the layer holds now.

        Raises PositionError, OutOfMemoryError.
        """
        form, n = self._configured(layer, by_rows=True), len(k_rows)
        if pos0 != self._n_keys[layer]:
            raise PositionError(f"rows from {pos0} on; layer {layer} holds {self._n_keys[layer]} keys")
        self._need(pos0, n, clear=True)
        done = 0
        while done < n:
            group, first = divmod(pos0 + done, form.group_tokens)
            take = min(n - done, form.group_tokens - first)
            keys, values = self._groups[group].rows(layer)
            keys.write(first, np.ascontiguousarray(k_rows[done : done + take]).reshape(-1))
            values.write(first, np.ascontiguousarray(v_rows[done : done + take]).reshape(-1))
            done += take
        self._n_keys[layer] += n
        return self._n_keys[layer]

    def truncate(self, n_keys: int) -> int:
        """Forget the keys from n_keys on, in every layer: whole pages where pages came whole. Returns what is left."""
        form = self.form
        if form is None:
            return 0
        with self._lock:
            if not self._by_rows:
                n_keys -= n_keys % form.page_tokens
            if self.frozen is not None:
                self.frozen.truncate(n_keys)
            self._coming.clear()
            self._n_keys = {layer: min(n, n_keys) for layer, n in self._n_keys.items()}
            self._free_above(n_pages(self.n_held, form.group_tokens))
        return self.n_keys

    def _free_above(self, n_groups: int) -> None:
        for number in [number for number in self._groups if number >= n_groups]:
            group = self._groups.pop(number)
            group.close()
        self._runs = {run: refs for run, refs in self._runs.items() if run[2] <= n_groups}

    # --- what is asked

    def attend(
        self, layer: int, q: np.ndarray, scale: float, n_tokens: int, groups: range, *, per_group: bool
    ) -> HeldAnswer:
        """Attend whole groups: q f32 [n_head_kv, n_group * n_tokens, head_dim], unscaled; every row sees every key.
        Over no groups: the identity.

        Raises PositionError when the layer does not hold them, NonFiniteError, EngineError.
        """
        form, began_s = self._configured(layer, by_rows=False), time.perf_counter()
        if not groups:
            return HeldAnswer([PartialAttention.identity(q.shape[:2], form.head_dim)], 0, 0, 0.0, 0.0)
        end = groups.stop * form.group_tokens
        if end > self._n_keys[layer]:
            raise PositionError(f"groups up to key {end}; layer {layer} holds {self._n_keys[layer]} keys")
        if not np.isfinite(q).all():
            raise NonFiniteError("the queries hold infinities or NaN")
        rows = QueryRows(end - 1, 1, q.shape[1])  # every row at the last key: it sees all of them, no mask

        def attend_here(run: range) -> list[PartialAttention]:
            assert self._kernel is not None, "a form was configured"
            pages, n = self._run(form, layer, run), form.group_pages
            return list(self._kernel.attend_groups(q, scale, pages, rows, run.start * n, n))

        n_frozen, frozen_ms = 0, 0.0
        if self.frozen is None:
            parts = attend_here(groups)
        else:
            asked = self.frozen.ask(layer, q, scale, n_tokens, groups)
            parts = asked.complete(groups, attend_here)
            n_frozen, frozen_ms = asked.keys, asked.ms
        self.n_calls += 1
        if not per_group:
            parts = [fold_all(parts)]
        n_keys = len(groups) * form.group_tokens
        took_ms = 1000 * (time.perf_counter() - began_s)
        return HeldAnswer(parts, n_keys, n_frozen, frozen_ms, 0.0 if n_frozen == n_keys else took_ms)

    def attend_keys(self, layer: int, q: np.ndarray, scale: float, n_keys: int) -> PartialAttention:
        """Attend the keys [0, n_keys) of a layer: q f32 [n_head_kv, n_rows, head_dim], unscaled. Raises as `attend`."""
        form = self._configured(layer, by_rows=True)
        if n_keys > self._n_keys[layer]:
            raise PositionError(f"{n_keys} keys asked; layer {layer} holds {self._n_keys[layer]}")
        if not np.isfinite(q).all():
            raise NonFiniteError("the queries hold infinities or NaN")
        self.n_calls += 1
        if not n_keys:
            return PartialAttention.identity(q.shape[:2], form.head_dim)
        assert self._kernel is not None, "a form was configured"
        run = self._run(form, layer, range(n_pages(n_keys, form.group_tokens)))
        pages = run[: n_pages(n_keys, form.page_tokens)]
        if len(pages) < len(run):
            key = (layer, -1, len(pages))  # the same tuple again finds the same graph
            pages = self._runs.setdefault(key, pages)
        parts = self._kernel.attend(q, scale, pages, QueryRows(n_keys - 1, 1, q.shape[1]))
        return fold_all(fold_groups(parts, 0, form.group_pages))

    def image(self, layer: int, page: int) -> np.ndarray:
        """A copy of a page's image, u8. Raises PositionError."""
        form = self._configured(layer, by_rows=False)
        if (page + 1) * form.page_tokens > self._n_keys[layer]:
            raise PositionError(f"page {page}; layer {layer} holds {self._n_keys[layer]} keys")
        return self._groups[page // form.group_pages].image(layer, page % form.group_pages)

    def rows(self, layer: int, first_key: int, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Copies of rows as they came, u8 [n, row_bytes] of keys and of values. Raises EngineError."""
        with self._lock:
            form = self.form
            if form is None or first_key + n > self._n_keys.get(layer, 0):
                raise PositionError(f"keys {first_key}-{first_key + n} of layer {layer} are not held")
            pieces: list[tuple[np.ndarray, np.ndarray]] = []
            at = first_key
            while at < first_key + n:
                group, first = divmod(at, form.group_tokens)
                take = min(first_key + n - at, form.group_tokens - first)
                k, v = self._groups[group].rows(layer)
                pieces.append((k.read(first, first + take), v.read(first, first + take)))
                at += take
        both = [np.concatenate(half).reshape(n, -1) for half in zip(*pieces, strict=True)]
        return both[0], both[1]

    def _frozen_rows(self, layer: int, first_key: int, n: int) -> Rows:
        return (*self.rows(layer, first_key, n), F16)

    def _run(self, form: HeldForm, layer: int, groups: range) -> tuple[PageRef, ...]:
        """The pages of consecutive groups; the same tuple each time, by which the kernel finds its graph."""
        key = (layer, groups.start, groups.stop)
        if key not in self._runs:
            self._runs[key] = tuple(ref for group in groups for ref in self._groups[group].refs[layer])
        return self._runs[key]

    def _configured(self, layer: int, *, by_rows: bool) -> HeldForm:
        if self.form is None or self._by_rows is not by_rows:
            raise EngineError("no pages were configured yet; say CONFIG or CONFIG2 first")
        if layer not in self._n_keys:
            raise EngineError(f"layer {layer} has no pages here; there are {list(self.form.layers)}")
        return self.form
