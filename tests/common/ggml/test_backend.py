"""Devices, threads and weight layouts: what is offered is what this machine has, and nothing that would kill it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from common.errors import EngineError
from common.ggml.backend import (
    AMX_LAYOUT,
    CACHE_LINE_BYTES,
    Backend,
    _aligned,
    amx_is_safe,
    choose_device,
    devices,
    devices_for,
    extra_layouts,
    weight_layouts,
)
from common.ggml.layouts import takes_matrix

Q4_0, F32 = 2, 0


def test_the_cpu_is_always_there_and_last() -> None:
    assert devices_for("auto")[-1].is_cpu and choose_device("CPU") == choose_device("cpu")
    assert {d.name for d in devices_for("auto")} <= {d.name for d in devices()}


def test_what_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(EngineError, match=r"no device 'abacus'; this machine offers: .*CPU"):
        choose_device("abacus")
    for n in (0, 513):
        with pytest.raises(EngineError, match=f"n_threads is {n}; allowed are 1 to 512"):
            Backend(choose_device("cpu"), n_threads=n)


def test_work_memory_begins_on_a_cache_line_whatever_its_size() -> None:
    for n_bytes in (1, 17, 4096, 1 << 20):
        memory = _aligned(n_bytes)
        assert memory.nbytes == n_bytes and memory.ctypes.data % CACHE_LINE_BYTES == 0


def test_amx_is_offered_only_where_a_child_survived_it(checkout: Path) -> None:
    child = subprocess.run(
        [sys.executable, "-m", "common.ggml.amx_probe"],
        cwd=checkout,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert amx_is_safe() is (child.returncode == 0)
    cpu = choose_device("cpu")
    offered = set(weight_layouts(cpu))
    assert offered == set(extra_layouts(cpu)) - (set() if amx_is_safe() else {AMX_LAYOUT})


def test_layouts_take_matrices_they_can_multiply_and_nothing_else() -> None:
    cpu = choose_device("cpu")
    for buffer_type in weight_layouts(cpu).values():
        assert not takes_matrix(cpu, buffer_type, F32, (256, 64)), "f32 has nothing to rearrange"
        assert not takes_matrix(cpu, buffer_type, Q4_0, (256,))
        assert takes_matrix(cpu, buffer_type, Q4_0, (256, 64)) == takes_matrix(
            cpu, buffer_type, Q4_0, (512, 64)
        )


def test_a_backend_maps_memory_and_closes_twice() -> None:
    backend = Backend(choose_device("cpu"), n_threads=2)
    memory = np.zeros(1 << 16, np.uint8)
    aligned = memory[-memory.ctypes.data % 4096 :][: 1 << 12]
    assert backend.map_host_memory(aligned, 1 << 12)
    backend.close(), backend.close()
