"""PageForm and PagePlace: what a page of keys and values looks like in bytes, and where the journal has one.

Parts of the messages of held pages (held.py); pure arithmetic. Knows nothing of who holds what.
"""

from __future__ import annotations

from typing import Literal

from common.limits import UBATCH_TOKENS
from common.wire.message import Part

F16_BYTES = 2
LINE_PAD_ELEMENTS = 32
"""Elements left free behind each line of values (why: common.state.pages.LINE_PAD, which must be the same)."""


class PageForm(Part, frozen=True):
    """The shape of every page of a conversation; two sides whose forms differ cannot share a page.

    A page's image is what lies in the host's memory: the keys, f16 [n_head_kv][page_tokens][head_dim], then the values,
    f16 [n_head_kv * head_dim][page_tokens + LINE_PAD_ELEMENTS], one line for each element of a row.
    """

    layers: tuple[int, ...]
    """Layers that have pages, by their number in the whole model."""
    n_head_kv: int
    n_group: int
    """Query heads on each key/value head."""
    head_dim: int
    page_tokens: int
    group_pages: int
    model: str
    """Fingerprint of the model: pages of another one are never mixed up with these."""
    many_rows: Literal["kernels", "products"] = "kernels"
    """How many query rows are attended (common/engine/forms.py): the same on both sides, for they round differently."""

    @property
    def key_bytes(self) -> int:
        """Bytes of the keys of a page of one layer."""
        return self.page_tokens * self.n_head_kv * self.head_dim * F16_BYTES

    @property
    def value_bytes(self) -> int:
        """Bytes of its values, free elements included."""
        return (self.page_tokens + LINE_PAD_ELEMENTS) * self.n_head_kv * self.head_dim * F16_BYTES

    @property
    def image_bytes(self) -> int:
        """Bytes of a page of one layer."""
        return self.key_bytes + self.value_bytes

    @property
    def group_tokens(self) -> int:
        """Keys of a group of pages: the unit that moves."""
        return self.page_tokens * self.group_pages

    def host_tokens(self, kv_host_tokens: int, kv_host_bytes: int) -> int:
        """The host's limit by both settings, a multiple of a ubatch: the position from which on reads go by pages."""
        fit = kv_host_bytes * self.page_tokens // (self.image_bytes * len(self.layers))
        limit = min(kv_host_tokens, fit) if kv_host_bytes else kv_host_tokens
        return max(limit - limit % UBATCH_TOKENS, UBATCH_TOKENS)


class PagePlace(Part, frozen=True):
    """Where the journal has a page of one layer: bytes [offset, offset + image_bytes) of a file that never changes
    there. offset is a multiple of the system's memory page, so that the file can be mapped and attended."""

    layer: int
    page: int
    path: str
    offset: int
    xxh3: int
    """xxh3-64 of the image."""
