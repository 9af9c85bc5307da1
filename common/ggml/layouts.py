"""Asks a device whether it multiplies a matrix kept in one of its own layouts (repacked, AMX).

Knows nothing of models; used by common/engine/weights.py.
"""

from __future__ import annotations

import functools

from .backend import Device
from .ffi import InitParams, lib
from .tensor import F32, Tensor

N_ROWS_PROBED = 512
"""Rows of the multiplication asked about: as stock llama.cpp asks, so that both choose alike."""


@functools.cache
def _empty_buffer(buffer_type: int) -> int:
    """A buffer of no bytes, kept for the life of the process: it only says which layout a tensor would have."""
    return lib.ggml_backend_buft_alloc_buffer(buffer_type, 0)


@functools.cache
def takes_matrix(device: Device, buffer_type: int, ggml_type: int, shape: tuple[int, ...]) -> bool:
    """True when the device can multiply a [n_in, n_out] matrix of this type out of this layout."""
    if len(shape) != 2:
        return False
    context = lib.ggml_init(InitParams(4 * lib.ggml_tensor_overhead(), None, True))
    try:
        weight = Tensor(lib.ggml_new_tensor_2d(context, ggml_type, *shape))
        rows = Tensor(lib.ggml_new_tensor_2d(context, F32, shape[0], N_ROWS_PROBED))
        weight.struct.buffer = _empty_buffer(buffer_type)
        product = lib.ggml_mul_mat(context, weight.ptr, rows.ptr)
        return lib.ggml_backend_dev_supports_op(device.ptr, product)
    finally:
        lib.ggml_free(context)
