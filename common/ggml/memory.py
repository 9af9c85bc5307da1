"""What the system is told of memory, without moving it: take this back, use large memory pages here, show this file.

`give_back` is for tensors whose old parts are kept elsewhere: addresses stay valid, what was there is gone. Works on
whole memory pages of the system and on private memory of this process only. Knows nothing of what the bytes mean; used
by common/state/page_memory.py, common/engine/mapped_pages.py, device/held_group.py and services/mac/hold_setup.py.
"""

from __future__ import annotations

import ctypes as C
import errno
import mmap
import os
import sys
import weakref
from pathlib import Path

import numpy as np

from common.errors import EngineError

from .ffi import lib
from .tensor import Tensor

_libc = C.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [C.c_void_p, C.c_size_t, C.c_int]
_libc.madvise.restype = C.c_int
_libc.mmap.argtypes = [C.c_void_p, C.c_size_t, C.c_int, C.c_int, C.c_int, C.c_int64]
_libc.mmap.restype = C.c_void_p
_libc.munmap.argtypes = [C.c_void_p, C.c_size_t]
_libc.munmap.restype = C.c_int
LARGE_BYTES = 1 << 20
M_MMAP_THRESHOLD = -3
"""In glibc's malloc.h."""
MAP_FAILED = C.c_void_p(-1).value
ADVICE = mmap.MADV_FREE if sys.platform == "darwin" else mmap.MADV_DONTNEED
"""Darwin gives anonymous memory back with MADV_FREE only, and when it likes; Linux at once."""


def give_back(tensor: Tensor, offset_bytes: int, n_bytes: int) -> int:
    """Gives the whole memory pages inside bytes [offset, offset + n) of a tensor back; returns how many bytes went.

    Raises EngineError for bytes outside the tensor, and for memory that this processor does not address.
    """
    struct = tensor.struct
    if offset_bytes < 0 or n_bytes < 0 or offset_bytes + n_bytes > tensor.n_bytes:
        raise EngineError(
            f"{n_bytes} bytes at {offset_bytes} lie outside the {tensor.n_bytes} bytes of {tensor!r}"
        )
    if not struct.data or not lib.ggml_backend_buffer_is_host(struct.buffer):
        raise EngineError(
            f"{tensor!r} lies in the memory of another device, which cannot be given back in part"
        )
    page = mmap.PAGESIZE
    first = -(-(struct.data + offset_bytes) // page) * page
    end = (struct.data + offset_bytes + n_bytes) // page * page
    if end <= first:
        return 0
    if _libc.madvise(first, end - first, ADVICE):
        raise EngineError(f"the system did not take memory back: {os.strerror(C.get_errno())}")
    return end - first


def prefer_large_pages(tensor: Tensor) -> bool:
    """Asks for memory pages of 2 MiB or so under a tensor, before it is written; whether the system takes the wish.

    Touching new memory of ordinary pages costs more than copying into it. Memory of another device is left alone.
    """
    struct, page = tensor.struct, mmap.PAGESIZE
    if not hasattr(mmap, "MADV_HUGEPAGE") or not lib.ggml_backend_buffer_is_host(struct.buffer):
        return False
    first = struct.data // page * page
    end = -(-(struct.data + tensor.n_bytes) // page) * page
    return _libc.madvise(first, end - first, mmap.MADV_HUGEPAGE) == 0


def return_large_blocks() -> bool:
    """Has this process give blocks of LARGE_BYTES and more back to the system as soon as they are free.

    glibc would keep them for later, in an arena for each thread: what a ubatch exchanges with a worker would then take
    its memory several times. Returns False where the allocator takes no such wish (it is glibc's alone).
    """
    mallopt = getattr(_libc, "mallopt", None) if sys.platform == "linux" else None
    return mallopt is not None and bool(mallopt(M_MMAP_THRESHOLD, LARGE_BYTES))


def copied_apart(data: np.ndarray) -> np.ndarray:
    """A copy, u8 [n_bytes], in memory of its own that goes back to the system with the last view of it.

    What the allocator gets back of megabytes it keeps for later: a process that copies a page now and then would hold
    that memory for good. Raises OSError, for example when there is no memory.
    """
    apart = np.frombuffer(mmap.mmap(-1, max(1, data.nbytes)), np.uint8)[: data.nbytes]
    apart[:] = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    return apart


def map_file(path: Path, offset: int, n_bytes: int) -> np.ndarray:
    """Bytes [offset, offset + n) of a file as they are there, u8 [n], for reading; unmapped with the last view of them.

    Holds no descriptor, unlike Python's own mappings: a long conversation maps thousands of pages, and a process may
    have 256 descriptors on a Mac. Raises OSError, also when the file ends before.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_size < offset + n_bytes:
            raise OSError(errno.EIO, f"the file ends before byte {offset + n_bytes}", str(path))
        first = offset - offset % mmap.ALLOCATIONGRANULARITY
        length = offset - first + n_bytes
        address = _libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, fd, first)
        if address == MAP_FAILED:
            raise OSError(C.get_errno(), os.strerror(C.get_errno()), str(path))
    finally:
        os.close(fd)
    block = (C.c_uint8 * length).from_address(address)
    weakref.finalize(block, _libc.munmap, address, length).atexit = False
    view = np.frombuffer(block, np.uint8)[offset - first :]
    view.flags.writeable = False
    return view
