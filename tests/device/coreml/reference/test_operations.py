"""Aim: every operation of the interpreter computes what its MIL definition says.

Method: one program built by coremltools holds all cases, each an output of its own; each output is compared with NumPy
in float64 on the same fp16 inputs, within the rounding of one fp16 operation (or of a short sum).
"""

import math

import numpy as np
import pytest

from device.coreml.reference import Program
from device.coreml.reference.ops import OPERATIONS
from device.coreml.reference.runner import WALKED

RNG = np.random.default_rng(6)
X = RNG.standard_normal((2, 6, 4, 4)).astype(np.float16)
Y = RNG.standard_normal((2, 6, 4, 4)).astype(np.float16)
POSITIVE = np.abs(X) + np.float16(0.1)
IDS = np.array([[3, 0], [1, 2]], np.int32)
INPUTS = {"x": X, "y": Y, "positive": POSITIVE, "ids": IDS}
W1 = RNG.standard_normal((8, 3, 1, 1)).astype(np.float16)
W3 = RNG.standard_normal((5, 6, 3, 3)).astype(np.float16)
BIAS = RNG.standard_normal(8).astype(np.float16)
WL = RNG.standard_normal((5, 4)).astype(np.float16)
F64 = {key: value.astype(np.float64) if value.dtype == np.float16 else value for key, value in INPUTS.items()}
x, y, positive, ids = F64.values()


def softmax(s, axis=-1):
    e = np.exp(s - s.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def gelu_exact(v):
    return v * (1 + np.vectorize(math.erf)(v / math.sqrt(2))) / 2


def layer_norm(v, eps=1e-5):
    centred = v - v.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)


def conv3(v, w, pad):
    v = np.pad(v, [(0, 0), (0, 0), (pad, pad), (pad, pad)])
    windows = np.lib.stride_tricks.sliding_window_view(v, (3, 3), axis=(2, 3))
    return np.einsum("nchwij,ocij->nohw", windows, w.astype(np.float64))


def conv1(v):
    w = W1[:, :, 0, 0].astype(np.float64).reshape(2, 4, 3)
    y = np.einsum("ngchw,goc->ngohw", v.reshape(2, 2, 3, 4, 4), w).reshape(2, 8, 4, 4)
    return y + BIAS.astype(np.float64).reshape(1, 8, 1, 1)


def attention(q, k, v):
    return softmax(q @ k.swapaxes(-1, -2) / 2) @ v


