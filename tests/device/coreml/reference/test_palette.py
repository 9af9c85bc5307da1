"""Aim: compressed constants mean the same here as in coremltools.

Method: each form is saved by coremltools, run by the interpreter, and compared bit for bit with the value coremltools
itself gives the operation (`materialize`, or its dense twin).
"""

import numpy as np
import pytest

from common.errors import PackageError
from device.coreml.reference.arithmetic import Arithmetic
from device.coreml.reference.ops.palette import constexpr_blockwise_shift_scale, constexpr_lut_to_dense

RNG = np.random.default_rng(8)


def run_constant(mil, load, make):
    """The value of a constant expression, brought out by adding it to zeros."""
    mb, types, opset = mil
    shape = {}

    @mb.program(input_specs=[mb.TensorSpec((1,), types.fp16)], opset_version=opset)
    def program(zero):
        constant = make(mb, types)
        shape["theirs"] = constant.op.materialized_val_inference()
        return mb.add(x=constant, y=zero, name="out")

    return load(program).predict({"zero": np.zeros(1, np.float16)})["out"], shape["theirs"]


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("groups", [(1, 1), (4, 1), (1, 2)])
def test_grouped_tables(mil, load, bits, groups):
    indices = RNG.integers(0, 1 << bits, (16, 32)).astype(np.uint8)
    lut = RNG.standard_normal((*groups, 1 << bits, 1)).astype(np.float16)

    def make(mb, types):
        small = indices.astype(types.nptype_from_builtin(types.string_to_builtin(f"uint{bits}")))
        return mb.constexpr_lut_to_dense(indices=small, lut=lut)

    found, theirs = run_constant(mil, load, make)
    np.testing.assert_array_equal(found, theirs)


@pytest.mark.parametrize("axis", [0, 1])
def test_tables_of_vectors(mil, load, axis):
    indices = RNG.integers(0, 16, (6, 8)).astype(np.uint8)
    lut = RNG.standard_normal((1, 2, 16, 3)).astype(np.float16)

    def make(mb, types):
        small = indices.astype(types.nptype_from_builtin(types.uint4))
        return mb.constexpr_lut_to_dense(indices=small, lut=lut, vector_axis=np.int32(axis))

    found, theirs = run_constant(mil, load, make)
    np.testing.assert_array_equal(found, theirs)


@pytest.mark.parametrize("with_offset", [False, True])
def test_blockwise_scales(mil, load, with_offset):
    data = RNG.integers(-8, 8, (8, 32)).astype(np.int8)
    scale = RNG.standard_normal((8, 4)).astype(np.float16)
    offset = RNG.integers(-8, 8, (8, 4)).astype(np.int8) if with_offset else None
    found, theirs = run_constant(
        mil, load, lambda mb, types: mb.constexpr_blockwise_shift_scale(data=data, scale=scale, offset=offset)
    )
    np.testing.assert_allclose(found, theirs, rtol=1e-3)


def test_packed_form_of_ios16():
    from device.coreml import blob_format

    values = RNG.integers(0, 64, 35)
    lut = RNG.standard_normal(64).astype(np.float16)
    dense = constexpr_lut_to_dense(Arithmetic(), blob_format.pack_bits(values, 6), lut, shape=[5, 7])
    np.testing.assert_array_equal(dense, lut[values].reshape(5, 7))


def test_groups_that_do_not_divide_are_refused():
    data, scale = np.zeros((8, 30), np.int8), np.ones((8, 4), np.float16)
    with pytest.raises(PackageError, match="do not divide"):
        constexpr_blockwise_shift_scale(Arithmetic(), data, scale)
    with pytest.raises(PackageError, match="outside a table of 4 entries"):
        constexpr_lut_to_dense(Arithmetic(), np.full((2, 2), 7, np.uint8), np.zeros((1, 1, 4, 1), np.float16))
