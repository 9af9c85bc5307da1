"""MappedPages: full pages attended where they lie in files, mapped and never copied: what memory no longer holds.

The files are the journal's, which says where each page is and what its bytes hash to (checked once, when it is mapped).
Kernels, graphs and order are those of pages in memory, so the bits are, too. Used by services/mac for pages that no
worker answers for, and by benches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import xxhash

from common.attention.partial import PartialAttention
from common.errors import EngineError, HashMismatchError
from common.ggml.backend import Backend
from common.ggml.memory import map_file
from common.ggml.tensor import F16, Arena
from common.state.page_memory import image_bytes
from common.state.pages import PageLayout

from .kv_source import PageQuery
from .local_pages import RUNS_MAX
from .page_graph import PageRef
from .page_kernel import PageKernel

F16_BYTES = 2


class Place(Protocol):
    """Where a page's image lies: bytes from `offset` on, a multiple of the system's memory page, of the file `path`."""

    @property
    def path(self) -> str: ...
    @property
    def offset(self) -> int: ...
    @property
    def xxh3(self) -> int: ...


class _Mapped:
    """One page in a file."""

    def __init__(self, backend: Backend, layout: PageLayout, place: Place, page: int) -> None:
        key_bytes, value_bytes = image_bytes(layout)
        self.image = map_file(Path(place.path), place.offset, key_bytes + value_bytes)
        self.place, self._page = place, page
        self.check()
        buffer = backend.map_host_memory(self.image, max(key_bytes, value_bytes))
        if buffer is None:
            raise EngineError(f"{backend.name} cannot attend pages in files")
        self._arena = Arena(2)
        head, line = layout.head_dim * F16_BYTES, layout.line(0) * F16_BYTES
        k = self._arena.tensor(F16, layout.head_dim, layout.n_head * layout.page_tokens)
        v = self._arena.tensor(F16, layout.line(0), layout.n_row)
        self._arena.adopt(buffer, [(k, 0), (v, key_bytes)])
        self.ref = PageRef(
            k=k,
            k_offset=0,
            k_strides=(head, layout.page_tokens * head),
            v=v,
            v_offset=0,
            v_strides=(line, layout.head_dim * line),
            first_position=page * layout.page_tokens,
            n_keys=layout.page_tokens,
        )

    def check(self) -> None:
        if xxhash.xxh3_64_intdigest(self.image) != self.place.xxh3:
            raise HashMismatchError(
                f"page {self._page} in {self.place.path} at {self.place.offset} is not what was written there"
            )

    def close(self) -> None:
        self._arena.close()


class MappedPages:
    """Pages of one sequence. One thread."""

    def __init__(
        self,
        backend: Backend,
        kernel: PageKernel,
        layout: PageLayout,
        group_pages: int,
        places: Callable[[int, int], Place],
    ) -> None:
        """places(layer, page) says where a page lies; raises what it likes when it is nowhere."""
        self._backend, self._kernel, self._layout = backend, kernel, layout
        self._group_pages, self._places = group_pages, places
        self._mapped: dict[tuple[int, int], _Mapped] = {}
        self._n_checked = 0
        self._runs: dict[tuple[int, int, int], tuple[PageRef, ...]] = {}

    def attend(self, query: PageQuery, groups: range) -> Iterator[PartialAttention]:
        """One partial for each of these groups, all of whose keys every row sees; each is attended when it is taken.

        Raises EngineError, OSError, HashMismatchError.
        """
        first, end = groups.start * self._group_pages, groups.stop * self._group_pages
        key = (query.layer, first, end)
        if key not in self._runs:
            if len(self._runs) >= RUNS_MAX:
                self._runs.clear()
            self._runs[key] = tuple(self._page(query.layer, page).ref for page in range(first, end))
        pages = self._runs[key]
        return self._kernel.attend_groups(query.q, query.scale, pages, query.rows, first, self._group_pages)

    def image(self, layer: int, page: int) -> np.ndarray:
        """The bytes of a page, u8, mapped. Raises as attend()."""
        return self._page(layer, page).image

    def check(self, layer: int, pages: range) -> None:
        """Hash these pages anew, as far as they are mapped. Raises HashMismatchError when one was altered since."""
        for page in pages:
            if (mapped := self._mapped.get((layer, page))) is not None:
                mapped.check()

    def check_next(self) -> None:
        """As check(), of one page, another one with each call: in the order in which they were mapped."""
        if not self._mapped:
            return
        self._n_checked += 1
        keys = itertools.islice(self._mapped, self._n_checked % len(self._mapped), None)
        self._mapped[next(keys)].check()

    def forget(self, first_page: int = 0) -> None:
        """The pages from `first_page` on are no more what they were."""
        gone = {key: mapped for key, mapped in self._mapped.items() if key[1] >= first_page}
        self._runs = {key: run for key, run in self._runs.items() if key[2] <= first_page}
        for key, mapped in gone.items():
            del self._mapped[key]
            mapped.close()

    def close(self) -> None:
        """Unmaps everything. Calling it again does nothing."""
        self.forget()

    def _page(self, layer: int, page: int) -> _Mapped:
        key, place = (layer, page), self._places(layer, page)
        found = self._mapped.get(key)
        if found is None or found.place != place:
            if found is not None:
                self.forget(page)
            found = self._mapped[key] = _Mapped(self._backend, self._layout, place, page)
        return found
