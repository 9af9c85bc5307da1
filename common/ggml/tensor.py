"""Tensors and the memory they live in: `Tensor` (a checked handle) and `Arena` (tensors with one buffer).

Reads and writes go through the backend (tensor_set, tensor_get), not through host pointers, so that the same code
serves a GPU; `host_view` is the one exception, for what is worth it on the CPU. Knows nothing of graphs or models; used
by graph.py, common/state and common/engine.
"""

from __future__ import annotations

import ctypes as C

import numpy as np
import psutil

from common.errors import EngineError, OutOfMemoryError
from common.limits import GIB

from .ffi import BUFFER_USAGE_WEIGHTS, MAX_NAME, InitParams, TensorStruct, lib

F32, F16, I8, I32, I64 = 0, 1, 24, 26, 27
NUMPY_TYPES = {F32: np.float32, F16: np.float16, I8: np.int8, I32: np.int32, I64: np.int64}
TYPE_COUNT = 43


def type_name(ggml_type: int) -> str:
    """Name of a tensor type (`f16`, `q4_0`), also of one that this library does not know."""
    if not 0 <= ggml_type < TYPE_COUNT:
        return f"type {ggml_type}"
    name = lib.ggml_type_name(ggml_type)
    return name.decode() if name else f"type {ggml_type}"


def row_bytes(ggml_type: int, n_elements: int) -> int:
    """Bytes of one row of `n_elements`. Raises EngineError when blocks of the type do not divide it."""
    block = lib.ggml_blck_size(ggml_type)
    if block < 1 or n_elements % block:
        raise EngineError(
            f"a row of {n_elements} does not divide into {type_name(ggml_type)} blocks of {block}"
        )
    return lib.ggml_row_size(ggml_type, n_elements)


class Tensor:
    """A native tensor: its address, type and shape (`ne`, innermost first) and strides in bytes (`nb`).

    Valid as long as the arena or graph that made it.
    """

    __slots__ = ("nb", "ne", "ptr", "type")

    def __init__(self, ptr: int | None) -> None:
        if not ptr:
            raise OutOfMemoryError("libggml returned no tensor: its context is full")
        struct = TensorStruct.from_address(ptr)
        self.ptr: int = ptr
        self.type: int = struct.type
        self.ne: tuple[int, ...] = tuple(struct.ne)
        self.nb: tuple[int, ...] = tuple(struct.nb)

    def __repr__(self) -> str:
        return f"{type_name(self.type)} {list(self.ne)}"

    @property
    def struct(self) -> TensorStruct:
        """The native struct itself."""
        return TensorStruct.from_address(self.ptr)

    @property
    def n_elements(self) -> int:
        """Product of the shape."""
        return self.ne[0] * self.ne[1] * self.ne[2] * self.ne[3]

    @property
    def n_bytes(self) -> int:
        """Bytes from the first element to the end of the last."""
        return lib.ggml_nbytes(self.ptr)

    @property
    def is_contiguous(self) -> bool:
        """No gaps and no permutation."""
        ne, nb = self.ne, self.nb
        return (
            nb[1] == lib.ggml_row_size(self.type, ne[0])
            and (ne[2] == 1 or nb[2] == nb[1] * ne[1])
            and (ne[3] == 1 or nb[3] == nb[2] * ne[2])
        )

    def write(self, array: np.ndarray, offset_bytes: int = 0) -> None:
        """Copies a C-contiguous array to the tensor's memory, `offset_bytes` in. EngineError when it does not fit."""
        self.check(array, offset_bytes)
        lib.ggml_backend_tensor_set(self.ptr, array.ctypes.data, offset_bytes, array.nbytes)

    def read(self, array: np.ndarray, offset_bytes: int = 0) -> np.ndarray:
        """Fills a C-contiguous array from the tensor's memory and returns it. EngineError when out of bounds."""
        self.check(array, offset_bytes)
        lib.ggml_backend_tensor_get(self.ptr, array.ctypes.data, offset_bytes, array.nbytes)
        return array

    def write_strips(self, array: np.ndarray, offset_bytes: int, stride_bytes: int) -> None:
        """Copies the rows of a C-contiguous [n, m] array to places `stride_bytes` apart. Raises EngineError."""
        strip = self._check_strips(array, offset_bytes, stride_bytes)
        lib.ggml_backend_tensor_set_2d(
            self.ptr, array.ctypes.data, offset_bytes, strip, len(array), stride_bytes, strip
        )

    def read_strips(self, array: np.ndarray, offset_bytes: int, stride_bytes: int) -> np.ndarray:
        """Fills the rows of a C-contiguous [n, m] array from places `stride_bytes` apart. Raises EngineError."""
        strip = self._check_strips(array, offset_bytes, stride_bytes)
        lib.ggml_backend_tensor_get_2d(
            self.ptr, array.ctypes.data, offset_bytes, strip, len(array), stride_bytes, strip
        )
        return array

    def _check_strips(self, array: np.ndarray, offset_bytes: int, stride_bytes: int) -> int:
        if array.ndim != 2 or not array.size or stride_bytes < array.strides[0]:
            raise EngineError(f"strips are the rows of a matrix and do not overlap; got {list(array.shape)}")
        self.check(array, offset_bytes, (len(array) - 1) * stride_bytes + array.strides[0])
        return array.strides[0]

    def check(self, array: np.ndarray, offset_bytes: int = 0, extent_bytes: int | None = None) -> None:
        """EngineError unless the array is C-contiguous and its bytes (or a larger extent) lie inside the tensor."""
        if not array.flags.c_contiguous:
            raise EngineError("only C-contiguous arrays are copied to and from tensors")
        extent = array.nbytes if extent_bytes is None else extent_bytes
        if offset_bytes < 0 or offset_bytes + extent > self.n_bytes:
            raise EngineError(
                f"{extent} bytes at {offset_bytes} lie outside the {self.n_bytes} bytes of {self!r}"
            )
        if not self.struct.data:
            raise EngineError(f"{self!r} has no memory (nothing reads it, or it was not allocated)")


