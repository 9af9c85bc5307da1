"""Small pages and conversations for the tests beside it."""

from __future__ import annotations

import numpy as np

from common.wire.held import PageForm

FORM = PageForm(
    layers=(1, 3), n_head_kv=2, n_group=3, head_dim=32, page_tokens=64, group_pages=2, model="tests"
)


def ids_of(n_tokens: int, seed: int = 0) -> np.ndarray:
    """Token ids, i32 [n_tokens]."""
    return np.random.default_rng(seed).integers(0, 50_000, n_tokens, dtype=np.int32)


def image_of(layer: int, page: int, seed: int = 0, form: PageForm = FORM) -> tuple[bytes, bytes]:
    """Keys and values of one page, told apart by layer, page and seed."""
    rng = np.random.default_rng((layer, page, seed))
    return rng.bytes(form.key_bytes), rng.bytes(form.value_bytes)
