"""Aim: a page geometry refuses what no page program could hold, and derives the rest consistently.

Method: properties over random geometries; each bound passed once, with the message that names value and range.
"""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import SettingError
from device.coreml.geometry import F16_MAX, PageGeometry

geometries = st.builds(
    PageGeometry,
    n_head_kv=st.integers(1, 8),
    head_dim_k=st.integers(1, 256),
    head_dim_v=st.integers(1, 256),
    n_rows=st.integers(1, 64),
    page_tokens=st.integers(1, 16).map(lambda n: 256 * n),
)


@given(geometries)
def test_derived_sizes_agree(geometry):
    assert geometry.n_chunks * geometry.chunk_tokens == geometry.page_tokens
    assert geometry.chunk_tokens % 256 == 0 and geometry.chunk_tokens <= 1024
    elements = sum(math.prod(shape) for _, shape in geometry.constants())
    assert geometry.weight_bytes == 2 * elements
    assert PageGeometry.parse(geometry.name) == geometry


@given(geometries)
def test_headroom_never_overflows_a_sum_of_equal_scores(geometry):
    assert geometry.chunk_tokens * math.exp(geometry.headroom + 0.1) <= F16_MAX
    assert np.isfinite(np.float16(geometry.chunk_tokens * math.exp(geometry.headroom)))


@pytest.mark.parametrize(
    ("page", "chunk"), [(256, 256), (768, 768), (1280, 256), (4096, 1024), (16384, 1024)]
)
def test_the_chunk_divides_the_page(page, chunk):
    assert PageGeometry(4, 256, 256, 48, page).chunk_tokens == chunk


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((0, 64, 64, 8), "n_head_kv = 0: a page program takes 1 to 256"),
        ((1, 2000, 64, 8), "head_dim_k = 2000: a page program takes 1 to 1024"),
        ((1, 64, 64, 0), "n_rows = 0"),
        ((1, 64, 64, 8, 300), "page_tokens = 300: use a multiple of 256"),
        ((1, 64, 64, 8, 131_072), "page_tokens = 131072"),
        ((1, 64, 64, 8, 1024, 100), "chunk_tokens = 100"),
        ((1, 64, 64, 8, 1024, 768), "chunk_tokens = 768 does not divide page_tokens = 1024"),
        ((16, 256, 256, 8, 16_384, 512), "131072 channels; the Neural Engine takes 65536"),
        ((16, 512, 512, 8, 32_768, 8192), "bytes of constants; a program takes 1000000000"),
    ],
)
def test_bounds_are_named(arguments, complaint):
    with pytest.raises(SettingError, match=complaint):
        PageGeometry(*arguments)


def test_only_geometry_names_are_parsed():
    with pytest.raises(SettingError, match="is no page geometry"):
        PageGeometry.parse("page-h4")
