"""Aim: stored rows become a page's constants exactly; what a page cannot hold is refused.

Method: random rows of any head count and size against plain transposes and float64 dequantisation; filling the same
constants again with fewer keys must leave nothing of the longer page behind.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import EngineError
from device.coreml.geometry import MASKED, PageGeometry
from device.coreml.page_rows import GGML_F16, GGML_Q8_0, Q8_0, PageConstants

GEOMETRY = PageGeometry(2, 32, 64, 4, 512, 256)


def f16_rows(rng, n, width):
    return rng.standard_normal((n, width)).astype(np.float16)


def expected(k, v, g):
    """Constants in the plain way: pad, split heads, transpose V."""
    n = k.shape[0]
    k_pad, v_pad = (
        np.zeros((g.page_tokens, k.shape[1]), np.float16),
        np.zeros((g.page_tokens, v.shape[1]), np.float16),
    )
    k_pad[:n], v_pad[:n] = k, v
    k_heads = k_pad.reshape(g.n_chunks, g.chunk_tokens, g.n_head_kv, g.head_dim_k).transpose(2, 0, 1, 3)
    v_heads = v_pad.reshape(g.n_chunks, g.chunk_tokens, g.n_head_kv, g.head_dim_v).transpose(2, 0, 3, 1)
    ones = np.ones((*k_heads.shape[:-1], 1), np.float16)
    bias = np.where(np.arange(g.page_tokens) < n, 0, MASKED).astype(np.float16)
    return bias.reshape(g.n_chunks, g.chunk_tokens), np.concatenate([k_heads, ones], -1), v_heads


@settings(max_examples=30)
@given(
    heads=st.integers(1, 3),
    dims=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    chunks=st.integers(1, 3),
    counts=st.lists(st.integers(1, 768), min_size=1, max_size=3),
    seed=st.integers(0, 99),
)
def test_f16_rows(heads, dims, chunks, counts, seed):
    g = PageGeometry(heads, *dims, 4, 256 * chunks, 256)
    rng = np.random.default_rng(seed)
    constants = PageConstants.allocate(g)
    for count in counts:
        n = min(count, g.page_tokens)
        k, v = (f16_rows(rng, n, heads * dim) for dim in dims)
        constants.fill(k.view(np.uint8), v.view(np.uint8), GGML_F16)
        for found, wanted in zip((constants.bias, constants.k, constants.v), expected(k, v, g), strict=True):
            np.testing.assert_array_equal(found, wanted)


def test_q8_0_rows_are_dequantised_with_one_rounding():
    rng = np.random.default_rng(3)
    blocks = {}
    for name, dim in (("k", GEOMETRY.head_dim_k), ("v", GEOMETRY.head_dim_v)):
        rows = np.zeros((300, 2 * dim // 32), Q8_0)
        rows["scale"] = rng.uniform(0, 0.02, rows.shape)
        rows["quants"] = rng.integers(-127, 128, (*rows.shape, 32))
        blocks[name] = rows
    k, v = (
        (b["scale"].astype(np.float64)[..., None] * b["quants"]).reshape(300, -1).astype(np.float16)
        for b in blocks.values()
    )
    constants = PageConstants.allocate(GEOMETRY)
    constants.fill(*(b.view(np.uint8).reshape(300, -1) for b in blocks.values()), GGML_Q8_0)
    for found, wanted in zip(
        (constants.bias, constants.k, constants.v), expected(k, v, GEOMETRY), strict=True
    ):
        np.testing.assert_array_equal(found, wanted)


def test_an_allocated_page_has_no_keys():
    assert (PageConstants.allocate(GEOMETRY).bias == np.float16(MASKED)).all()


def test_names_and_shapes_are_those_of_the_geometry():
    views = PageConstants.allocate(GEOMETRY).by_name()
    assert [(name, array.shape) for name, array in views.items()] == list(GEOMETRY.constants())


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda k, v: (k[:100], v, GGML_F16), "100 K rows and 512 V rows"),
        (lambda k, v: (np.tile(k, (2, 1)), np.tile(v, (2, 1)), GGML_F16), "a page takes 1 to 512"),
        (lambda k, v: (k, v, 2), "ggml type 2 .* pages are made from f16 and q8_0"),
        (lambda k, v: (k[:, :-2], v, GGML_F16), r"K rows uint8 \(512, 126\): expected uint8 \[n, 128\]"),
        (lambda k, v: (k, v.view(np.float16), GGML_F16), "V rows float16"),
    ],
)
def test_rows_that_do_not_fit_are_refused(change, complaint):
    rng = np.random.default_rng(0)
    k, v = (f16_rows(rng, 512, 2 * dim).view(np.uint8) for dim in (32, 64))
    with pytest.raises(EngineError, match=complaint):
        PageConstants.allocate(GEOMETRY).fill(*change(k, v))


@pytest.mark.parametrize(("what", "value"), [("k", np.inf), ("k", np.nan), ("v", 300.0), ("v", np.nan)])
def test_values_a_page_cannot_hold_are_refused(what, value):
    rng = np.random.default_rng(0)
    rows = {"k": f16_rows(rng, 512, 64), "v": f16_rows(rng, 512, 128)}
    rows[what][17, 5] = value
    with pytest.raises(EngineError, match="largest"):
        PageConstants.allocate(GEOMETRY).fill(rows["k"].view(np.uint8), rows["v"].view(np.uint8), GGML_F16)
