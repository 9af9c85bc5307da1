"""Rows quantised by ggml, read back by the gguf package: two independent implementations of each storage type."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from common.errors import EngineError
from common.ggml.quantize import STORAGE_TYPES, block_length, quantize_rows, row_bytes, storage_type

# Largest error of a value as a share of the largest value of its block: half a step of the type's grid, plus the
# rounding of scales that are themselves stored coarsely.
STEP_SHARE = {
    "f32": 0.0,
    "f16": 2**-11,
    "q8_0": 0.5 / 127 + 2**-11,
    "q4_0": 1 / 8,
    "q4_1": 1 / 15,
    "q4_K": 0.13,
}


@pytest.mark.parametrize("name", STORAGE_TYPES)
def test_rows_come_back_within_a_step_of_the_grid(name: str) -> None:
    values = np.random.default_rng(0).standard_normal((7, 512), np.float32)
    rows = quantize_rows(values, name)
    assert rows.shape == (7, row_bytes(name, 512))
    back = dequantize(rows, GGMLQuantizationType(storage_type(name)))
    block = max(block_length(name), 1)
    largest = np.abs(values).reshape(7, -1, block).max(axis=-1, keepdims=True)
    error = np.abs(back - values).reshape(7, -1, block)
    assert (error <= STEP_SHARE[name] * largest).all()


def test_the_types_are_those_of_the_gguf_package() -> None:
    for name, number in STORAGE_TYPES.items():
        assert GGMLQuantizationType(number).name.lower() == name.lower()


def test_what_does_not_fit_is_refused_before_native_code_sees_it() -> None:
    with pytest.raises(EngineError, match="q4_K needs rows that are a multiple of 256 long; got 300"):
        quantize_rows(np.zeros((1, 300), np.float32), "q4_K")
    with pytest.raises(EngineError, match="unknown storage type 'q9_9'; known: f32, f16"):
        row_bytes("q9_9", 32)
    with pytest.raises(EngineError, match="contiguous f32"):
        quantize_rows(np.zeros((4, 32), np.float64), "q8_0")
    with pytest.raises(EngineError, match="contiguous f32"):
        quantize_rows(np.zeros((4, 64), np.float32)[:, ::2], "q8_0")
