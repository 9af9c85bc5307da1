"""Aim: what the Core ML runtime does around Core ML is right: compile once, clone, patch, load, judge, clean up.

Method: coremltools' native part is absent on Linux, so a stand-in takes its place: it "compiles" a package by copying
it and runs compiled models with the interpreter. Everything else is the product's code. Core ML itself, and whether a
real compiled model keeps its weight file, can only be tried on a Mac (`outrigger device-check`).
"""

import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from common.errors import PageLoadError
from device.coreml import toolchain
from device.coreml.accuracy import BOUNDS, attend_float64, constants_of, make_inputs, row_errors
from device.coreml.frozen import coreml_runtime
from device.coreml.frozen.coreml_runtime import CoreMLRuntime, cause_of, same_layout
from device.coreml.geometry import PageGeometry
from device.coreml.reference import Program
from device.coreml.template import build_template

GEOMETRY = PageGeometry(2, 32, 32, 6, 256)
HELD = "held.mlpackage"
"""Inside a stand-in's compiled model: the program it runs, without weights."""


class CompiledModel:
    """Runs the held program over the compiled model's own weights."""

    error: str | None = None

    def __init__(self, path, compute_units):
        if CompiledModel.error:
            raise RuntimeError(CompiledModel.error)
        assert path.endswith(".mlmodelc") and compute_units == "NE"
        package = Path(path) / HELD
        target = package / "Data/com.apple.CoreML/weights/weight.bin"
        target.unlink(missing_ok=True)
        target.parent.mkdir(exist_ok=True)
        os.link(Path(path) / "weights/weight.bin", target)
        self.program = Program.load(package)

    def predict(self, features):
        return self.program.predict(features)


class Compiler:
    def __init__(self):
        self.compiled, self.error = [], None

    def compile_model(self, package, path):
        if self.error:
            raise RuntimeError(self.error)
        self.compiled.append(Path(package).name)
        shutil.copytree(package, Path(path) / HELD)
        weights = Path(path) / HELD / "Data/com.apple.CoreML/weights"
        shutil.move(weights, Path(path) / "weights")
        return path


@pytest.fixture
def compiler(monkeypatch):
    """The stand-in in the place of coremltools; placements are what `.places` says."""
    compiler = Compiler()
    models = SimpleNamespace(CompiledMLModel=CompiledModel, utils=compiler)
    units = SimpleNamespace(CPU_AND_NE="NE", CPU_AND_GPU="GPU", CPU_ONLY="CPU", ALL="ALL")
    monkeypatch.setattr(toolchain, "runtime_available", lambda: True)
    monkeypatch.setattr(toolchain, "coremltools", lambda: SimpleNamespace(models=models, ComputeUnit=units))

    class Engine: ...

    class Gpu: ...

    compiler.places = [Engine(), Engine(), Gpu()]
    devices = SimpleNamespace(MLNeuralEngineComputeDevice=Engine, MLGPUComputeDevice=Gpu)
    operations = [SimpleNamespace(operator_name="ios18.conv", n=n) for n in range(3)]
    operations.append(SimpleNamespace(operator_name="ios18.exp", n=0))
    block = SimpleNamespace(block=SimpleNamespace(operations=operations))
    structure = SimpleNamespace(program=SimpleNamespace(functions={"main": block}))
    plan = SimpleNamespace(
        model_structure=structure,
        get_compute_device_usage_for_mlprogram_operation=lambda op: SimpleNamespace(
            preferred_compute_device=compiler.places[op.n]
        ),
    )
    plans = SimpleNamespace(MLComputePlan=SimpleNamespace(load_from_path=lambda path, compute_units: plan))
    monkeypatch.setattr(toolchain, "compute_plan", lambda: (plans, devices))
    compiler.engine, compiler.gpu = Engine, Gpu
    return compiler


@pytest.fixture
def runtime(compiler, tmp_path):
    return CoreMLRuntime(tmp_path / "compiled")


def written(runtime, template, tmp_path, case="realistic", name="page", slot=None):
    inputs = make_inputs(case, GEOMETRY)
    path = tmp_path / f"{name}.mlmodelc"
    runtime.write(template, constants_of(GEOMETRY, inputs), path, slot)
    return path, inputs


