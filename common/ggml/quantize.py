"""Rows of f32 turned into ggml's storage types by ggml's own functions, so that no type is coded twice.

Knows nothing of models or files. Called by common.model.synthetic. Reading back is `gguf.quants.dequantize`.
"""

from __future__ import annotations

import numpy as np

from common.errors import EngineError

from .ffi import lib

STORAGE_TYPES: dict[str, int] = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 8, "q4_K": 12}
"""Name -> enum ggml_type, for the types this project writes. Others are read but never written."""


def storage_type(name: str) -> int:
    """ggml's number for a type name. Raises EngineError naming the types that can be written."""
    if name not in STORAGE_TYPES:
        raise EngineError(f"unknown storage type {name!r}; known: {', '.join(STORAGE_TYPES)}")
    return STORAGE_TYPES[name]


def block_length(name: str) -> int:
    """Elements a block of this type holds; a row's length must be a multiple of it (1 for f32 and f16)."""
    return lib.ggml_blck_size(storage_type(name))


def row_bytes(name: str, n_per_row: int) -> int:
    """Bytes of one row. Raises EngineError when the row is not a whole number of blocks."""
    block = block_length(name)
    if n_per_row < 1 or n_per_row % block:
        raise EngineError(f"{name} needs rows that are a multiple of {block} long; got {n_per_row}")
    return lib.ggml_row_size(storage_type(name), n_per_row)


def quantize_rows(values: np.ndarray, name: str) -> np.ndarray:
    """f32 [n_rows, n_per_row], C order -> u8 [n_rows, row_bytes] in ggml's layout of the named type."""
    if values.dtype != np.float32 or values.ndim != 2 or not values.flags.c_contiguous:
        raise EngineError(
            f"quantize_rows takes contiguous f32 [n_rows, n_per_row]; got {values.dtype} {values.shape}"
        )
    n_rows, n_per_row = values.shape
    rows = np.empty((n_rows, row_bytes(name, n_per_row)), np.uint8)
    written = lib.ggml_quantize_chunk(
        storage_type(name), values.ctypes.data, rows.ctypes.data, 0, n_rows, n_per_row, None
    )
    if written != rows.nbytes:
        raise EngineError(f"ggml wrote {written} bytes of {name}, {rows.nbytes} expected")
    return rows
