"""Aim: each trap is found in a package that has it, with a remedy, and our own bundles are free of errors.

Method: small programs built by coremltools, one trap each; sparse files stand for large ones.
"""

import os

import numpy as np
import pytest

from common.errors import PackageError
from device.coreml import toolchain
from device.coreml.convert.lint import lint

F16 = np.float16


@pytest.fixture
def check(tmp_path, mil):
    """check(input specs by name, body) -> {(level, rule)} of the saved program."""

    def findings(specs, body):
        function = toolchain.make_function(specs, body)
        path = tmp_path / "trap.mlpackage"
        toolchain.save_program(toolchain.make_multifunction({"infer": function}, "infer"), path)
        found = lint(tmp_path)
        assert all(finding.remedy and finding.what for finding in found)
        return {(finding.level, finding.rule) for finding in found}

    return findings


def test_our_bundles_have_no_errors_and_no_warnings(make_bundle):
    for context in (64, 192):
        assert {finding.level for finding in lint(make_bundle(context))} <= {"note"}


def test_a_batch_written_without_update_mask(check, mil):
    mb, types, _ = mil
    specs = {
        "hidden_states": mb.TensorSpec((1, 8, 32), types.fp16),
        "cache": mb.StateTensorSpec((1, 1, 32, 32), types.fp16),
    }

    def body(given):
        whole = mb.read_state(input=given["cache"])
        update = mb.expand_dims(x=given["hidden_states"], axes=[0])
        value = mb.slice_update(x=whole, update=update, begin=[0, 0, 0, 0], end=[1, 1, 8, 32])
        return [mb.identity(x=mb.coreml_update_state(state=given["cache"], value=value), name="out")]

    found = check(specs, body)
    assert ("error", "update-mask") in found
    assert ("warning", "functions") in found


def test_states_that_are_no_multiple_of_32(check, mil):
    mb, types, _ = mil
    specs = {"cache": mb.StateTensorSpec((1, 1, 270, 64), types.fp16)}
    assert ("error", "state-multiple") in check(
        specs, lambda given: [mb.identity(x=mb.read_state(input=given["cache"]), name="out")]
    )


def test_dimensions_channels_precision_and_operations(check, mil):
    mb, types, _ = mil
    specs = {"x": mb.TensorSpec((1, 4, 1, 20_000), types.fp16), "ids": mb.TensorSpec((3,), types.int32)}

    def body(given):
        wide = mb.mul(x=given["x"], y=F16(2))
        many = mb.conv(
            x=mb.slice_by_size(x=wide, begin=[0] * 4, size=[1, 4, 1, 1]),
            weight=np.zeros((16_385, 4, 1, 1), F16),
        )
        exact = mb.cast(x=mb.exp(x=many), dtype="fp32")
        sums = mb.cumsum(x=exact, axis=1)
        line = mb.linear(x=np.ones((2, 4), F16), weight=np.ones((3, 4), F16))
        return [sums, line]

    found = check(specs, body)
    assert {("error", "dimension"), ("error", "channels"), ("error", "precision")} <= found
    assert {("warning", "off-engine"), ("warning", "linear")} <= found


def test_files_beyond_a_gigabyte(tmp_path, mil, build):
    mb, types, opset = mil

    @mb.program(input_specs=[mb.TensorSpec((1, 64), types.fp16)], opset_version=opset)
    def program(x):
        return mb.add(x=x, y=np.arange(64, dtype=F16)[None])

    path = build(program)
    weights = path / "Data/com.apple.CoreML/weights/weight.bin"
    os.truncate(weights, 1_100_000_000)  # sparse: no disk is used
    assert [finding.rule for finding in lint(path)] == ["file-size"]


def test_damage_and_nothing_are_told(tmp_path, make_bundle):
    with pytest.raises(PackageError, match=r"no \.mlpackage"):
        lint(tmp_path)
    (tmp_path / "x.mlpackage").mkdir()
    assert [finding.rule for finding in lint(tmp_path)] == ["unreadable"]
