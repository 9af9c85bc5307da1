"""Compressed constants: look-up tables, block-wise scales, casts. Each is evaluated once and kept by the runner."""

from __future__ import annotations

from typing import Any

import numpy as np

from common.errors import PackageError
from device.coreml import blob_format
from device.coreml.reference.arithmetic import Arithmetic, wide
from device.coreml.reference.ops.registry import ints, operation


@operation("constexpr_lut_to_dense")
def constexpr_lut_to_dense(
    arith: Arithmetic, indices: np.ndarray, lut: np.ndarray, shape: Any = None, vector_axis: Any = None
) -> np.ndarray:
    """Both forms: packed indices with one table (iOS 16), and indices [*dims] with tables [*groups, n, vector]."""
    if shape is not None:
        n_elements = int(np.prod(ints(shape)))
        bits = int(lut.size).bit_length() - 1
        return lut[blob_format.unpack_bits(indices, bits, n_elements)].reshape(ints(shape))
    n_groups, n_vector = lut.shape[:-2], lut.shape[-1]
    if indices.size and int(indices.max()) >= lut.shape[-2]:
        raise PackageError(f"palette index {indices.max()} is outside a table of {lut.shape[-2]} entries")
    vectors = lut[(*_groups(indices.shape, n_groups), indices)]  # [*dims, vector]
    if n_vector == 1:
        return vectors[..., 0]
    axis = int(vector_axis) % indices.ndim
    merged = np.moveaxis(vectors, -1, axis + 1)
    return merged.reshape([n * n_vector if i == axis else n for i, n in enumerate(indices.shape)])


@operation("constexpr_blockwise_shift_scale")
def constexpr_blockwise_shift_scale(
    arith: Arithmetic, data: np.ndarray, scale: np.ndarray, offset: np.ndarray | None = None
) -> np.ndarray:
    """scale * (data - offset), each scale serving one block of data."""
    block = _groups(data.shape, scale.shape)
    values = data.astype(np.float32)
    if offset is not None:
        values = values - offset[block].astype(np.float32)
    return values * wide(scale)[block]


@operation("constexpr_affine_dequantize")
def constexpr_affine_dequantize(
    arith: Arithmetic, quantized_data: np.ndarray, zero_point: np.ndarray, scale: np.ndarray, axis: Any
) -> np.ndarray:
    shape = [-1 if i == int(axis) else 1 for i in range(quantized_data.ndim)]

    def along(values: np.ndarray) -> np.ndarray:
        return values if values.ndim == 0 else values.reshape(shape)

    shifted = quantized_data.astype(np.float32) - along(zero_point).astype(np.float32)
    return along(wide(scale)) * shifted


@operation("constexpr_cast")
def constexpr_cast(arith: Arithmetic, source_val: np.ndarray, output_dtype: str) -> np.ndarray:
    if output_dtype != "fp32":
        raise PackageError(f"constexpr_cast to {output_dtype!r}; MIL knows fp32 only")
    return source_val.astype(np.float32)


def _groups(dims: tuple[int, ...], groups: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """For each axis, which group each position belongs to; shaped so that the arrays broadcast together."""
    if len(dims) != len(groups) or any(n % g for n, g in zip(dims, groups, strict=True)):
        raise PackageError(f"groups {groups} do not divide a constant of shape {dims}")
    rank = len(dims)
    return tuple(
        (np.arange(n) // (n // g)).reshape([-1 if i == axis else 1 for i in range(rank)])
        for axis, (n, g) in enumerate(zip(dims, groups, strict=True))
    )
