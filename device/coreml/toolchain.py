"""The one door to coremltools: protobuf classes for reading packages, the builder for making templates.

coremltools says on every platform but macOS, once per missing native class, that it cannot run models; we never ask it
to, so that is kept quiet while it is imported. Imports are made on first use: reading a weight file must not cost them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import logging
import shutil
import sys
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import PackageError

MISSING = 'coremltools is not installed; install it with: pip install "outrigger[coreml]"'


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep coremltools' import notes and progress bars off the terminal; errors still raise."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


@functools.cache
def model_proto() -> Any:
    """The protobuf module of Model (a whole model.mlmodel)."""
    return _load("coremltools.proto.Model_pb2")


@functools.cache
def mil_proto() -> Any:
    """The protobuf module of MIL programs: functions, blocks, operations, values."""
    return _load("coremltools.proto.MIL_pb2")


@functools.cache
def coremltools() -> Any:
    """The package itself: the builder, the converter, and on a Mac the runtime."""
    package = _load("coremltools")
    # Its progress bar writes to the terminal of whoever runs us and cannot be turned off: iterate plainly instead.
    _load("coremltools.converters.mil.mil.passes.pass_pipeline").tqdm = lambda passes, **_: passes
    return package


@functools.cache
def builder() -> Any:
    """`Builder` of MIL programs, usually called mb."""
    return _load("coremltools.converters.mil").Builder


@functools.cache
def mil_types() -> Any:
    """Element types of MIL programs (fp16, int32, ...)."""
    return _load("coremltools.converters.mil.mil").types


def make_multifunction(functions: Mapping[str, Any], default: str) -> Any:
    """A MIL program of several functions; constants of equal `weight_id` are shared."""
    program = _load("coremltools.converters.mil.mil").Program()
    for name, function in functions.items():
        program.add_function(name, function)
    program.default_function_name, program.export_as_multifunction = default, True
    return program


def make_function(inputs: Mapping[str, Any], body: Callable[[Mapping[str, Any]], Sequence[Any]]) -> Any:
    """A MIL function with inputs named at run time: `body` gets their values by name and returns the outputs.

    (`builder().function` reads the names off a Python signature, which a caller with computed names does not have.)
    """
    function = _load("coremltools.converters.mil.mil").Function(dict(inputs), coremltools().target.iOS18)
    with function:
        function.set_outputs(list(body(function.inputs)))
    return function


def new_symbol() -> Any:
    """A dimension that is left open until `save_program` is told the shapes of the input."""
    return _load("coremltools.converters.mil.mil").get_new_symbol()


def save_program(
    program: Any, path: Path, metadata: Mapping[str, str] | None = None, inputs: Sequence[Any] | None = None
) -> None:
    """Save a MIL program as a .mlpackage at `path` (replaced if it exists), exactly as it was built.

    No pass runs: the default pipeline merges equal constants, which breaks templates, and merges a second `read_state`
    into the first, which breaks states. The result depends on the program alone: protobuf maps are written in order and
    the manifest's identifiers are derived, so that equal programs give equal bytes in every process. `metadata` goes
    into the model's user-defined metadata, which Core ML and Xcode show; `inputs` names the shapes of inputs that have
    several (coremltools' TensorType with EnumeratedShapes).
    """
    ct = coremltools()
    shutil.rmtree(path, ignore_errors=True)
    with quiet():
        ct.convert(
            program,
            inputs=inputs,
            convert_to="mlprogram",
            minimum_deployment_target=ct.target.iOS18,
            compute_precision=ct.precision.FLOAT16,
            compute_units=ct.ComputeUnit.CPU_AND_NE,
            pass_pipeline=ct.PassPipeline.EMPTY,
            skip_model_load=True,
            package_dir=str(path),
        )
    _make_reproducible(path, metadata or {})


def _make_reproducible(path: Path, metadata: Mapping[str, str]) -> None:
    manifest_path = path / "Manifest.json"
    manifest = json.loads(manifest_path.read_text(encoding="utf-8"))
    names = {
        key: str(uuid.uuid5(uuid.NAMESPACE_URL, item["path"])).upper()
        for key, item in manifest["itemInfoEntries"].items()
    }
    text = json.dumps(manifest, indent=4, sort_keys=True)
    for key, name in names.items():
        text = text.replace(key, name)
    manifest_path.write_text(json.dumps(json.loads(text), indent=4, sort_keys=True) + "\n", encoding="utf-8")
    root = json.loads(text)
    model_path = path / "Data" / root["itemInfoEntries"][root["rootModelIdentifier"]]["path"]
    model = model_proto().Model()
    model.ParseFromString(model_path.read_bytes())
    model.description.metadata.userDefined.clear()
    model.description.metadata.userDefined.update(metadata)
    model_path.write_bytes(model.SerializeToString(deterministic=True))


def kmeans_of_coremltools(weights: np.ndarray, bits: int) -> np.ndarray | None:
    """What coremltools' own palettisation makes of fp16 weights (one table), for comparisons only.

    None where it would take scikit-learn (below 10,000 weights) and that is not installed.
    """
    quantization = _load("coremltools.models.neural_network.quantization_utils")
    try:
        with quiet():
            table, indices = quantization._get_kmeans_lookup_table_and_weight(bits, weights)
    except ModuleNotFoundError:
        return None
    dense: np.ndarray = table.astype(np.float16).ravel()[np.ravel(indices)].reshape(weights.shape)
    return dense


def compute_plan() -> tuple[Any, Any]:
    """Core ML's plan of where operations run, and the classes of devices it names; of use on macOS only."""
    return _load("coremltools.models.compute_plan"), _load("coremltools.models.compute_device")


def runtime_available() -> bool:
    """Whether Core ML itself can run models here: macOS with coremltools' native part."""
    if sys.platform != "darwin":
        return False
    try:
        _load("coremltools.libcoremlpython")
    except PackageError:
        return False
    return True


def _load(name: str) -> Any:
    with quiet():
        try:
            return importlib.import_module(name)
        except ImportError as error:
            raise PackageError(f"{MISSING} ({error})") from error
