"""Aim: a wish for large memory pages changes no byte, wherever a tensor begins; a file is seen as it is, for no more
than memory. Method: tensors of odd sizes; a file of random bytes, looked at in pieces that begin anywhere."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from common.ggml.backend import Backend, choose_device
from common.ggml.memory import copied_apart, map_file, prefer_large_pages
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


def is_mapped(path):
    """Whether this process has the file mapped; None where the system does not tell."""
    told = Path("/proc/self/maps")
    return str(path) in told.read_text() if told.exists() else None


def test_a_file_is_mapped_without_descriptors_and_let_go_with_the_last_view(tmp_path):
    path, data = tmp_path / "pages", np.random.default_rng(1).bytes(300_000)
    path.write_bytes(data)
    before = psutil.Process().num_fds()
    views = [map_file(path, offset, 5_000) for offset in range(0, 290_000, 777)]
    assert psutil.Process().num_fds() == before
    parts = [view[100:200] for view in views]
    path.unlink()  # what is mapped stays
    del views
    gc.collect()
    for offset, part in zip(range(0, 290_000, 777), parts, strict=True):
        assert part.tobytes() == data[offset + 100 : offset + 200]
    with pytest.raises(ValueError, match="read-only"):
        parts[0][0] = 1
    assert is_mapped(path) is not False
    del parts, part
    gc.collect()
    assert not is_mapped(path)


def test_a_file_that_ends_before_is_refused(tmp_path):
    path = tmp_path / "short"
    path.write_bytes(bytes(4096))
    assert len(map_file(path, 0, 4096)) == 4096
    with pytest.raises(OSError, match="ends before byte 4097"):
        map_file(path, 1, 4096)
    with pytest.raises(FileNotFoundError):
        map_file(tmp_path / "none", 0, 1)


@pytest.mark.parametrize("n", [0, 1, 5_000, 3_000_001])
def test_a_copy_apart_is_the_same_and_no_more_the_original(n):
    data = np.random.default_rng(2).integers(0, 255, n, np.uint8)
    apart = copied_apart(data)
    right = data.tobytes()
    data[:] = 0
    assert apart.tobytes() == right


GROWTH = """
import sys
import numpy as np, psutil
from common.ggml.memory import return_large_blocks
taken = return_large_blocks()
def own():
    return psutil.Process().memory_full_info().uss
before = own()
kept = []
for _ in range(12):  # small blocks behind large ones keep the allocator from giving these back
    large = np.ones(6 << 20, np.uint8)
    kept.append(np.ones(5_000, np.uint8))
    del large
print(taken, (own() - before) >> 20)
"""


def test_large_blocks_go_back_to_the_system_when_they_are_free():
    """In a process of its own: the wish holds for all of it."""
    done = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True)
    taken, grown_mib = done.stdout.split()
    assert taken == str(sys.platform == "linux" and os.confstr("CS_GNU_LIBC_VERSION") is not None)
    assert int(grown_mib) <= 2
