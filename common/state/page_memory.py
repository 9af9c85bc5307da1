"""PageMemory: full pages of a sequence as images, out of its memory and back into it.

An image is the page's bytes as they lie: the keys, head by head, then the values, a line for each element, with the
free elements behind each line (pages.py). Old pages can be released: their memory goes back to the system, addresses
stay, and the sequence refuses to use them until they are recalled. Whoever releases pages has them elsewhere.
Knows nothing of where that is; used by services/mac and the benches.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from common.errors import EngineError
from common.ggml.memory import copied_apart, give_back
from common.ggml.tensor import Tensor, host_view
from common.wire.rows import KIND_K, KIND_V

from .pages import PageLayout
from .sequence import SequenceState

F16_BYTES = 2

Image = tuple[np.ndarray, np.ndarray]
"""The keys and the values of a page, u8."""


class PageMemory:
    """The pages of one sequence, in the memory of a CPU. One thread."""

    def __init__(self, state: SequenceState) -> None:
        """Raises EngineError for a sequence without pages."""
        if state.pages is None or not state.paged_layers:
            raise EngineError("this sequence has no pages; load the engine with Decoding('paged')")
        self.layers, self.layout = state.paged_layers, state.pages
        self._state = state

    @property
    def page_tokens(self) -> int:
        """Keys of a page."""
        return self.layout.page_tokens

    @property
    def n_full(self) -> int:
        """Pages that are full in every layer."""
        return min(self._state.layers[layer].n_valid for layer in self.layers) // self.page_tokens

    @property
    def released(self) -> int:
        """Pages [0, released) are in memory no more."""
        return self._state.released // self.page_tokens

    def image(self, layer: int, page: int) -> Image:
        """Views of a full page in memory, u8; they change with it. Raises EngineError for a page that is not there."""
        if not self.released <= page < self.n_full:
            raise EngineError(
                f"page {page} is not among the full pages [{self.released}, {self.n_full}) in memory"
            )
        keys, values = (host_view(t).reshape(-1).view(np.uint8)[a:b] for t, a, b in self._places(layer, page))
        return keys, values

    def copied_image(self, layer: int, page: int) -> Image:
        """As image(), copies that outlive the page: their memory goes back to the system with them. Raises OSError."""
        keys, values = self.image(layer, page)
        return copied_apart(keys), copied_apart(values)

    def release(self, end: int) -> int:
        """Gives the memory of the pages before `end` back; returns the bytes that went. Raises EngineError."""
        if end > self.n_full:
            raise EngineError(f"page {end} is not full yet; of {self.n_full} full ones all may be released")
        if end <= self.released:
            return 0
        n_bytes = 0
        for layer in self.layers:
            for tensor, _, stop in self._places(layer, end - 1):
                n_bytes += give_back(tensor, 0, stop)  # from 0 on: what straddled two releases goes now
        self._state.released = end * self.page_tokens
        return n_bytes

    def recall(self, first: int, image: Callable[[int, int], np.ndarray], end: int | None = None) -> None:
        """Has the pages from `first` on in memory again. image(layer, page) gives their bytes, u8, and may fail.

        end: pages from there on are about to be truncated, and need not come. Raises EngineError for an image of
        another size; the pages then stay released.
        """
        released = self.released
        for page in range(first, released if end is None else min(end, released)):
            for layer in self.layers:
                self._write(layer, page, image(layer, page))
        self._state.released = min(self._state.released, first * self.page_tokens)

    def resume(self, n: int, released: int, image: Callable[[int, int], np.ndarray]) -> None:
        """Takes over the pages of an empty sequence's first `n` positions, of them those from page `released` on into
        memory. Other layers are as before: recurrent ones are imported.

        Raises EngineError when the sequence is not empty, n is no page border, or an image has another size.
        """
        if n % self.page_tokens or not 0 <= released * self.page_tokens <= n <= self.layout.n_ctx:
            raise EngineError(f"{n} positions are no whole pages, of which {released} could be released")
        if any(self._state.layers[layer].n_valid for layer in self.layers):
            raise EngineError("only an empty sequence takes pages over; truncate it first")
        for page in range(released, n // self.page_tokens):
            for layer in self.layers:
                self._write(layer, page, image(layer, page))
        for layer in self.layers:
            self._state.advance(range(layer, layer + 1), n)
        self._state.released = released * self.page_tokens

    def _write(self, layer: int, page: int, image: np.ndarray) -> None:
        places = self._places(layer, page)
        if image.nbytes != sum(stop - start for _, start, stop in places):
            raise EngineError(f"an image of {image.nbytes} bytes is not page {page} of layer {layer}")
        done = 0
        for tensor, start, stop in places:
            tensor.write(np.ascontiguousarray(image[done : done + stop - start]), start)
            done += stop - start

    def _places(self, layer: int, page: int) -> list[tuple[Tensor, int, int]]:
        """(tensor, first byte, end) of the keys and of the values of a page."""
        tensors, layout = self._state.layers[layer].tensors, self.layout
        key, value = layout.key_offset(page) * F16_BYTES, layout.value_offset(page) * F16_BYTES
        key_bytes, value_bytes = image_bytes(layout)
        return [(tensors[KIND_K], key, key + key_bytes), (tensors[KIND_V], value, value + value_bytes)]


def image_bytes(layout: PageLayout) -> tuple[int, int]:
    """Bytes of the keys and of the values of a full page of one layer."""
    row = layout.n_row * F16_BYTES
    return layout.page_tokens * row, layout.line(0) * row
