"""What `bench attend` compares is the same attention: flash over rows, pages, and the formula, on one small page.

Also: random pages say exactly what they store, and a side that is wrong is refused, not timed.
"""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from common.attention.grouping import group_queries
from common.engine.kv_source import QueryRows
from common.ggml.backend import Backend, choose_device
from common.limits import PAGE_TOKENS
from services.bench import attend
from services.bench.attend_rows import FlashRows, Geometry, PageRows, random_page
from services.bench.report import NotMeasuredError


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_a_random_page_says_what_it_stores(kind: str) -> None:
    page = random_page(kind, 64, seed=3)
    right = quants.dequantize(page.stored, GGMLQuantizationType[kind.upper()])
    assert page.stored.shape[0] == PAGE_TOKENS and np.array_equal(page.wide, right)
    assert np.array_equal(random_page(kind, 64, seed=3).stored, page.stored)


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize("n_tokens", [1, 3])
def test_both_sides_attend_alike(kind: str, n_tokens: int) -> None:
    backend = Backend(choose_device("cpu"))
    keys, values = (random_page(kind, 64, seed) for seed in (1, 2))
    geometry = Geometry(n_head_kv=2, n_group=2, head_dim=32, n_pages=2)
    flash, pages = (side(backend, geometry, keys, values) for side in (FlashRows, PageRows))
    rows = QueryRows(2 * PAGE_TOKENS - n_tokens, n_tokens, 2)
    q = np.random.default_rng(0).standard_normal((2, rows.n_rows, 32), np.float32)
    by_flash = group_queries(flash.attention(q, 32**-0.5, rows)(), 2)
    parts = pages.kernel.attend(q, 32**-0.5, pages.refs, rows)
    by_pages = attend.fold_all(parts).output()
    np.testing.assert_allclose(by_flash, by_pages, atol=5e-3)
    for each in (flash, pages, backend):
        each.close()


def test_a_wrong_side_is_refused() -> None:
    keys, values = (random_page("f16", attend.N_HEAD_KV * attend.HEAD_DIM, seed) for seed in (1, 2))
    shape = attend.Shape("decode", 1, 1, 1)
    q = np.ones((attend.N_HEAD_KV, shape.rows.n_rows, attend.HEAD_DIM), np.float32)
    nothing = np.zeros_like(q)
    with pytest.raises(NotMeasuredError, match="decode: flash attention is off by 1 of"):
        attend._check(keys, values, q, shape, (nothing, nothing))
