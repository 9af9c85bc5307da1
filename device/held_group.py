"""HeldGroup: the memory of one group of pages, of all layers, and what its pages look like to kernels.

A page lies as its image came: keys head by head, values in lines (common/state/pages.py), so that a piece of an image
is one copy. Used by page_store.py.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from common.engine.page_graph import PageRef, PageShape
from common.engine.page_kernel import Form
from common.ggml.backend import Backend
from common.ggml.memory import prefer_large_pages
from common.ggml.tensor import F16, Arena, Tensor
from common.limits import MIB
from common.state.pages import PageLayout
from common.state.rows import PagedKeys, PagedValues

F16_BYTES = 2
LARGE_BYTES_MIN = 4 * MIB
"""Tensors from here on lie in large memory pages, where the system has them: faster to touch for the first time."""


@dataclass(frozen=True)
class HeldForm:
    """The shape of all pages: what CONFIG or CONFIG2 said. `layers` by their number on the wire."""

    layers: tuple[int, ...]
    n_head_kv: int
    n_group: int
    """Query heads on each key/value head."""
    head_dim: int
    page_tokens: int
    group_pages: int
    many_rows: Form = "kernels"

    @cached_property
    def layout(self) -> PageLayout:
        """Of one group, whose first position is 0 here."""
        return PageLayout(self.page_tokens, self.group_tokens, self.n_head_kv, self.head_dim)

    @cached_property
    def shape(self) -> PageShape:
        return PageShape(self.n_head_kv, self.head_dim, self.page_tokens)

    @property
    def group_tokens(self) -> int:
        return self.page_tokens * self.group_pages

    @cached_property
    def key_bytes(self) -> int:
        """Bytes of a page's keys."""
        return self.page_tokens * self.layout.n_row * F16_BYTES

    @cached_property
    def image_bytes(self) -> int:
        """Bytes of a page of one layer."""
        return self.key_bytes + self.layout.line(0) * self.layout.n_row * F16_BYTES

    @property
    def group_bytes(self) -> int:
        """Bytes of a group of all layers."""
        return self.image_bytes * self.group_pages * len(self.layers)


class HeldGroup:
    """Group number `number`. Raises OutOfMemoryError."""

    def __init__(self, form: HeldForm, number: int, backend: Backend, *, clear: bool) -> None:
        """clear: zeroes it, for pages that are filled row by row; whole pages are not read before they are whole."""
        self._form, self._number = form, number
        self._arena = Arena(2 * len(form.layers))
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}
        for layer in form.layers:
            k = self._arena.tensor(F16, form.head_dim, form.n_head_kv * form.group_tokens)
            v = self._arena.tensor(F16, 1, form.layout.n_value_elements)
            self._tensors[layer] = k, v
        try:
            self.n_bytes = self._arena.allocate(backend.buffer_type, clear=clear)
        except BaseException:
            self._arena.close()
            raise
        for tensor in itertools.chain(*self._tensors.values()):
            if tensor.n_bytes >= LARGE_BYTES_MIN:
                prefer_large_pages(tensor)
        self.refs = {layer: self._refs(*self._tensors[layer]) for layer in form.layers}
        """The pages of each layer."""

    def rows(self, layer: int) -> tuple[PagedKeys, PagedValues]:
        """The keys and values of a layer as token-major rows; position 0 is the group's first."""
        k, v = self._tensors[layer]
        return PagedKeys(k, self._form.layout), PagedValues(v, self._form.layout)

    def write(self, layer: int, page: int, offset: int, piece: np.ndarray) -> None:
        """Puts u8 bytes [offset, offset + len) of the image of the group's page `page` in their place."""
        for tensor, at, begin, end in self._places(layer, page, offset, offset + len(piece)):
            tensor.write(piece[begin - offset : end - offset], at)

    def image(self, layer: int, page: int) -> np.ndarray:
        """A copy of the image of the group's page `page`, u8."""
        image = np.empty(self._form.image_bytes, np.uint8)
        for tensor, at, begin, end in self._places(layer, page, 0, len(image)):
            tensor.read(image[begin:end], at)
        return image

    def close(self) -> None:
        """Frees the memory. Calling it again does nothing."""
        self._arena.close()

    def _places(self, layer: int, page: int, offset: int, stop: int) -> list[tuple[Tensor, int, int, int]]:
        """(tensor, byte in it, first byte, end) of each part of the image's bytes [offset, stop)."""
        (k, v), form = self._tensors[layer], self._form
        halves = (
            (k, form.layout.key_offset(page) * F16_BYTES, 0, form.key_bytes),
            (v, form.layout.value_offset(page) * F16_BYTES, form.key_bytes, form.image_bytes),
        )
        places = []
        for tensor, base, first, end in halves:
            begin, behind = max(first, offset), min(end, stop)
            if begin < behind:
                places.append((tensor, base + begin - first, begin, behind))
        return places

    def _refs(self, k: Tensor, v: Tensor) -> tuple[PageRef, ...]:
        form, layout = self._form, self._form.layout
        head, line = form.head_dim * F16_BYTES, layout.line(0) * F16_BYTES
        return tuple(
            PageRef(
                k=k,
                k_offset=layout.key_offset(page) * F16_BYTES,
                k_strides=(head, form.page_tokens * head),
                v=v,
                v_offset=layout.value_offset(page) * F16_BYTES,
                v_strides=(line, form.head_dim * line),
                first_position=self._number * form.group_tokens + page * form.page_tokens,
                n_keys=form.page_tokens,
            )
            for page in range(form.group_pages)
        )
