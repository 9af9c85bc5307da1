"""Aim: memory that the machine does not have is refused with both numbers, before the system kills somebody for it.

Method: one tensor, larger than what is available by a GiB.
"""

from __future__ import annotations

import psutil
import pytest

from common.errors import OutOfMemoryError
from common.ggml.backend import Backend, choose_device
from common.ggml.tensor import F16, Arena
from common.limits import GIB


def test_more_than_the_machine_can_give_is_refused():
    backend, arena = Backend(choose_device("cpu")), Arena(1)
    n_values = (psutil.virtual_memory().available + GIB) // 2
    arena.tensor(F16, 1 << 10, n_values >> 10)
    with pytest.raises(OutOfMemoryError, match=r"GiB of tensors do not fit in the .* GiB .* smaller context"):
        arena.allocate(backend.buffer_type)
    arena.close()
    backend.close()
