"""Graphs built once and run many times, and the memory of their intermediate results.

A Graph is made by builder.py, placed in a ComputeBuffer and run by a Backend. Knows nothing of layers; used by
common/engine.
"""

from __future__ import annotations

import ctypes as C
from collections.abc import Sequence
from itertools import pairwise

from common.errors import EngineError, OutOfMemoryError

from .backend import Backend
from .ffi import InitParams, TensorStruct, lib


class Graph:
    """A finished graph: nodes, the memory of their headers, and what may be read after a run."""

    def __init__(self, context: int, ptr: int) -> None:
        self._context: int | None = context
        self.ptr = ptr
        self.n_nodes: int = lib.ggml_graph_n_nodes(ptr)

    def unsupported(self, backend: Backend) -> list[str]:
        """Operations in the graph that the backend cannot run."""
        nodes = (lib.ggml_graph_node(self.ptr, i) for i in range(self.n_nodes))
        return sorted({lib.ggml_op_desc(n).decode() for n in nodes if not backend.supports(n)})

    def parts(self, cuts: Sequence[int]) -> GraphParts:
        """The graph as consecutive parts, cut before the nodes of these numbers. Raises EngineError."""
        return GraphParts(self, cuts)

    def close(self) -> None:
        """Frees the graph. Calling it again does nothing."""
        if self._context:
            lib.ggml_free(self._context)
        self._context = None


class GraphParts:
    """A graph cut into pieces that run one after the other, so that the host can act in between.

    The pieces are lists of the same nodes: results stay where the whole graph's placement put them, for as long as no
    other graph of that compute buffer runs in between.
    """

    def __init__(self, graph: Graph, cuts: Sequence[int]) -> None:
        edges = [0, *cuts, graph.n_nodes]
        if any(a >= b for a, b in pairwise(edges)):
            raise EngineError(f"a graph of {graph.n_nodes} nodes cannot be cut before {list(cuts)}")
        sizes = [b - a for a, b in pairwise(edges)]
        n_bytes = sum(lib.ggml_graph_overhead_custom(size, False) for size in sizes)
        self._context: int | None = lib.ggml_init(InitParams(n_bytes + 64 * len(sizes), None, True))
        if not self._context:
            raise OutOfMemoryError(f"no memory for the {len(sizes)} parts of a graph")
        self.ptrs: list[int] = []
        for first, end in pairwise(edges):
            part = lib.ggml_new_graph_custom(self._context, end - first, False)
            for number in range(first, end):
                lib.ggml_graph_add_node(part, lib.ggml_graph_node(graph.ptr, number))
            self.ptrs.append(part)

    def close(self) -> None:
        """Frees the lists, not the graph. Calling it again does nothing."""
        if self._context:
            lib.ggml_free(self._context)
        self._context = None


class ComputeBuffer:
    """The memory of intermediate results, shared by all graphs of an engine that run one after another.

    When it must grow, graphs placed before point at freed memory: `place` then says so, and the caller drops them.
    """

    def __init__(self, backend: Backend) -> None:
        self._ptr: int | None = lib.ggml_gallocr_new(backend.buffer_type)

    @property
    def n_bytes(self) -> int:
        """Bytes allocated now."""
        return lib.ggml_gallocr_get_buffer_size(self._ptr, 0)

    def place(self, graph: Graph) -> bool:
        """Gives the graph's nodes memory. True when the buffer grew: every graph placed earlier is void.

        Raises OutOfMemoryError.
        """
        before = self.n_bytes
        # Reserve first, always: a plan made for another graph of the same size must not be taken for this one's.
        if not (
            lib.ggml_gallocr_reserve(self._ptr, graph.ptr)
            and lib.ggml_gallocr_alloc_graph(self._ptr, graph.ptr)
        ):
            raise OutOfMemoryError("no memory for intermediate results; choose a smaller ubatch (n_ubatch)")
        return self.n_bytes != before

    def make_resident(self, graph: Graph) -> None:
        """Writes zeros to all of the memory, in which `graph` was just placed: the system gives what is written to.

        Otherwise memory grows when the deepest graph first runs, long after the start.
        """
        for number in range(graph.n_nodes):
            buffer = C.cast(lib.ggml_graph_node(graph.ptr, number), C.POINTER(TensorStruct)).contents.buffer
            if buffer and lib.ggml_backend_buffer_get_size(buffer) == self.n_bytes:
                lib.ggml_backend_buffer_clear(buffer, 0)
                return

    def close(self) -> None:
        """Frees the memory. Calling it again does nothing."""
        if self._ptr:
            lib.ggml_gallocr_free(self._ptr)
        self._ptr = None