def host_view(tensor: Tensor) -> np.ndarray:
    """The tensor's memory itself, outermost axis first, valid while that memory is. For the CPU only.

    Raises EngineError for other types, gaps, and memory that this processor does not address.
    """
    struct = tensor.struct
    if tensor.type not in NUMPY_TYPES or not tensor.is_contiguous or not struct.data:
        raise EngineError(f"{tensor!r} is not seen as an array: NumPy needs its type, no gaps, and memory")
    if not lib.ggml_backend_buffer_is_host(struct.buffer):
        raise EngineError(f"{tensor!r} lies in the memory of another device")
    shape = tuple(struct.ne)
    dtype = np.dtype(NUMPY_TYPES[tensor.type])
    n_bytes = dtype.itemsize * shape[0] * shape[1] * shape[2] * shape[3]
    memory = (C.c_char * n_bytes).from_address(struct.data)
    return np.frombuffer(memory, dtype).reshape(shape[::-1])


class Port:
    """A tensor and an array of its first bytes, checked once: for what is exchanged before or after every run.

    The tensor must have memory, and keep it as long as the port is used.
    """

    def __init__(self, tensor: Tensor, array: np.ndarray) -> None:
        """array: C-contiguous, the tensor's first bytes. Raises EngineError."""
        tensor.check(array)
        self.array = array
        self._arguments = (tensor.ptr, array.ctypes.data, 0, array.nbytes)

    def send(self, values: np.ndarray | None = None) -> None:
        """Copies the array, after `values` are copied into it if there are some, to the tensor."""
        if values is not None:
            np.copyto(self.array, values)
        lib.ggml_backend_tensor_set(*self._arguments)

    def fetch(self) -> np.ndarray:
        """Copies the tensor to the array, and returns it: the next exchange changes it."""
        lib.ggml_backend_tensor_get(*self._arguments)
        return self.array


