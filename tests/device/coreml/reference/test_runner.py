"""Aim: functions, states and complaints of the interpreter are those of the real runtime; damage is caught.

Method: small programs built by coremltools: a counter with a state, two functions over one weight, an attention page in
three operations; each wrong feature, each damaged file and each swapped constant must be seen.
"""

import shutil

import numpy as np
import pytest

from common.errors import BlobError, PackageError, PredictionError
from device.coreml import blob
from device.coreml.reference import Arithmetic, Package, Program

RNG = np.random.default_rng(1)
W = RNG.standard_normal((4, 4)).astype(np.float16)
K, V = (RNG.standard_normal((1, 32, 8)).astype(np.float16) for _ in range(2))


@pytest.fixture(scope="module")
def counter(mil, build):
    """Adds x to a state twice, reading it in between: y is the first sum, z the second."""
    mb, types, opset = mil
    specs = [mb.TensorSpec((4,), types.fp16), mb.StateTensorSpec((4,), types.fp16)]

    @mb.program(input_specs=specs, opset_version=opset)
    def program(x, total):
        first = mb.coreml_update_state(state=total, value=mb.add(x=mb.read_state(input=total), y=x))
        second = mb.coreml_update_state(state=total, value=mb.add(x=mb.read_state(input=total), y=x))
        return mb.identity(x=first, name="y"), mb.identity(x=second, name="z")

    return build(program)


@pytest.fixture(scope="module")
def two_functions(mil, build):
    """`infer` is W x for one column, `prefill` for three; they share one weight."""
    mb, types, opset = mil
    from coremltools.converters.mil.mil import Program as MilProgram

    program = MilProgram()
    for name, n in (("infer", 1), ("prefill", 3)):

        @mb.function(input_specs=[mb.TensorSpec((4, n), types.fp16)], opset_version=opset)
        def function(x):
            weight = mb.const(val=W, name="weight")
            weight.op.weight_id = "shared"
            return mb.matmul(x=weight, y=x, name="y")

        program.add_function(name, function)
    program.default_function_name = "infer"
    program.export_as_multifunction = True
    return build(program)


@pytest.fixture(scope="module")
def page(mil, build):
    mb, types, opset = mil

    @mb.program(input_specs=[mb.TensorSpec((1, 2, 8), types.fp16)], opset_version=opset)
    def program(q):
        scores = mb.softmax(x=mb.matmul(x=q, y=mb.const(val=K, name="k"), transpose_y=True), axis=-1)
        return mb.matmul(x=scores, y=mb.const(val=V, name="v"), name="o")

    return build(program)


@pytest.fixture
def page_copy(page, tmp_path):
    return shutil.copytree(page, tmp_path / "page.mlpackage")


def attend(q, k, v):
    s = q.astype(np.float64) @ k.astype(np.float64).swapaxes(-1, -2)
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True) @ v.astype(np.float64)


def test_state_is_read_again_after_each_update(counter):
    program = Program.load(counter)
    state = program.make_state()
    x = np.arange(4, dtype=np.float16)
    for call in (1, 2, 3):
        out = program.predict({"x": x}, state=state)
        np.testing.assert_array_equal(out["y"], x * (2 * call - 1))
        np.testing.assert_array_equal(out["z"], x * 2 * call)
        np.testing.assert_array_equal(state["total"], x * 2 * call)


def test_states_are_separate_conversations(counter):
    program = Program.load(counter)
    one, other = program.make_state(), program.make_state()
    program.predict({"x": np.ones(4, np.float16)}, state=one)
    assert not other["total"].any() and one["total"].all()


def test_state_complaints(counter):
    program = Program.load(counter)
    x = {"x": np.ones(4, np.float16)}
    with pytest.raises(PredictionError, match=r"has states \(total\)"):
        program.predict(x)
    with pytest.raises(PredictionError, match=r"state total is required but not specified\."):
        program.predict(x, state={})
    with pytest.raises(PredictionError, match=r"state total: float16 .* does not match"):
        program.predict(x, state={"total": np.zeros(5, np.float16)})


def test_functions_share_one_weight(two_functions):
    program = Program.load(two_functions)
    x = RNG.standard_normal((4, 3)).astype(np.float16)
    together = program.predict({"x": x}, function="prefill")["y"]
    apart = [program.predict({"x": x[:, [i]]}, function="infer")["y"] for i in range(3)]
    np.testing.assert_array_equal(together, np.concatenate(apart, axis=1))
    np.testing.assert_array_equal(program.predict({"x": x[:, :1]})["y"], apart[0])
    assert len(blob.read_entries(Package(two_functions).weight_path)) == 1


def test_unknown_function(two_functions):
    with pytest.raises(PredictionError, match="no function 'decode'; the model has: infer, prefill"):
        Program.load(two_functions).predict({"x": np.ones((4, 1), np.float16)}, function="decode")