def check(page, inputs):
    for centre in (None, attend_float64(inputs)[1].astype(np.float32)):
        found = page.ask(inputs.queries, centre)
        assert max(row_errors(found, attend_float64(inputs))) < BOUNDS["fp32"][0]


def test_pages_are_patched_clones_of_one_compiled_template(runtime, compiler, template, tmp_path):
    for case in ("realistic", "peaky"):
        path, inputs = written(runtime, template, tmp_path, case, case.replace(" ", "-"))
        page = runtime.load(template, path)
        check(page, inputs)
        assert page.placement == "neural engine" == runtime.placement
    assert compiler.compiled == [template.path.name]
    assert same_layout(runtime.compiled_template(template) / "weights/weight.bin", template)


def test_a_page_that_was_given_up_is_overwritten(runtime, template, tmp_path):
    old, _ = written(runtime, template, tmp_path, name="old")
    inode = (old / "weights/weight.bin").stat().st_ino
    new, inputs = written(runtime, template, tmp_path, "smooth", "new", slot=old)
    assert not old.exists() and (new / "weights/weight.bin").stat().st_ino == inode
    check(runtime.load(template, new), inputs)


def test_where_weights_are_laid_out_otherwise_each_page_is_compiled(
    runtime, compiler, template, tmp_path, monkeypatch
):
    monkeypatch.setattr(coreml_runtime, "same_layout", lambda *_: False)
    path, inputs = written(runtime, template, tmp_path)
    check(runtime.load(template, path), inputs)
    assert compiler.compiled == [template.path.name, "page.mlpackage"]
    assert not (tmp_path / "page.mlpackage").exists()


def test_placement_is_where_most_convolutions_run(runtime, compiler, template, tmp_path):
    path, _ = written(runtime, template, tmp_path)
    for places, expected in (
        ([compiler.gpu(), compiler.gpu(), compiler.engine()], "gpu"),
        ([object(), object(), compiler.engine()], "cpu"),
    ):
        compiler.places = places
        assert runtime.load(template, path).placement == expected


def test_errors_carry_their_cause(runtime, compiler, template, tmp_path, monkeypatch):
    path, _ = written(runtime, template, tmp_path)
    monkeypatch.setattr(CompiledModel, "error", "Error: ANECCompile() FAILED (11)")
    with pytest.raises(PageLoadError, match="ANECCompile") as caught:
        runtime.load(template, path)
    assert caught.value.cause == "compile"
    compiler.error = "No space left on device"
    with pytest.raises(PageLoadError) as caught:
        CoreMLRuntime(tmp_path / "other").compiled_template(template)
    assert caught.value.cause == "disk"


def test_only_what_a_failed_load_left_is_cleaned(runtime, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    cache = tmp_path / "Library/Caches" / Path(sys.executable).name / "com.apple.e5rt.e5bundlecache"
    old, new = cache / "old", cache / "new"
    old.mkdir(parents=True)
    new.mkdir()
    os.utime(old, (1000, 1000))
    os.utime(new, (2000, 2000))
    runtime.clean(tmp_path / "page", since_unix_s=1500)
    assert old.exists() and not new.exists()


def test_unknown_units_are_refused(compiler, tmp_path):
    with pytest.raises(PageLoadError, match="use one of CPU_AND_NE"):
        CoreMLRuntime(tmp_path, "GPU")


@pytest.mark.skipif(sys.platform == "darwin", reason="there is Core ML here")
def test_without_core_ml_it_says_so(tmp_path):
    with pytest.raises(PageLoadError, match="runs on macOS"):
        CoreMLRuntime(tmp_path)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("Error: ANECCompile() FAILED (11)", "compile"),
        ("Failed to build the model execution plan: MIL->EIR translation error", "compile"),
        ("The volume is full: No space left on device", "disk"),
        ("Unable to allocate memory for E5 program", "memory"),
        (".functionName must be nil unless the model type is ML Program.", "other"),
    ],
)
def test_causes_from_core_ml_texts(text, cause):
    assert cause_of(text) == cause


def test_weights_of_a_compiled_model_are_recognised(template, tmp_path):
    assert same_layout(template.path / template.weight_file, template)
    other = build_template(PageGeometry(2, 32, 16, 6, 256), tmp_path)
    assert not same_layout(other.path / other.weight_file, template)
    assert not same_layout(tmp_path / "absent.bin", template)