class Arena:
    """A set of tensors that lives and dies together, in one backend buffer.

    Declare tensors with `tensor`, then `allocate` once.
    """

    def __init__(self, n_tensors_max: int) -> None:
        self._n_left = n_tensors_max
        self._context = lib.ggml_init(
            InitParams(lib.ggml_tensor_overhead() * (n_tensors_max + 1), None, True)
        )
        self._buffer: int | None = None
        if not self._context:
            raise OutOfMemoryError(f"no memory for {n_tensors_max} tensor headers")

    def tensor(self, ggml_type: int, *shape: int, name: str = "") -> Tensor:
        """Declares a tensor of 1 to 4 dimensions, innermost first."""
        if not 1 <= len(shape) <= 4 or min(shape) < 1:
            raise EngineError(f"a tensor has 1 to 4 positive dimensions, not {list(shape)}")
        if self._n_left < 1:
            raise EngineError("the arena was declared smaller than it is used")
        row_bytes(ggml_type, shape[0])
        self._n_left -= 1
        tensor = Tensor(lib.ggml_new_tensor_4d(self._context, ggml_type, *(*shape, 1, 1, 1)[:4]))
        if name:
            lib.ggml_set_name(tensor.ptr, name.encode()[: MAX_NAME - 1])
        return tensor

    def allocate(
        self, buffer_type: int, *, weights: bool = False, clear: bool = False, share: float = 1.0
    ) -> int:
        """Gives every tensor memory of a buffer type; returns the bytes taken.

        share: of the memory, how much is in use at once. Memory that is not cleared is not touched here.
        Raises OutOfMemoryError, also for what the system would promise and could not give: it would kill us later.
        """
        needed = lib.ggml_backend_alloc_ctx_tensors_from_buft_size(self._context, buffer_type)
        available = psutil.virtual_memory().available
        if lib.ggml_backend_buft_is_host(buffer_type) and needed * share > available:
            raise OutOfMemoryError(
                f"{needed * share / GIB:.1f} GiB of tensors do not fit in the {available / GIB:.1f} GiB of memory that "
                f"are available; choose a smaller context (n_ctx) or model"
            )
        self._buffer = lib.ggml_backend_alloc_ctx_tensors_from_buft(self._context, buffer_type)
        if not self._buffer:
            raise OutOfMemoryError("no memory for tensors; choose a smaller context (n_ctx) or model")
        if weights:
            lib.ggml_backend_buffer_set_usage(self._buffer, BUFFER_USAGE_WEIGHTS)
        if clear:
            lib.ggml_backend_buffer_clear(self._buffer, 0)
        return lib.ggml_backend_buffer_get_size(self._buffer)

    def adopt(self, buffer: int, places: list[tuple[Tensor, int]]) -> None:
        """Places tensors inside a foreign buffer (mapped weights) at byte offsets from its base; the arena owns it."""
        self._buffer = buffer
        base, size = lib.ggml_backend_buffer_get_base(buffer), lib.ggml_backend_buffer_get_size(buffer)
        lib.ggml_backend_buffer_set_usage(buffer, BUFFER_USAGE_WEIGHTS)
        for tensor, offset in places:
            if offset < 0 or offset + tensor.n_bytes > size:
                raise EngineError(f"{tensor!r} at {offset} lies outside a buffer of {size} bytes")
            if lib.ggml_backend_tensor_alloc(buffer, tensor.ptr, base + offset):
                raise EngineError(f"libggml refused to place {tensor!r} at offset {offset}")

    def clear(self) -> None:
        """Zeroes all memory of the arena."""
        lib.ggml_backend_buffer_clear(self._buffer, 0)

    def close(self) -> None:
        """Frees headers and memory; the tensors are dead afterwards. Calling it again does nothing."""
        if self._buffer:
            lib.ggml_backend_buffer_free(self._buffer)
        if self._context:
            lib.ggml_free(self._context)
        self._buffer = self._context = None