@pytest.mark.parametrize(
    ("features", "complaint"),
    [
        ({}, r"Feature q is required but not specified\."),
        ({"q": np.ones((1, 2, 8)), "p": np.ones(1)}, "'p' is no input of function main; it takes: q"),
        (
            {"q": np.ones((1, 3, 8))},
            r"MultiArray shape \(1 x 3 x 8\) does not match the shape \(1 x 2 x 8\) specified in the model",
        ),
        ({"q": np.ones((1, 2, 8), np.int32)}, "elements are int32, the model description asks for float16"),
    ],
)
def test_feature_complaints(page, features, complaint):
    with pytest.raises(PredictionError, match=complaint):
        Program.load(page).predict(features)


def test_page_equals_float64_and_accumulators_differ(page):
    q = RNG.standard_normal((1, 2, 8)).astype(np.float16)
    outputs = [
        Program.load(page, Arithmetic(name)).predict({"q": q})["o"] for name in ("fp32", "block8", "in-order")
    ]
    for out in outputs:
        np.testing.assert_allclose(out, attend(q, K, V), atol=1e-2)
    assert len({out.tobytes() for out in outputs}) > 1


def test_a_wrong_constant_is_caught(page, page_copy):
    q = RNG.standard_normal((1, 2, 8)).astype(np.float16)
    weights = Package(page_copy).weight_path
    entry = blob.read_entries(weights)[1]
    wrong = V.copy()
    wrong[0, 7, 3] += 1
    blob.patch(weights, {entry.offset: blob.Blob.of(wrong)})
    right, changed = (Program.load(path).predict({"q": q})["o"] for path in (page, page_copy))
    assert np.abs(right[..., 3] - changed[..., 3]).max() > 1e-3
    np.testing.assert_array_equal(np.delete(right, 3, -1), np.delete(changed, 3, -1))


def test_swapped_k_and_v_are_caught(page_copy):
    q = RNG.standard_normal((1, 2, 8)).astype(np.float16)
    weights = Package(page_copy).weight_path
    first, second = blob.read_entries(weights)
    blob.patch(weights, {first.offset: blob.Blob.of(V), second.offset: blob.Blob.of(K)})
    found = Program.load(page_copy).predict({"q": q})["o"]
    assert np.abs(found - attend(q, K, V)).max() > 0.1


def test_damaged_files_are_named(page, tmp_path):
    def damaged(change, name):
        path = shutil.copytree(page, tmp_path / name)
        change(path)
        return path

    weights = "Data/com.apple.CoreML/weights/weight.bin"
    model = "Data/com.apple.CoreML/model.mlmodel"
    cut = damaged(lambda p: (p / weights).write_bytes((p / weights).read_bytes()[:-100]), "cut")
    with pytest.raises(BlobError, match=r"weight\.bin: truncated"):
        Program.load(cut).predict({"q": np.ones((1, 2, 8))})
    absent = damaged(lambda p: (p / weights).unlink(), "absent")
    with pytest.raises(BlobError, match=r"weight\.bin: cannot be read"):
        Program.load(absent).predict({"q": np.ones((1, 2, 8))})
    broken = damaged(lambda p: (p / model).write_bytes((p / model).read_bytes()[:-9]), "broken")
    with pytest.raises(PackageError, match=r"model\.mlmodel: damaged"):
        Package(broken)
    outside = damaged(
        lambda p: (p / "Manifest.json").write_text(
            (p / "Manifest.json").read_text().replace("com.apple.CoreML/model", "../../model")
        ),
        "outside",
    )
    with pytest.raises(PackageError, match="leads out of the package"):
        Package(outside)
    with pytest.raises(PackageError, match="Manifest"):
        Package(tmp_path)


def test_unknown_operations_are_named_at_load(mil, build):
    mb, types, opset = mil

    @mb.program(input_specs=[mb.TensorSpec((2, 2), types.fp16)], opset_version=opset)
    def program(x):
        return mb.erf(x=x, name="y")

    with pytest.raises(PackageError, match="function main uses operations not implemented here: erf"):
        Program.load(build(program))


def test_slices_out_of_range_are_refused(mil, load):
    mb, types, opset = mil

    @mb.program(
        input_specs=[mb.TensorSpec((4, 2), types.fp16), mb.TensorSpec((1,), types.int32)], opset_version=opset
    )
    def program(x, at):
        begin = mb.concat(values=[at, [0]], axis=0)
        end = mb.concat(values=[mb.add(x=at, y=1), [2]], axis=0)
        return mb.slice_update(x=x, update=np.ones((1, 2), np.float16), begin=begin, end=end, name="y")

    loaded = load(program)
    features = {"x": np.zeros((4, 2), np.float16), "at": np.array([3], np.int32)}
    assert loaded.predict(features)["y"][3].all()
    with pytest.raises(PredictionError, match=r"outside 0\.\.4"):
        loaded.predict(features | {"at": np.array([4], np.int32)})
