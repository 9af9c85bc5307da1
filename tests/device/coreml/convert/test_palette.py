"""Aim: palettes are as good as coremltools' own, and refused where they cannot be made as asked.

Method: the same weights through coremltools' k-means (exact from 10,000 weights on), and errors compared; properties of
tables and indices by hypothesis.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ModelError, SettingError
from device.coreml.convert.kmeans import key_values, order_keys
from device.coreml.convert.palette import BITS, Lut, palettise


def weights(n_out, n_in, seed=0, heavy=False):
    rng = np.random.default_rng(seed)
    values = rng.standard_t(5, (n_out, n_in)) if heavy else rng.standard_normal((n_out, n_in))
    return (values * 0.02).astype(np.float16)


def squared_error(found, expected):
    return float(((found.astype(np.float64) - expected) ** 2).sum())


@pytest.mark.parametrize("heavy", [False, True])
@pytest.mark.parametrize(
    ("bits", "group", "n_in", "slack"),
    [(4, 8, 2560, 1.0005), (2, 0, 2560, 1.0005), (4, 8, 640, 1.0), (6, 4, 640, 1.0)],
)
def test_error_is_that_of_coremltools_or_lower(bits, group, n_in, slack, heavy):
    quantization = pytest.importorskip("coremltools.models.neural_network.quantization_utils")
    if (group or 16) * n_in < 10_000:
        pytest.importorskip("sklearn")  # coremltools takes it for small groups
    matrix = weights(16, n_in, heavy=heavy)
    rows, theirs = group or 16, 0.0
    for first in range(0, 16, rows):
        part = matrix[first : first + rows]
        table, indices = quantization._get_kmeans_lookup_table_and_weight(bits, part)
        theirs += squared_error(table.astype(np.float16)[indices].reshape(part.shape), part)
    assert squared_error(palettise(matrix, Lut(bits, group)).dense(), matrix) <= theirs * slack


@given(st.sampled_from(BITS), st.sampled_from([0, 1, 2, 4]), st.integers(1, 40), st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_every_weight_gets_the_nearest_entry_of_its_groups_table(bits, group, n_in, seed):
    matrix = weights(8, n_in, seed)
    palette = palettise(matrix, Lut(bits, group))
    rows = group or 8
    assert palette.tables.shape == (8 // rows, 2**bits)
    assert palette.indices.max() < 2**bits
    for i, table in enumerate(palette.tables.astype(np.float64)):
        part = matrix[i * rows : (i + 1) * rows].astype(np.float64)
        best = np.abs(part[..., None] - table).min(axis=-1)
        chosen = np.abs(part - palette.dense()[i * rows : (i + 1) * rows])
        assert np.allclose(chosen, best, atol=1e-7)


def test_few_values_are_kept_exactly():
    matrix = np.random.default_rng(0).choice(np.array([-1.5, 0.0, 0.25, 3.0], np.float16), (8, 64))
    for lut in (Lut(2), Lut(4, 4)):
        assert np.array_equal(palettise(matrix, lut).dense(), matrix)
    assert np.array_equal(palettise(np.zeros((4, 8), np.float16), Lut(4, 2)).dense(), np.zeros((4, 8)))


def test_a_large_matrix_is_counted_by_value():
    matrix = weights(256, 1024)
    assert palettise(matrix, Lut(4)).error(matrix) < 0.1
    assert palettise(matrix, Lut(8)).error(matrix) < 0.008


def test_order_keys_order_as_the_values_do():
    values = np.array([-65504, -1, -6e-8, 0, 6e-8, 1, 65504], np.float16)
    keys = order_keys(values)
    assert (np.diff(keys.astype(int)) > 0).all()
    assert np.array_equal(key_values()[keys], values.astype(np.float64))


def test_what_cannot_be_palettised_is_an_error():
    with pytest.raises(SettingError, match="groups of 3 do not divide"):
        palettise(weights(8, 16), Lut(4, 3))
    bad = weights(8, 16)
    bad[3, 3] = np.inf
    with pytest.raises(ModelError, match="not finite"):
        palettise(bad, Lut(4))


@pytest.mark.parametrize("text", ["5", "4,x", "", "4,8,2", "-4", "lut4"])
def test_options_that_mean_nothing_are_refused(text):
    with pytest.raises(SettingError, match="--lut-head"):
        Lut.parse(text, "--lut-head")


def test_options_are_read():
    assert Lut.parse("none", "x") is None
    assert Lut.parse("6,4", "x") == Lut(6, 4)
    assert Lut.parse("8", "x") == Lut(8, 0)
