"""A child process that dies where AMX faults: multiplies once with weights in the AMX layout and exits 0.

Run as `python -m common.ggml.amx_probe` by backend.amx_is_safe, and by nothing else. It is a process of its own
because the fault it looks for is a signal that ends the process.
"""

from __future__ import annotations

import numpy as np

from .backend import AMX_LAYOUT, Backend, choose_device, extra_layouts
from .builder import GraphBuilder
from .graph import ComputeBuffer
from .tensor import F32, Arena, row_bytes

Q8_0 = 8
N_IN, N_OUT, N_ROWS = 256, 64, 64


def run_amx_once() -> None:
    """Multiplies a [N_IN, N_OUT] q8_0 weight in the AMX layout with N_ROWS rows."""
    device = choose_device("cpu")
    layouts = extra_layouts(device)
    if AMX_LAYOUT not in layouts:
        raise SystemExit("this build or processor has no AMX layout")
    backend = Backend(device)
    weights, inputs = Arena(1), Arena(1)
    weight, rows = weights.tensor(Q8_0, N_IN, N_OUT), inputs.tensor(F32, N_IN, N_ROWS)
    weights.allocate(layouts[AMX_LAYOUT], weights=True)
    inputs.allocate(backend.buffer_type)
    weight.write(np.zeros(row_bytes(Q8_0, N_IN) * N_OUT, np.uint8))
    rows.write(np.ones((N_ROWS, N_IN), np.float32))
    builder = GraphBuilder(4)
    product = builder.output(builder.matmul(weight, rows))
    graph = builder.finish()
    ComputeBuffer(backend).place(graph)
    backend.compute(graph.ptr)
    result = product.read(np.empty((N_ROWS, N_OUT), np.float32))
    if result.any():
        raise SystemExit("AMX multiplied zeros to something else")


if __name__ == "__main__":
    run_amx_once()
