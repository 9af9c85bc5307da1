"""GraphCache: the graphs of an engine, built once and used for every step of the same shape.

A graph is told apart by its sequence, layers, rows and logits. How far back attention reads is not part of that: a
finished graph is aimed at another cache extent by rewriting the extents of the views concerned. All graphs share one
compute buffer. Used by span.py.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.errors import UnsupportedOperationError
from common.ggml.backend import Backend
from common.ggml.builder import GraphBuilder
from common.ggml.graph import ComputeBuffer, Graph, GraphParts
from common.ggml.tensor import Tensor
from common.state.sequence import SequenceState

from .arch import SELECTS_EARLY, builder
from .inputs import Inputs
from .step import Step
from .weights import OUTPUT, Weights

GRAPHS_MAX = 24
NODES_PER_LAYER_MAX = 80
NODES_OUTSIDE_LAYERS_MAX = 32

Shape = tuple[int, int, int, int]
"""first layer, end layer, rows in, rows of logits out"""
Key = tuple[Any, ...]
"""The sequence's state, then numbers"""


@dataclass
class PlacedGraph:
    """A graph with memory, what it yields (None when only rows and states are kept), and the step it was made of."""

    graph: Graph
    result: Tensor | None
    step: Step
    n_kv: int
    parts: GraphParts | None = None
    """The graph in pieces, when its step has cuts."""

    def aim(self, n_kv: int) -> None:
        """Lets attention read the cells [0, n_kv)."""
        if n_kv != self.n_kv:
            self.n_kv = n_kv
            self.step.aim(n_kv)

    def read(self) -> np.ndarray:
        """The result of the last run, f32 [n_rows, n_embd or n_vocab], or [0, 0] for none."""
        if self.result is None:
            return np.empty((0, 0), np.float32)
        return self.result.read(np.empty(self.result.ne[1::-1], np.float32))

    def close(self) -> None:
        """Frees the graph. Calling it again does nothing."""
        if self.parts:
            self.parts.close()
        self.graph.close()


class GraphCache:
    """Builds, places, keeps and runs graphs over one set of weights and one set of inputs, for several sequences."""

    def __init__(self, backend: Backend, weights: Weights, state: SequenceState, inputs: Inputs) -> None:
        self._backend, self._weights, self._state, self._inputs = backend, weights, state, inputs
        self._spec = state.spec
        self._buffer = ComputeBuffer(backend)
        self._graphs: OrderedDict[Key, PlacedGraph] = OrderedDict()
        self.n_built = 0

    @property
    def compute_bytes(self) -> int:
        """Bytes of intermediate results."""
        return self._buffer.n_bytes

    def reserve(self, n_tokens: int) -> None:
        """Takes the memory the largest usual graph needs, and checks that the backend can run all of it."""
        self._reserve(n_tokens, self._state.n_ctx)

    def _reserve(self, n_tokens: int, n_kv: int) -> PlacedGraph:
        layers = self._spec.layers
        n_out = 1 if self._spec.has_output else 0
        shape = (layers.start, layers.stop, n_tokens, n_out)
        placed = self._get(shape, n_kv, self._state)
        if missing := placed.graph.unsupported(self._backend):
            raise UnsupportedOperationError(f"{self._backend.name} cannot run {', '.join(missing)}")
        return placed

    def run(
        self, shape: Shape, rows: np.ndarray, position: int, n_kv: int, state: SequenceState
    ) -> np.ndarray:
        """Runs a graph on rows at `position`; returns f32 [n_rows, n_embd or n_vocab], or [0, 0] for none."""
        placed = self._ready(shape, rows, position, n_kv, state)
        self._backend.compute(placed.graph.ptr)
        return placed.read()

    def _ready(
        self, shape: Shape, rows: np.ndarray, position: int, n_kv: int, state: SequenceState
    ) -> PlacedGraph:
        """The graph of this shape, aimed, and all inputs written."""
        first, last, n_tokens, n_out = shape
        state.clean(range(first, last), n_kv)
        placed = self._get(shape, n_kv, state)
        placed.aim(n_kv)
        self._inputs.write_rows(rows)
        self._write_place(position, n_tokens, n_kv)
        if 0 < n_out < n_tokens:
            self._inputs.write_out_ids(n_tokens, n_out)
        return placed

    def _write_place(self, position: int, n_tokens: int, n_kv: int) -> None:
        self._inputs.write_place(position, n_tokens, n_kv)

    def forget(self, state: SequenceState) -> None:
        """Drops the graphs of a sequence whose memory is about to be freed."""
        for key in [key for key in self._graphs if key[0] is state]:
            self._graphs.pop(key).close()

    def _key(self, shape: Shape, n_kv: int, state: SequenceState) -> Key:
        """What graphs are told apart by."""
        return state, *shape

    def _get(self, shape: Shape, n_kv: int, state: SequenceState) -> PlacedGraph:
        key = self._key(shape, n_kv, state)
        placed = self._graphs.get(key)
        if placed is not None:
            self._graphs.move_to_end(key)
            return placed
        if len(self._graphs) >= GRAPHS_MAX:
            self._graphs.popitem(last=False)[1].close()
        placed = self._build(shape, n_kv, state)
        if self._buffer.place(placed.graph):
            self._drop_all()
        self._graphs[key] = placed
        return placed

    def _build(self, shape: Shape, n_kv: int, state: SequenceState) -> PlacedGraph:
        step = self._step(shape, n_kv, state)
        try:
            result = self._chain(step)
        except BaseException:
            step.builder.drop()
            raise
        self.n_built += 1
        return PlacedGraph(step.builder.finish(), result, step, n_kv)

    def _step(self, shape: Shape, n_kv: int, state: SequenceState) -> Step:
        """A step with an empty graph."""
        first, last, n_tokens, n_out = shape
        g = GraphBuilder((last - first) * NODES_PER_LAYER_MAX + NODES_OUTSIDE_LAYERS_MAX)
        early = SELECTS_EARLY[self._spec.arch]
        return Step(g, self._weights, state, self._inputs, first, last, n_tokens, n_out, n_kv, early)

    def _chain(self, step: Step) -> Tensor | None:
        """Embedding or residual, the layers, and the output head where the span ends the model."""
        g, n_embd = step.builder, self._spec.n_embd
        if step.first == 0:
            tokens = g.view(self._inputs.tokens, (step.n_tokens,))
            embedded = g.get_rows(self._weights["token_embd.weight"], tokens)
            scale = self._spec.embedding_scale
            x: Tensor | None = embedded if scale == 1.0 else g.scale(embedded, scale)
        else:
            x = g.view(self._inputs.residual, (n_embd, step.n_tokens))
        build_layer = builder(self._spec.arch)
        for layer in range(step.first, step.last):
            assert x is not None, "only the last layer of a model ends early"
            x = build_layer(step, layer, x)
        if x is None:
            return None
        if step.ends_model:
            x = g.norm(x, self._weights["output_norm.weight"], self._spec.eps)
            if not step.selects_early:
                x = step.select(x)
            x = g.matmul(self._weights[OUTPUT], x)
        return Tensor(g.output(x).ptr)

    def _drop_all(self) -> None:
        for placed in self._graphs.values():
            placed.close()
        self._graphs.clear()

    def close(self) -> None:
        """Frees graphs and compute buffer. Calling it again does nothing."""
        self._drop_all()
        self._buffer.close()
