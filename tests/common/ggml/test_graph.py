"""Graphs compute what they say, and no operand can end the process: misfits are EngineErrors.

Results are compared with NumPy. The property at the end offers random operands to every operation; libggml aborts on a
misfit that slips through, which would end this test run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import EngineError
from common.ggml.backend import Backend, choose_device
from common.ggml.builder import ROPE_INTERLEAVED_SECTIONS, ROPE_NORMAL, GraphBuilder
from common.ggml.graph import ComputeBuffer
from common.ggml.tensor import F16, F32, I32, I64, Arena, Port, Tensor, row_bytes, type_name

Q8_0, Q4_0 = 8, 2


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    backend = Backend(choose_device("cpu"), n_threads=2)
    yield backend
    backend.close()


def compute(
    backend: Backend, build: Callable[[GraphBuilder, list[Tensor]], Tensor], *arrays: np.ndarray
) -> np.ndarray:
    """Runs a small graph on f32 (or integer) arrays; the result as f32, outermost axis first."""
    types = {
        np.dtype(np.float32): F32,
        np.dtype(np.int32): I32,
        np.dtype(np.int64): I64,
        np.dtype(np.float16): F16,
    }
    arena, buffer = Arena(len(arrays)), ComputeBuffer(backend)
    tensors = [arena.tensor(types[a.dtype], *a.shape[::-1]) for a in arrays]
    arena.allocate(backend.buffer_type)
    for tensor, array in zip(tensors, arrays, strict=True):
        tensor.write(np.ascontiguousarray(array))
    builder = GraphBuilder(32)
    result = builder.output(build(builder, tensors))
    graph = builder.finish()
    buffer.place(graph)
    assert graph.unsupported(backend) == []
    backend.compute(graph.ptr)
    values = result.read(np.empty(result.ne[::-1], np.float32))
    graph.close(), buffer.close(), arena.close()
    return values


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape, np.float32)


def test_matmul_is_rows_times_transposed_weight(backend: Backend) -> None:
    w, x = random(5, 8), random(3, 8)
    got = compute(backend, lambda g, t: g.matmul(*t), w, x)[0, 0]
    np.testing.assert_allclose(got, x @ w.T, rtol=1e-5, atol=1e-5)


def test_norm_gate_and_sum(backend: Backend) -> None:
    x, w = random(3, 8), random(8)
    got = compute(backend, lambda g, t: g.add(g.swiglu(t[0], t[0]), g.norm(t[0], t[1], 1e-5)), x, w)[0, 0]
    norm = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-5) * w
    np.testing.assert_allclose(got, x / (1 + np.exp(-x)) * x + norm, rtol=1e-4, atol=1e-5)


def test_rows_are_picked_and_set(backend: Backend) -> None:
    a, ids = random(6, 4), np.array([5, 0, 5], np.int32)
    assert np.array_equal(compute(backend, lambda g, t: g.get_rows(*t), a, ids)[0, 0], a[ids])
    rows, cells = random(2, 4), np.array([3, 1], np.int64)
    got = compute(backend, lambda g, t: g.view(g.set_rows(*t), (4, 6)), a, rows, cells)[0, 0]
    a[cells] = rows
    assert np.array_equal(got, a)


def test_views_follow_strides_and_offset(backend: Backend) -> None:
    a = random(6, 4)
    got = compute(backend, lambda g, t: g.cont_2d(g.view(t[0], (2, 3), (32,), 8), 2, 3), a)[0, 0]
    assert np.array_equal(got, a[::2, 2:])


def test_softmax_and_where_it_is_largest(backend: Backend) -> None:
    a, mask = random(2, 3, 8), np.where(np.arange(8) < np.array([[3], [8], [5]]), 0, -np.inf)
    got = compute(backend, lambda g, t: g.soft_max(t[0], t[1], 0.5), a, mask.astype(np.float16))[0]
    weights = np.exp(0.5 * a + mask)
    np.testing.assert_allclose(got, weights / weights.sum(axis=-1, keepdims=True), rtol=1e-5)
    flat = a.reshape(6, 8)

    def largest(g: GraphBuilder, t: list[Tensor]) -> Tensor:
        return g.get_rows(g.reshape(t[0], 1, 8, 6), g.reshape(g.argmax(t[0]), 1, 6))

    assert np.array_equal(compute(backend, largest, flat)[0, :, 0, 0], flat.max(axis=1))


def test_outer_products_sum_over_terms(backend: Backend) -> None:
    a, b = random(2, 5, 8), random(2, 3, 5)
    got = compute(backend, lambda g, t: g.outer_product(t[0], g.permute(t[1], 1, 0, 2, 3)), a, b)[0]
    np.testing.assert_allclose(got, b @ a, rtol=1e-5, atol=1e-5)


def test_a_graph_runs_in_parts_with_the_host_in_between(backend: Backend) -> None:
    """The second part reads what the first one left, and what the host wrote after it."""
    arena, buffer, g = Arena(2), ComputeBuffer(backend), GraphBuilder(8)
    a, between = arena.tensor(F32, 4), arena.tensor(F32, 4)
    arena.allocate(backend.buffer_type, clear=True)
    doubled = g.run(g.scale(a, 2.0))
    cut = g.n_nodes
    result = g.output(g.add(g.scale(doubled, 3.0), between))
    graph = g.finish()
    buffer.place(graph)
    for cuts in ([0], [cut, cut], [graph.n_nodes]):
        with pytest.raises(EngineError, match="cannot be cut before"):
            graph.parts(cuts)
    parts = graph.parts([cut])
    assert (cut, len(parts.ptrs)) == (1, 2)
    a.write(np.arange(4, dtype=np.float32))
    backend.compute(parts.ptrs[0])
    between.write(doubled.read(np.empty(4, np.float32)) + 1)
    backend.compute(parts.ptrs[1])
    assert result.read(np.empty(4, np.float32)).tolist() == [1, 9, 17, 25]
    parts.close(), parts.close(), graph.close(), buffer.close(), arena.close()


def test_strips_and_ports_stay_within_bounds(backend: Backend) -> None:
    arena = Arena(1)
    a = arena.tensor(F32, 5, 4)
    with pytest.raises(EngineError, match="no memory"):
        Port(a, np.zeros(20, np.float32))
    arena.allocate(backend.buffer_type, clear=True)
    a.write_strips(np.array([[1, 2], [3, 4], [5, 6]], np.float32), 4, 20)
    assert a.read(np.empty((4, 5), np.float32))[:, 1:3].tolist() == [[1, 2], [3, 4], [5, 6], [0, 0]]
    assert a.read_strips(np.empty((2, 1), np.float32), 28, 20).tolist() == [[4], [6]]
    for array, offset, stride in (
        (np.zeros((4, 2)), 40, 20),
        (np.zeros((5, 1)), 0, 20),
        (np.zeros((2, 2)), -4, 20),
    ):
        with pytest.raises(EngineError, match="lie outside"):
            a.write_strips(array.astype(np.float32), offset, stride)
    for array, stride in ((np.zeros((2, 3)), 8), (np.zeros(3), 20), (np.zeros((0, 3)), 20)):
        with pytest.raises(EngineError, match="strips are the rows of a matrix"):
            a.read_strips(array.astype(np.float32), 0, stride)
    port = Port(a, np.zeros((2, 5), np.float32))
    port.send(np.arange(10).reshape(2, 5))
    assert a.read(np.empty(12, np.float32)).tolist() == [*range(10), 0, 5]
    a.write(np.full(1, 7, np.float32))
    assert port.fetch()[0].tolist() == [7, 1, 2, 3, 4]
    with pytest.raises(EngineError, match="lie outside"):
        Port(a, np.zeros(21, np.float32))
    arena.close()


def test_tensors_are_written_and_read_within_bounds_only(backend: Backend) -> None:
    arena = Arena(2)
    a, unused = arena.tensor(F32, 4, 2), arena.tensor(F32, 1)
    with pytest.raises(EngineError, match="no memory"):
        a.write(np.zeros(8, np.float32))
    arena.allocate(backend.buffer_type, clear=True)
    a.write(np.arange(3, dtype=np.float32), 20)
    assert a.read(np.empty(8, np.float32)).tolist() == [0, 0, 0, 0, 0, 0, 1, 2]
    for array, offset in [
        (np.zeros(9, np.float32), 0),
        (np.zeros(1, np.float32), 32),
        (np.zeros(1, np.float32), -4),
    ]:
        with pytest.raises(EngineError, match="lie outside"):
            a.write(array, offset)
    with pytest.raises(EngineError, match="C-contiguous"):
        a.read(np.empty((4, 4), np.float32)[:, ::2])
    with pytest.raises(EngineError, match="declared smaller"):
        arena.tensor(F32, 1)
    assert unused.n_bytes == 4
    arena.close()


def test_types_say_their_names_and_row_sizes() -> None:
    assert (type_name(Q4_0), type_name(4711)) == ("q4_0", "type 4711")
    assert row_bytes(Q8_0, 64) == 68
    with pytest.raises(EngineError, match="does not divide"):
        row_bytes(Q8_0, 33)


def test_a_graph_too_long_for_its_builder_is_an_error() -> None:
    arena, builder = Arena(1), GraphBuilder(4)
    tensor = arena.tensor(F32, 4)
    with pytest.raises(EngineError):
        for _ in range(100):
            tensor = builder.run(builder.add(tensor, tensor))
    builder.drop(), arena.close()


Operand = tuple[int, tuple[int, ...]]
ROPE = {"n_rot": 4, "n_ctx_train": 64, "freq_base": 1e4}
VECTOR, ROWS = (F32, (8,)), (F32, (8, 4))
OPERATIONS: dict[str, tuple[Callable[..., Tensor], list[Operand]]] = {
    "add": (lambda g, a, b: g.add(a, b), [ROWS, VECTOR]),
    "mul": (lambda g, a, b: g.mul(a, b), [ROWS, ROWS]),
    "norm": (lambda g, a, b: g.norm(a, b, 1e-5), [ROWS, VECTOR]),
    "scale": (lambda g, a: g.scale(a, 2.0), [ROWS]),
    "silu": (lambda g, a: g.silu(a), [ROWS]),
    "sigmoid": (lambda g, a: g.sigmoid(a), [ROWS]),
    "softplus": (lambda g, a: g.softplus(a), [ROWS]),
    "swiglu": (lambda g, a, b: g.swiglu(a, b), [ROWS, ROWS]),
    "matmul": (lambda g, a, b: g.matmul(a, b), [(Q8_0, (32, 3)), (F32, (32, 2))]),
    "get_rows": (lambda g, a, b: g.get_rows(a, b), [(Q8_0, (32, 8)), (I32, (3,))]),
    "get_rows of each": (lambda g, a, b: g.get_rows(a, b), [(F32, (1, 8, 4)), (I32, (1, 4))]),
    "outer_product": (lambda g, a, b: g.outer_product(a, b), [(F32, (8, 4, 2)), (F32, (3, 4, 2))]),
    "outer_product of a permuted": (
        lambda g, a, b: g.outer_product(a, g.permute(b, 1, 0, 2, 3)),
        [(F32, (8, 4, 2)), (F32, (4, 3, 2))],
    ),
    "soft_max": (lambda g, a: g.soft_max(a, None, 0.5), [(F32, (8, 3, 2))]),
    "soft_max masked": (lambda g, a, m: g.soft_max(a, m, 0.5), [(F32, (8, 3, 2)), (F16, (8, 3))]),
    "argmax": (lambda g, a: g.argmax(a), [ROWS]),
    "set_rows": (lambda g, a, b, c: g.set_rows(a, b, c), [(F16, (4, 8)), (F32, (4, 2)), (I64, (2,))]),
    "concat": (lambda g, a, b: g.concat(a, b, 1), [ROWS, ROWS]),
    "concat of a transposed": (
        lambda g, a, b: g.concat(a, g.transpose(b), 0),
        [(F32, (3, 8)), (F32, (8, 4))],
    ),
    "copy": (lambda g, a, b: g.copy(a, b), [ROWS, (F16, (8, 4))]),
    "reshape": (lambda g, a: g.reshape(a, 4, 8), [ROWS]),
    "permute": (lambda g, a: g.permute(a, 0, 2, 1, 3), [ROWS]),
    "cont_2d": (lambda g, a: g.cont_2d(g.transpose(a), 4, 8), [ROWS]),
    "view": (lambda g, a: g.view(a, (4, 2), (16,), 4), [ROWS]),
    "rope": (lambda g, a, b: g.rope(a, b, mode=ROPE_NORMAL, **ROPE), [(F32, (4, 2, 3)), (I32, (3,))]),
    "rope sections": (
        lambda g, a, b: g.rope(a, b, mode=ROPE_INTERLEAVED_SECTIONS, sections=(1, 1, 0, 0), **ROPE),
        [(F32, (4, 2, 3)), (I32, (12,))],
    ),
    "flash_attention": (
        lambda g, q, k, v, m: g.flash_attention(q, k, v, m, 1.0),
        [(F32, (32, 2, 4)), (F16, (32, 8, 2)), (F16, (32, 8, 2)), (F16, (8, 2))],
    ),
    "ssm_conv": (lambda g, a, b: g.ssm_conv(a, b), [(F32, (5, 4)), (F32, (4, 4))]),
    "gated_delta_net": (
        lambda g, *t: g.gated_delta_net(*t),
        [(F32, (8, 1, 3)), (F32, (8, 1, 3)), (F32, (8, 2, 3)), *[(F32, (1, 2, 3))] * 2, (F32, (8, 8, 2))],
    ),
}


@st.composite
def operands(draw: st.DrawFn, fitting: list[Operand]) -> list[Operand]:
    """Operands that fit, with up to three sizes or types changed."""
    changed = [[kind, [*shape, 1, 1, 1][:4]] for kind, shape in fitting]
    for _ in range(draw(st.integers(0, 3))):
        operand = changed[draw(st.integers(0, len(changed) - 1))]
        if draw(st.booleans()):
            operand[1][draw(st.integers(0, 3))] = draw(st.sampled_from([1, 2, 3, 4, 8, 32]))
        else:
            operand[0] = draw(st.sampled_from([F32, F16, I32, I64, Q8_0]))
    return [(kind, tuple(shape)) for kind, shape in changed]


@settings(max_examples=400)
@given(name=st.sampled_from(sorted(OPERATIONS)), data=st.data())
def test_no_operands_end_the_process(backend: Backend, name: str, data: st.DataObject) -> None:
    """What the builder accepts must also run."""
    operation, fitting = OPERATIONS[name]
    arena, builder, buffer = Arena(len(fitting)), GraphBuilder(16), ComputeBuffer(backend)
    try:
        tensors = [arena.tensor(kind, *shape) for kind, shape in data.draw(operands(fitting))]
        arena.allocate(backend.buffer_type, clear=True)
        builder.output(operation(builder, *tensors))
        graph = builder.finish()
        buffer.place(graph)
        if not graph.unsupported(backend):
            backend.compute(graph.ptr)
        graph.close()
    except EngineError:
        pass
    finally:
        builder.drop(), buffer.close(), arena.close()


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_fitting_operands_are_taken(name: str) -> None:
    operation, fitting = OPERATIONS[name]
    arena, builder = Arena(len(fitting)), GraphBuilder(16)
    builder.output(operation(builder, *(arena.tensor(kind, *shape) for kind, shape in fitting)))
    assert builder.finish().n_nodes >= 1
    arena.close()


@pytest.mark.parametrize(
    "name",
    [
        "matmul",
        "outer_product",
        "soft_max masked",
        "set_rows",
        "rope",
        "flash_attention",
        "ssm_conv",
        "gated_delta_net",
    ],
)
def test_each_operand_alone_can_misfit(name: str) -> None:
    operation, fitting = OPERATIONS[name]
    arena, builder = Arena(len(fitting) + 1), GraphBuilder(16)
    good = [arena.tensor(kind, *shape) for kind, shape in fitting]
    bad = arena.tensor(F32, 5, 7, 11, 2)
    for i in range(len(good)):
        with pytest.raises(EngineError, match="operands do not fit"):
            operation(builder, *good[:i], bad, *good[i + 1 :])
    builder.drop(), arena.close()