# name -> (how coremltools builds it from its builder and inputs, what it must equal in float64)
CASES = {
    "add": (lambda mb, i: mb.add(x=i.x, y=i.y), x + y),
    "sub": (lambda mb, i: mb.sub(x=i.x, y=i.y), x - y),
    "mul": (lambda mb, i: mb.mul(x=i.x, y=i.y), x * y),
    "real_div": (lambda mb, i: mb.real_div(x=i.x, y=i.positive), x / positive),
    "floor_div": (lambda mb, i: mb.floor_div(x=i.ids, y=2), ids // 2),
    "mod": (lambda mb, i: mb.mod(x=i.ids, y=2), ids % 2),
    "maximum": (lambda mb, i: mb.maximum(x=i.x, y=i.y), np.maximum(x, y)),
    "minimum": (lambda mb, i: mb.minimum(x=i.x, y=i.y), np.minimum(x, y)),
    "pow": (lambda mb, i: mb.pow(x=i.positive, y=np.float16(1.5)), positive**1.5),
    "exp": (lambda mb, i: mb.exp(x=i.x), np.exp(x)),
    "exp2": (lambda mb, i: mb.exp2(x=i.x), np.exp2(x)),
    "log": (lambda mb, i: mb.log(x=i.positive, epsilon=np.float16(0)), np.log(positive)),
    "sqrt": (lambda mb, i: mb.sqrt(x=i.positive), np.sqrt(positive)),
    "rsqrt": (lambda mb, i: mb.rsqrt(x=i.positive, epsilon=np.float16(0)), 1 / np.sqrt(positive)),
    "inverse": (lambda mb, i: mb.inverse(x=i.positive, epsilon=np.float16(0)), 1 / positive),
    "square": (lambda mb, i: mb.square(x=i.x), x * x),
    "abs": (lambda mb, i: mb.abs(x=i.x), np.abs(x)),
    "sign": (lambda mb, i: mb.sign(x=i.x), np.sign(x)),
    "floor": (lambda mb, i: mb.floor(x=i.x), np.floor(x)),
    "ceil": (lambda mb, i: mb.ceil(x=i.x), np.ceil(x)),
    "round": (lambda mb, i: mb.round(x=i.x), np.rint(x)),
    "sin": (lambda mb, i: mb.sin(x=i.x), np.sin(x)),
    "cos": (lambda mb, i: mb.cos(x=i.x), np.cos(x)),
    "tanh": (lambda mb, i: mb.tanh(x=i.x), np.tanh(x)),
    "sigmoid": (lambda mb, i: mb.sigmoid(x=i.x), 1 / (1 + np.exp(-x))),
    "silu": (lambda mb, i: mb.silu(x=i.x), x / (1 + np.exp(-x))),
    "softplus": (lambda mb, i: mb.softplus(x=i.x), np.log1p(np.exp(x))),
    "relu": (lambda mb, i: mb.relu(x=i.x), np.maximum(x, 0)),
    "gelu": (lambda mb, i: mb.gelu(x=i.x, mode="EXACT"), gelu_exact(x)),
    "gelu.tanh": (
        lambda mb, i: mb.gelu(x=i.x, mode="TANH_APPROXIMATION"),
        x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    ),
    "gelu.sigmoid": (
        lambda mb, i: mb.gelu(x=i.x, mode="SIGMOID_APPROXIMATION"),
        x / (1 + np.exp(-1.702 * x)),
    ),
    "clip": (lambda mb, i: mb.clip(x=i.x, alpha=np.float16(-0.5), beta=np.float16(1)), np.clip(x, -0.5, 1)),
    "identity": (lambda mb, i: mb.identity(x=i.x), x),
    "cast": (lambda mb, i: mb.cast(x=i.x, dtype="int32"), np.trunc(x)),
    "select": (lambda mb, i: mb.select(cond=mb.greater(x=i.x, y=i.y), a=i.x, b=i.y), np.maximum(x, y)),
    **{
        name: (
            lambda mb, i, name=name: mb.cast(x=getattr(mb, name)(x=i.ids, y=1), dtype="int32"),
            function(ids, 1),
        )
        for name, function in {
            "equal": np.equal, "not_equal": np.not_equal, "greater": np.greater, "less": np.less,
            "greater_equal": np.greater_equal, "less_equal": np.less_equal,
        }.items()
    },
    **{
        name: (
            lambda mb, i, name=name: mb.cast(
                x=getattr(mb, name)(x=mb.less(x=i.ids, y=2), y=mb.greater(x=i.ids, y=0)), dtype="int32"
            ),
            function(ids < 2, ids > 0),
        )
        for name, function in {
            "logical_and": np.logical_and, "logical_or": np.logical_or, "logical_xor": np.logical_xor,
        }.items()
    },
    "logical_not": (
        lambda mb, i: mb.cast(x=mb.logical_not(x=mb.less(x=i.ids, y=2)), dtype="int32"),
        ids >= 2,
    ),
    "reduce_max": (lambda mb, i: mb.reduce_max(x=i.x, axes=[1], keep_dims=True), x.max(1, keepdims=True)),
    "reduce_min": (lambda mb, i: mb.reduce_min(x=i.x, axes=[-1]), x.min(-1)),
    "reduce_sum": (lambda mb, i: mb.reduce_sum(x=i.x, axes=[1, 3]), x.sum((1, 3))),
    "reduce_mean": (lambda mb, i: mb.reduce_mean(x=i.x, axes=[-1], keep_dims=True), x.mean(-1, keepdims=True)),
    "reduce_sum_square": (lambda mb, i: mb.reduce_sum_square(x=i.x, axes=[2]), (x * x).sum(2)),
    "reduce_argmax": (lambda mb, i: mb.reduce_argmax(x=i.x, axis=1), x.argmax(1)),
    "topk": (lambda mb, i: mb.topk(x=i.x, k=2, axis=-1)[0], -np.sort(-x, -1)[..., :2]),
    "topk.positions": (lambda mb, i: mb.topk(x=i.x, k=2, axis=1)[1], np.argsort(-x, 1, "stable")[:, :2]),
    "cumsum": (lambda mb, i: mb.cumsum(x=i.x, axis=1), x.cumsum(1)),
    "cumsum.reverse": (
        lambda mb, i: mb.cumsum(x=i.x, axis=-1, reverse=True, exclusive=True),
        np.flip(np.flip(x, -1).cumsum(-1), -1) - x,
    ),
    "softmax": (lambda mb, i: mb.softmax(x=i.x, axis=1), softmax(x, 1)),
    "layer_norm": (lambda mb, i: mb.layer_norm(x=i.x, axes=[-1], epsilon=np.float16(1e-5)), layer_norm(x)),
    "l2_norm": (
        lambda mb, i: mb.l2_norm(x=i.x, epsilon=np.float16(1e-6)),
        x / np.sqrt((x * x).sum((1, 2, 3), keepdims=True)),
    ),
    "batch_norm": (
        lambda mb, i: mb.batch_norm(
            x=i.x, mean=np.ones(6, np.float16), variance=np.full(6, 4, np.float16), epsilon=np.float16(1e-5)
        ),
        (x - 1) / 2,
    ),
    "matmul": (lambda mb, i: mb.matmul(x=i.x, y=i.y, transpose_y=True), x @ y.swapaxes(-1, -2)),
    "linear": (
        lambda mb, i: mb.linear(x=i.x, weight=WL, bias=BIAS[:5]),
        x @ WL.T.astype(float) + BIAS[:5].astype(float),
    ),
    "conv": (lambda mb, i: mb.conv(x=i.x, weight=W1, bias=BIAS, groups=2), conv1(x)),
    "conv.3x3": (lambda mb, i: mb.conv(x=i.x, weight=W3, pad_type="same"), conv3(x, W3, 1)),
    "conv.strided": (
        lambda mb, i: mb.conv(x=i.x, weight=W3, strides=[2, 2], pad_type="custom", pad=[1, 1, 1, 1]),
        conv3(x, W3, 1)[:, :, ::2, ::2],
    ),
    "einsum": (
        lambda mb, i: mb.einsum(
            values=(i.x, mb.slice_by_size(x=i.y, begin=[0, 0, 0, 0], size=[2, 4, 4, 4])),
            equation="abcd,adce->abce",
        ),
        np.einsum("abcd,adce->abce", x, y[:, :4]),
    ),
    "scaled_dot_product_attention": (
        lambda mb, i: mb.scaled_dot_product_attention(query=i.x, key=i.y, value=i.positive),
        attention(x, y, positive),
    ),
    "reshape": (lambda mb, i: mb.reshape(x=i.x, shape=[0, 3, 8, -1]), x.reshape(2, 3, 8, 4)),
    "transpose": (lambda mb, i: mb.transpose(x=i.x, perm=[0, 3, 1, 2]), x.transpose(0, 3, 1, 2)),
    "expand_dims": (lambda mb, i: mb.expand_dims(x=i.ids, axes=[0, 3]), ids[None, :, :, None]),
    "squeeze": (lambda mb, i: mb.squeeze(x=mb.reduce_max(x=i.x, axes=[2], keep_dims=True), axes=[2]), x.max(2)),
    "concat": (lambda mb, i: mb.concat(values=[i.x, i.y], axis=1), np.concatenate([x, y], 1)),
    "concat.interleave": (
        lambda mb, i: mb.concat(values=[i.x, i.y], axis=1, interleave=True),
        np.stack([x, y], 2).reshape(2, 12, 4, 4),
    ),
    "stack": (lambda mb, i: mb.stack(values=[i.x, i.y], axis=0), np.stack([x, y])),
    "split": (lambda mb, i: mb.split(x=i.x, num_splits=3, axis=1)[2], x[:, 4:]),
    "split.sizes": (lambda mb, i: mb.split(x=i.x, split_sizes=[1, 5], axis=1)[1], x[:, 1:]),
    "tile": (lambda mb, i: mb.tile(x=i.x, reps=[1, 2, 1, 1]), np.tile(x, (1, 2, 1, 1))),
    "reverse": (lambda mb, i: mb.reverse(x=i.x, axes=[1]), x[:, ::-1]),
    "pad": (
        lambda mb, i: mb.pad(x=i.x, pad=[1, 0, 2, 1], mode="constant", constant_val=np.float16(7)),
        np.pad(x, [(0, 0), (0, 0), (1, 0), (2, 1)], constant_values=7),
    ),
    "shape": (lambda mb, i: mb.shape(x=i.x), np.array(x.shape)),
    "fill": (lambda mb, i: mb.fill(shape=mb.shape(x=i.ids), value=np.float16(3)), np.full((2, 2), 3)),
    "range_1d": (
        lambda mb, i: mb.range_1d(start=0, end=mb.reduce_max(x=i.ids, axes=[0, 1]), step=1),
        np.arange(3),
    ),
    "band_part": (lambda mb, i: mb.band_part(x=i.x, lower=-1, upper=0), np.tril(x)),
    "slice_by_index": (
        lambda mb, i: mb.slice_by_index(
            x=i.x,
            begin=[0, 1, 0, 3],
            end=[2, 6, 0, 0],
            stride=[1, 2, 1, 1],
            end_mask=[False, False, True, False],
            squeeze_mask=[False, False, False, True],
        ),
        x[0:2, 1:6:2, :, 3],
    ),
    "slice_by_size": (
        lambda mb, i: mb.slice_by_size(x=i.x, begin=[0, 2, 0, 1], size=[2, 3, -1, 2]),
        x[:, 2:5, :, 1:3],
    ),
    "slice_update": (
        lambda mb, i: mb.slice_update(
            x=i.x, update=np.ones((2, 1, 4, 4), np.float16), begin=[0, 3, 0, 0], end=[2, 4, 4, 4]
        ),
        np.concatenate([x[:, :3], np.ones((2, 1, 4, 4)), x[:, 4:]], 1),
    ),
    "gather": (lambda mb, i: mb.gather(x=i.x, indices=i.ids, axis=1), x[:, ids]),
    "gather.batched": (
        lambda mb, i: mb.gather(x=i.x, indices=i.ids, axis=1, batch_dims=1),
        np.stack([x[0, ids[0]], x[1, ids[1]]]),
    ),
    "gather_along_axis": (
        lambda mb, i: mb.gather_along_axis(x=i.x, indices=mb.reduce_argmax(x=i.x, axis=1, keep_dims=True), axis=1),
        x.max(1, keepdims=True),
    ),
    "gather_nd": (lambda mb, i: mb.gather_nd(x=i.x, indices=mb.minimum(x=i.ids, y=1)), x[[1, 1], [0, 1]]),
}  # fmt: skip


class Inputs:
    def __init__(self, variables):
        self.__dict__.update(variables)


@pytest.fixture(scope="module")
def outputs(mil, build):
    mb, types, opset = mil
    kinds = {np.dtype(np.float16): types.fp16, np.dtype(np.int32): types.int32}
    specs = [mb.TensorSpec(v.shape, kinds[v.dtype]) for v in INPUTS.values()]

    @mb.program(input_specs=specs, opset_version=opset)
    def program(x, y, positive, ids):
        variables = Inputs({"x": x, "y": y, "positive": positive, "ids": ids})
        built = [make(mb, variables) for make, _ in CASES.values()]
        return tuple(mb.identity(x=v, name=f"out_{n}") for n, v in enumerate(built))

    results = Program.load(build(program)).predict(INPUTS)
    return {name: results[f"out_{n}"] for n, name in enumerate(CASES)}


@pytest.mark.parametrize("name", CASES)
def test_operation_equals_float64(outputs, name):
    expected = CASES[name][1]
    assert outputs[name].shape == np.shape(expected)
    # One rounding to fp16 is 2^-11 relative; sums of a few dozen terms and two-step formulas need a little more.
    np.testing.assert_allclose(outputs[name].astype(np.float64), expected, rtol=3e-3, atol=2e-3)


def test_every_operation_has_a_case():
    covered = {name.split(".")[0] for name in CASES} | WALKED
    assert {name for name in OPERATIONS if not name.startswith("constexpr_")} <= covered
