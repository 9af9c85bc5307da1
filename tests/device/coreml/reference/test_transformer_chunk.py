"""Aim: the interpreter runs transformer chunks as converters make them, and runs them right.

Method: a toy of a Gemma-3-like chunk is built by coremltools: two layers (one sliding, one global with scaled RoPE),
grouped-query attention, q/k norms, RMSNorm by the layer_norm trick, 1x1 convolutions, a KV cache as state, and two
functions over the same weights: `infer` (one token, written at a position) and `prefill` (four tokens, written through
an update mask). It is compared with a plain float64 forward written from the formulas, plain and palettised; argmax
alone would not see a stale cache, so hidden states are compared.
"""

import numpy as np
import pytest

from device.coreml.reference import Arithmetic, Package, Program

HIDDEN, N_HEAD, N_KV, DIM, FF, N_LAYER, CONTEXT, BATCH, WINDOW = 32, 4, 2, 8, 48, 2, 16, 4, 6
EPS = 1e-6
F16, F32 = np.float16, np.float32
ROPE = {0: (1e4, 1.0), 1: (1e6, 8.0)}  # layer -> base, linear factor
PALETTE_BITS = 4


def make_weights(seed=0):
    rng = np.random.default_rng(seed)

    def linear(n_out, n_in):
        return (rng.standard_normal((n_out, n_in)) / np.sqrt(n_in)).astype(F16)

    weights = {}
    for layer in range(N_LAYER):
        for name, n_out, n_in in (
            ("q", N_HEAD * DIM, HIDDEN), ("k", N_KV * DIM, HIDDEN), ("v", N_KV * DIM, HIDDEN),
            ("o", HIDDEN, N_HEAD * DIM), ("gate", FF, HIDDEN), ("up", FF, HIDDEN), ("down", HIDDEN, FF),
        ):  # fmt: skip
            weights[f"{layer}.{name}"] = linear(n_out, n_in)
        for name, n in (
            ("in", HIDDEN),
            ("post", HIDDEN),
            ("ff", HIDDEN),
            ("ffpost", HIDDEN),
            ("qn", DIM),
            ("kn", DIM),
        ):
            weights[f"{layer}.{name}"] = (1 + 0.1 * rng.standard_normal(n)).astype(F16)
    return weights


def palettise(weight):
    """(indices, table) of equally spaced levels: crude, and exactly known."""
    levels = np.linspace(weight.min(), weight.max(), 1 << PALETTE_BITS).astype(F16)
    indices = np.abs(weight[..., None].astype(F32) - levels.astype(F32)).argmin(-1).astype(np.uint8)
    return indices, levels


def rope_tables(layer):
    base, factor = ROPE[layer]
    angles = np.outer(np.arange(CONTEXT), base ** -(np.arange(0, DIM, 2) / DIM) / factor)
    angles = np.concatenate([angles, angles], -1)
    return np.cos(angles).astype(F16), np.sin(angles).astype(F16)


