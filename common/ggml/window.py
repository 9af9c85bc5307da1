"""Windows: views in a finished graph that are moved to other memory, so that one graph serves all pages of one shape.

A view's struct says where it looks (buffer, source, address) and in which strides; rewriting these is all that a move
is. Knows nothing of what lies there; used by common/engine/page_graph.py.
"""

from __future__ import annotations

import ctypes as C

from common.errors import EngineError

from .ffi import TensorStruct
from .tensor import Tensor, row_bytes

WORD = C.sizeof(C.c_size_t)
STRIDES_AT = TensorStruct.nb.offset + WORD  # the innermost elements always lie side by side
SOURCE_AT, SOURCE_END = TensorStruct.src.offset, TensorStruct.data.offset + WORD
FIELDS = (
    slice(TensorStruct.buffer.offset, TensorStruct.buffer.offset + WORD),
    slice(STRIDES_AT, STRIDES_AT + 3 * WORD),
    slice(SOURCE_AT, SOURCE_END),
)
"""Of the struct: what a move rewrites. Between src and data lie view_src and view_offs, and nothing else."""
assert SOURCE_AT < TensorStruct.view_src.offset < TensorStruct.view_offs.offset < TensorStruct.data.offset


class WindowPlace:
    """Where a window may look: from a byte of a tensor on, in strides of bytes of axes 1 and 2."""

    __slots__ = ("values",)

    def __init__(
        self, of: Tensor, shape: tuple[int, int, int], strides: tuple[int, int], offset: int
    ) -> None:
        """shape: the most that is looked at, innermost first. The tensor must have memory, and keep it.

        Raises EngineError for what lies outside of it.
        """
        end = (
            offset
            + row_bytes(of.type, shape[0])
            + sum((n - 1) * s for n, s in zip(shape[1:], strides, strict=True))
        )
        data = of.struct.data
        if not data or offset < 0 or end > of.n_bytes:
            raise EngineError(
                f"a window {list(shape)} at {offset} with strides {list(strides)} is not in {of!r}"
            )
        there = TensorStruct(buffer=of.struct.buffer, view_src=of.ptr, view_offs=offset, data=data + offset)
        there.src[0] = of.ptr
        there.nb[1:] = [*strides, strides[1] * shape[2]]
        struct = bytes(there)
        self.values = tuple(struct[field] for field in FIELDS)


class Window:
    """A view of up to three axes in a graph. Valid as long as the graph is."""

    def __init__(self, view: Tensor) -> None:
        struct = memoryview((C.c_char * C.sizeof(TensorStruct)).from_address(view.ptr)).cast("B")
        self._fields = tuple(struct[field] for field in FIELDS)

    def move(self, place: WindowPlace) -> None:
        """Look there from the next run on."""
        buffer, strides, source = self._fields
        buffer[:], strides[:], source[:] = place.values
