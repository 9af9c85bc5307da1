"""Aim: a page package is checked on its own, and every way of being wrong is told.

Method: good pages pass; each damage (swapped constants, another program, a broken mask, a truncated file, a template)
is made by patching the weight file or the program of a good page and must be refused or put out of bounds.
"""

import shutil

import numpy as np
import pytest

from common.errors import BlobError, PackageError
from device.coreml import blob, toolchain
from device.coreml.accuracy import ARITHMETICS, constants_of, make_inputs
from device.coreml.geometry import PageGeometry
from device.coreml.page_check import check_page, read_constants
from device.coreml.page_writer import write_page
from device.coreml.reference import Arithmetic
from device.coreml.template import build_template, open_template

GEOMETRY = PageGeometry(2, 31, 32, 4, 512, 256)  # K with its column of ones has the size of V
FP32 = [Arithmetic()]


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    return build_template(GEOMETRY, tmp_path_factory.mktemp("template"))


@pytest.fixture
def page(template, tmp_path):
    path = tmp_path / "page.mlpackage"
    write_page(template, constants_of(GEOMETRY, make_inputs("realistic", GEOMETRY, 300)), path)
    return path


def change(page, template, name, edit):
    """Rewrite one constant in place."""
    names = [n for n, _ in GEOMETRY.constants()]
    offset = template.offsets[names.index(name)]
    with blob.WeightFile(page / template.weight_file) as weights:
        values = weights.array(offset).copy()
    edit(values)
    blob.patch(page / template.weight_file, {offset: blob.Blob.of(values)})


def test_a_good_page_passes_under_every_arithmetic(page):
    check = check_page(page, ARITHMETICS)
    assert check.passed and check.n_keys == 300 and check.geometry == GEOMETRY
    assert len(check.findings) == len(ARITHMETICS)
    assert all(0 < finding.o_error < 0.1 for finding in check.findings)


def test_constants_are_read_as_they_were_filled(page):
    found = read_constants(open_template(page))
    filled = constants_of(GEOMETRY, make_inputs("realistic", GEOMETRY, 300))
    for a, b in zip(found.by_name().values(), filled.by_name().values(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("name", "edit", "complaint"),
    [
        ("k_0_0", lambda v: v.__setitem__(31, 0.5), "the last column of K is not 1"),
        ("bias_0", lambda v: v.__setitem__(7, -60_000), "the bias is not 0 for the first keys"),
        ("bias_1", lambda v: v.__setitem__(slice(None), -1), "the bias is not 0 for the first keys"),
        ("v_1_1", lambda v: v.__setitem__(-1, 1.0), "masked keys are not zero from key 300"),
        ("v_0_0", lambda v: v.__setitem__(5, np.inf), "K is not finite, or"),
    ],
)
def test_wrong_constants_are_refused(page, template, name, edit, complaint):
    change(page, template, name, edit)
    with pytest.raises(PackageError, match=complaint):
        check_page(page, FP32)


def test_swapped_k_and_v_are_refused(page, template):
    names = [n for n, _ in GEOMETRY.constants()]
    offsets = [template.offsets[names.index(name)] for name in ("k_0_0", "v_0_0")]
    with blob.WeightFile(page / template.weight_file) as weights:
        k, v = (weights.array(offset).copy() for offset in offsets)
    blob.patch(page / template.weight_file, {offsets[0]: blob.Blob.of(v), offsets[1]: blob.Blob.of(k)})
    with pytest.raises(PackageError, match="these are not the keys of a page"):
        check_page(page, FP32)


def test_a_program_that_reads_the_wrong_constant_is_out_of_bounds(page):
    """The second chunk of a head takes the V of the first, in the program, not in the file."""
    model = toolchain.model_proto().Model()
    path = page / "Data/com.apple.CoreML/model.mlmodel"
    model.ParseFromString(path.read_bytes())
    block = model.mlProgram.functions["main"].block_specializations["CoreML8"]
    inputs = {op.outputs[0].name: op for op in block.operations}
    inputs["o_0_1"].inputs["weight"].arguments[0].name = "v_0_0"
    path.write_bytes(model.SerializeToString())
    check = check_page(page, FP32)
    assert not check.passed and check.findings[0].o_error > 0.5
    inputs["o_0_1"].inputs["weight"].arguments[0].name = "v_1_1"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(PackageError, match="conv uses 'v_1_1' before anything defines it"):
        check_page(page, FP32)


def test_a_truncated_page_is_refused(page, template):
    weights = page / template.weight_file
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(BlobError, match="truncated"):
        check_page(page, FP32)


def test_a_template_is_no_page(template, tmp_path):
    copied = shutil.copytree(template.path, tmp_path / "copy.mlpackage")
    with pytest.raises(PackageError, match="a template without keys"):
        check_page(copied, FP32)
