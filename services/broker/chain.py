"""Names of contents: a page is what its model's form and all token ids up to its end make it. Pure.

Two conversations that begin with the same tokens therefore share their first pages, and a conversation is found again
after all processes died, by nothing but its token ids.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from common.wire.held import PageForm

Ids = NDArray[np.int32]
"""Token ids, i32 [n_tokens]."""
Key = bytes
"""16 bytes that name a content."""

_FORM = msgspec.msgpack.Encoder(order="deterministic")


def form_bytes(form: PageForm) -> bytes:
    """The form as it stands at the head of a journal file."""
    return _FORM.encode(form)


def form_key(form: PageForm) -> Key:
    """The layout fingerprint: no page of one form is ever taken for one of another."""
    return xxhash.xxh3_128_digest(form_bytes(form))


def next_key(before: Key, ids: Ids) -> Key:
    """The name of what follows `before` with these token ids."""
    return xxhash.xxh3_128_digest(before + np.ascontiguousarray(ids, dtype="<i4").tobytes())


def page_keys(form: PageForm, ids: Ids) -> Iterator[Key]:
    """The name of each full page of `ids`, oldest first."""
    key = form_key(form)
    for end in range(form.page_tokens, len(ids) + 1, form.page_tokens):
        key = next_key(key, ids[end - form.page_tokens : end])
        yield key


def state_key(form: PageForm, ids: Ids) -> Key:
    """The name of the recurrent state behind `ids`."""
    return next_key(form_key(form), ids)
