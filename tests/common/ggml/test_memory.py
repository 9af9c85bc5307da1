"""Aim: a wish for large memory pages changes no byte, wherever a tensor begins. Method: tensors of odd sizes."""

import numpy as np
import pytest

from common.ggml.backend import Backend, choose_device
from common.ggml.memory import prefer_large_pages
from common.ggml.tensor import F16, Arena


@pytest.mark.parametrize("n", [1, 5_000, 3_000_001])
def test_a_tensor_keeps_what_is_written_before_and_after(n):
    backend, arena = Backend(choose_device("cpu")), Arena(2)
    tensors = [arena.tensor(F16, n) for _ in range(2)]
    arena.allocate(backend.buffer_type)
    rng = np.random.default_rng(0)
    values = [rng.standard_normal(n).astype(np.float16) for _ in tensors]
    tensors[0].write(values[0])
    for tensor in tensors:
        prefer_large_pages(tensor)
    tensors[1].write(values[1])
    for tensor, value in zip(tensors, values, strict=True):
        assert tensor.read(np.empty(n, np.float16)).tobytes() == value.tobytes()
    arena.close()
    backend.close()