class Chunk:
    """Builds one function of the chunk; `mb`, `types`, `opset` are coremltools'."""

    def __init__(self, mil, weights, palettised):
        self.mb, self.types, self.opset = mil
        self.weights, self.palettised = weights, palettised

    def constant(self, name):
        value = self.weights[name][:, :, None, None]
        if not self.palettised:
            constant = self.mb.const(val=value, name=f"w{name}")
            constant.op.weight_id = name
            return constant
        indices, levels = palettise(value)
        small = indices.astype(self.types.nptype_from_builtin(self.types.uint4))
        return self.mb.constexpr_lut_to_dense(indices=small, lut=levels.reshape(1, 1, 1, 1, -1, 1))

    def rms(self, x, name):
        doubled = self.mb.concat(values=[x, self.mb.mul(x=x, y=F16(-1))], axis=-1)
        normed = self.mb.layer_norm(x=doubled, axes=[-1], epsilon=F16(EPS))
        half = self.mb.slice_by_index(x=normed, begin=[0] * len(x.shape), end=list(x.shape))
        return self.mb.mul(x=half, y=self.weights[name])

    def conv(self, x, name):
        """[1, T, C] through a 1x1 convolution to [1, T, C_out]."""
        columns = self.mb.expand_dims(x=self.mb.transpose(x=x, perm=[0, 2, 1]), axes=[2])
        y = self.mb.conv(x=columns, weight=self.constant(name))
        return self.mb.transpose(x=self.mb.squeeze(x=y, axes=[2]), perm=[0, 2, 1])

    def heads(self, x, n, n_tokens):
        return self.mb.transpose(x=self.mb.reshape(x=x, shape=[1, n_tokens, n, DIM]), perm=[0, 2, 1, 3])

    def rotate(self, x, cos, sin):
        half = DIM // 2
        first = self.mb.slice_by_size(x=x, begin=[0, 0, 0, 0], size=[-1, -1, -1, half])
        second = self.mb.slice_by_size(x=x, begin=[0, 0, 0, half], size=[-1, -1, -1, half])
        turned = self.mb.concat(values=[self.mb.mul(x=second, y=F16(-1)), first], axis=-1)
        return self.mb.add(x=self.mb.mul(x=x, y=cos), y=self.mb.mul(x=turned, y=sin))

    def write(self, cache, index, new, position, update_mask):
        """The cache with `new` [1, N_KV, T, DIM] written; cache [2 * N_LAYER, N_KV, CONTEXT, DIM]."""
        mb = self.mb
        if update_mask is None:
            begin = mb.concat(values=[[index, 0], position, [0]], axis=0)
            end = mb.concat(values=[[index + 1, N_KV], mb.add(x=position, y=1), [DIM]], axis=0)
            return mb.slice_update(x=cache, update=new, begin=begin, end=end)
        bounds = {"begin": [index, 0, 0, 0], "end": [index + 1, N_KV, CONTEXT, DIM]}
        old = mb.slice_by_index(x=cache, **bounds)
        placed = mb.matmul(x=mb.tile(x=update_mask, reps=[1, N_KV, 1, 1]), y=new)
        written = mb.minimum(x=mb.reduce_sum(x=update_mask, axes=[-1], keep_dims=True), y=F16(1))
        kept = mb.mul(x=old, y=mb.sub(x=F16(1), y=written))
        return mb.slice_update(x=cache, update=mb.add(x=kept, y=placed), **bounds)

    def repeated(self, cache, index):
        mb = self.mb
        part = mb.slice_by_index(x=cache, begin=[index, 0, 0, 0], end=[index + 1, N_KV, CONTEXT, DIM])
        part = mb.tile(x=mb.reshape(x=part, shape=[N_KV, 1, CONTEXT, DIM]), reps=[1, N_HEAD // N_KV, 1, 1])
        return mb.reshape(x=part, shape=[1, N_HEAD, CONTEXT, DIM])

    def layer(self, n, x, n_tokens, positions, masks, position, update_mask, state):
        mb = self.mb
        h = self.rms(x, f"{n}.in")
        q = self.rms(self.heads(self.conv(h, f"{n}.q"), N_HEAD, n_tokens), f"{n}.qn")
        k = self.rms(self.heads(self.conv(h, f"{n}.k"), N_KV, n_tokens), f"{n}.kn")
        v = self.heads(self.conv(h, f"{n}.v"), N_KV, n_tokens)
        cos, sin = (
            mb.reshape(x=mb.gather(x=table, indices=positions, axis=0), shape=[1, 1, n_tokens, DIM])
            for table in rope_tables(n)
        )
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        for index, new in ((n, k), (n + N_LAYER, v)):
            full = self.write(mb.read_state(input=state), index, new, position, update_mask)
            cache = mb.coreml_update_state(state=state, value=full)
        scores = mb.matmul(x=q, y=self.repeated(cache, n), transpose_y=True)
        scores = mb.add(x=mb.mul(x=scores, y=F16(DIM**-0.5)), y=masks[n])
        out = mb.matmul(x=mb.softmax(x=scores, axis=-1), y=self.repeated(cache, n + N_LAYER))
        out = mb.reshape(x=mb.transpose(x=out, perm=[0, 2, 1, 3]), shape=[1, n_tokens, N_HEAD * DIM])
        x = mb.add(x=x, y=self.rms(self.conv(out, f"{n}.o"), f"{n}.post"))
        h = self.rms(x, f"{n}.ff")
        gate = mb.gelu(x=self.conv(h, f"{n}.gate"), mode="TANH_APPROXIMATION")
        down = self.conv(mb.mul(x=gate, y=self.conv(h, f"{n}.up")), f"{n}.down")
        return mb.add(x=x, y=self.rms(down, f"{n}.ffpost"))

    def function(self, n_tokens, masked):
        mb, types = self.mb, self.types
        specs = [
            mb.TensorSpec((1, n_tokens, HIDDEN), types.fp16),
            mb.TensorSpec((n_tokens,), types.int32),
            mb.TensorSpec((1, 1, n_tokens, CONTEXT), types.fp16),
            mb.TensorSpec((1, 1, n_tokens, CONTEXT), types.fp16),
            mb.TensorSpec((1, 1, CONTEXT, n_tokens), types.fp16)
            if masked
            else mb.TensorSpec((1,), types.int32),
            mb.StateTensorSpec((2 * N_LAYER, N_KV, CONTEXT, DIM), types.fp16),
        ]

        @mb.function(input_specs=specs, opset_version=self.opset)
        def body(hidden, positions, sliding_mask, global_mask, where, kv_cache):
            position, update_mask = (None, where) if masked else (where, None)
            x = hidden
            for n in range(N_LAYER):
                masks = (sliding_mask, global_mask)
                x = self.layer(n, x, n_tokens, positions, masks, position, update_mask, kv_cache)
            return mb.identity(x=x, name="out")

        return body


@pytest.fixture(scope="module", params=[False, True], ids=["fp16", "palettised"])
def chunk(request, mil, build):
    """(program path, weights as the chunk holds them)."""
    from coremltools.converters.mil.mil import Program as MilProgram

    weights = make_weights()
    builder, program = Chunk(mil, weights, request.param), MilProgram()
    program.add_function("infer", builder.function(1, masked=False))
    program.add_function("prefill", builder.function(BATCH, masked=True))
    program.default_function_name, program.export_as_multifunction = "infer", True
    held = dict(weights)
    if request.param:
        for name, value in weights.items():
            if value.ndim == 2:
                indices, levels = palettise(value)
                held[name] = levels[indices]
    return build(program), held


def forward(weights, x):
    """Float64 hidden states [T, HIDDEN] after both layers, from the formulas."""
    w = {name: value.astype(np.float64) for name, value in weights.items()}

    def rms(v, gain):
        return v / np.sqrt((v * v).mean(-1, keepdims=True) + EPS) * gain

    n_tokens = len(x)
    ages = np.arange(n_tokens)[:, None] - np.arange(n_tokens)[None, :]
    for n in range(N_LAYER):
        h = rms(x, w[f"{n}.in"])
        q = rms((h @ w[f"{n}.q"].T).reshape(n_tokens, N_HEAD, DIM), w[f"{n}.qn"])
        k = rms((h @ w[f"{n}.k"].T).reshape(n_tokens, N_KV, DIM), w[f"{n}.kn"])
        v = (h @ w[f"{n}.v"].T).reshape(n_tokens, N_KV, DIM)
        cos, sin = (table[:n_tokens, None].astype(np.float64) for table in rope_tables(n))

        def rotated(z, cos=cos, sin=sin):
            return z * cos + np.concatenate([-z[..., DIM // 2 :], z[..., : DIM // 2]], -1) * sin

        q, k = rotated(q), np.repeat(rotated(k), N_HEAD // N_KV, 1)
        v = np.repeat(v, N_HEAD // N_KV, 1)
        seen = (ages >= 0) & ((ages < WINDOW) | (n == 1))
        scores = np.einsum("qhd,khd->hqk", q, k) * DIM**-0.5 + np.where(seen, 0, -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        out = np.einsum("hqk,khd->qhd", p / p.sum(-1, keepdims=True), v).reshape(n_tokens, -1)
        x = x + rms(out @ w[f"{n}.o"].T, w[f"{n}.post"])
        h = rms(x, w[f"{n}.ff"])
        g = h @ w[f"{n}.gate"].T
        g = g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))) / 2
        x = x + rms((g * (h @ w[f"{n}.up"].T)) @ w[f"{n}.down"].T, w[f"{n}.ffpost"])
    return x


def features(hidden, first, masked):
    """Inputs of one call for tokens [first, first + T)."""
    n = len(hidden)
    positions = np.arange(first, first + n, dtype=np.int32)
    age = positions[:, None] - np.arange(CONTEXT)[None, :]
    sliding, whole = (
        np.where((age >= 0) & (age < most), 0, -6e4).astype(F16)[None, None] for most in (WINDOW, CONTEXT)
    )
    if masked:
        where = (np.arange(CONTEXT)[:, None] == positions[None, :]).astype(F16)[None, None]
    else:
        where = np.array([first], np.int32)
    values = {"hidden": hidden[None].astype(F16), "positions": positions, "where": where}
    return values | {"sliding_mask": sliding, "global_mask": whole}


def run(program, x, plan):
    """Hidden states of all tokens: `plan` lists (function, tokens) in order, over one state."""
    state, first, out = program.make_state("infer"), 0, []
    for function, n in plan:
        inputs = features(x[first : first + n], first, function == "prefill")
        out.append(program.predict(inputs, function=function, state=state)["out"][0])
        first += n
    return np.concatenate(out).astype(np.float64)


STEPS = [("infer", 1)] * 13
MIXED = [("prefill", BATCH), ("prefill", BATCH), ("infer", 1), ("prefill", BATCH)]


def error(found, expected):
    return np.linalg.norm(found - expected, axis=-1).max() / np.linalg.norm(expected, axis=-1).mean()


@pytest.mark.parametrize("accumulator", ["fp32", "block64"])
def test_hidden_states_equal_float64(chunk, accumulator):
    path, weights = chunk
    x = np.random.default_rng(5).standard_normal((13, HIDDEN)).astype(F16)
    expected = forward(weights, x.astype(np.float64))
    program = Program.load(path, Arithmetic(accumulator))
    assert error(run(program, x, STEPS), expected) < 8e-3
    assert error(run(program, x, MIXED), expected) < 8e-3


def test_both_functions_agree_and_a_wrong_state_is_seen(chunk):
    path, weights = chunk
    x = np.random.default_rng(6).standard_normal((13, HIDDEN)).astype(F16)
    program = Program.load(path)
    assert error(run(program, x, MIXED), run(program, x, STEPS)) < 8e-3
    stale = Program.load(path)
    expected = forward(weights, x.astype(np.float64))
    state = stale.make_state("infer")
    for at in range(13):
        inputs = features(x[at : at + 1], at, masked=False)
        if at == 6:
            state["kv_cache"][0] = 0  # the keys of the first layer are lost
        out = stale.predict(inputs, function="infer", state=state)["out"][0]
    assert error(out.astype(np.float64), expected[12:]) > 0.05


def test_palettes_are_stored_as_palettes(chunk):
    path, weights = chunk
    package = Package(path)
    n_weights = sum(v.size for v in weights.values() if v.ndim == 2)
    palettised = any(op.type == "constexpr_lut_to_dense" for op in package.function("infer").operations)
    weight_bytes = package.weight_path.stat().st_size
    assert weight_bytes < n_weights * 2 if palettised else weight_bytes > n_weights * 2
