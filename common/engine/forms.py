"""Which form of attention many rows take on this machine: ggml's kernels, or NumPy's matrix products.

Neither is the faster one everywhere: ggml's kernels were 1.2 times as fast on one processor, NumPy's twice as fast on
another. A machine is measured once, and the answer is remembered beside its checks: all processes of a machine must
agree, because the forms round differently. NumPy has to win clearly. Used by the benches, and where pages are attended
by many rows.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np

from common.ggml.backend import Backend
from common.ggml.tensor import F16, Arena
from common.model.embedded import models_folder
from common.state.pages import PageLayout

from .first_start import machine_key
from .kv_source import QueryRows
from .page_graph import PageRef, PageShape
from .page_kernel import Form, PageKernel

N_HEAD_KV, N_GROUP, HEAD_DIM, N_KEYS, N_TOKENS, N_ROUNDS = 2, 6, 128, 1024, 64, 6
CLEARLY = 1.2
"""NumPy's form is taken where it is at least so many times as fast."""


def remembered_form(backend: Backend, cache_folder: Path | None = None) -> Form:
    """The form for this backend and its threads: read from `cache_folder`, or measured now (0.2 s) and written there.

    cache_folder: by default beside the models, where the first-start check is remembered.
    """
    if not backend.device.is_cpu:
        return "kernels"
    folder = cache_folder or models_folder().parent / "checks"
    remembered = folder / f"many-rows-{machine_key()}-{backend.n_threads}"
    if not remembered.exists():
        folder.mkdir(parents=True, exist_ok=True)
        measured = folder / f"{remembered.name}.{os.getpid()}"
        measured.write_text("products" if measure(backend) >= CLEARLY else "kernels")
        with suppress(
            FileExistsError
        ):  # two processes may measure at once: the first to end decides for both
            remembered.hardlink_to(measured)
        measured.unlink()
    return "products" if remembered.read_text() == "products" else "kernels"


def measure(backend: Backend) -> float:
    """Seconds of ggml's kernels / seconds of NumPy's products, the best of several runs of each.

    Not in turns: threads of the one spin for a while after their work and would take the other's time.
    """
    layout = PageLayout(N_KEYS, N_KEYS, N_HEAD_KV, HEAD_DIM)
    arena = Arena(2)
    k, v = arena.tensor(F16, HEAD_DIM, N_HEAD_KV * N_KEYS), arena.tensor(F16, 1, layout.n_value_elements)
    arena.allocate(backend.buffer_type, clear=True)
    head, line = 2 * HEAD_DIM, 2 * layout.line(0)
    ref = PageRef(k, 0, (head, head * N_KEYS), v, 0, (line, HEAD_DIM * line), 0, N_KEYS)
    rows = QueryRows(N_KEYS, N_TOKENS, N_GROUP)
    q, shape = np.ones((N_HEAD_KV, rows.n_rows, HEAD_DIM), np.float32), PageShape(N_HEAD_KV, HEAD_DIM, N_KEYS)
    kernels, products = PageKernel(backend, shape), PageKernel(backend, shape, form="products")
    seconds = [
        min(_seconds(partial(form.attend, q, 1.0, (ref,), rows)) for _ in range(N_ROUNDS))
        for form in (kernels, products)
    ]
    kernels.close()
    products.close()
    arena.close()
    return seconds[0] / seconds[1]


def _seconds(act: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    act()
    return time.perf_counter() - started_s
