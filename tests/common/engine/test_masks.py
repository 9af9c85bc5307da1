"""Masks show exactly the cells they should, however a sequence moves.

Method: random walks of ubatches and single tokens, forwards, backwards and repeated, over a small cache; after each
step the bytes that attention would read are compared with the definition.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from common.engine.masks import TENSORS_PER_MASK, CausalMask
from common.ggml.backend import Backend, choose_device
from common.ggml.builder import GraphBuilder
from common.ggml.tensor import Arena

N_CTX, N_UBATCH = 48, 8


@given(
    window=st.none() | st.integers(1, 2 * N_CTX),
    steps=st.lists(st.tuples(st.integers(0, N_CTX - 1), st.integers(1, N_UBATCH), st.integers(0, N_CTX))),
)
def test_every_row_sees_what_the_definition_says(
    window: int | None, steps: list[tuple[int, int, int]]
) -> None:
    backend, arena = Backend(choose_device("cpu")), Arena(TENSORS_PER_MASK)
    mask = CausalMask(arena, N_CTX, N_UBATCH, window)
    arena.allocate(backend.buffer_type)
    mask.clear()
    for position, n_tokens, beyond in steps:
        n_tokens = min(n_tokens, N_CTX - position)
        n_kv = min(N_CTX, position + n_tokens + beyond)
        mask.write(position, n_tokens, n_kv)
        builder = GraphBuilder(1)
        view = mask.view(builder, n_kv, n_tokens)
        seen = view.read(np.empty((n_tokens, n_kv), np.float16)) == 0
        builder.drop()
        distance = np.arange(position, position + n_tokens)[:, None] - np.arange(n_kv)
        assert np.array_equal(seen, (distance >= 0) & (distance < (window or N_CTX)))
    arena.close()
    backend.close()
