"""What a Core ML package contains, as plain values: functions, features, states, operations, constants, sizes.

Reads any ML Program, not only ours. Called by `pages inspect`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from device.coreml import blob
from device.coreml.reference.ops import OPERATIONS
from device.coreml.reference.package import Function, Package, TensorType
from device.coreml.reference.runner import WALKED


@dataclass(frozen=True)
class FunctionView:
    """One function of a package. `features` and `states` are name -> type; `unknown` cannot be run here."""

    name: str
    features: dict[str, str]
    states: dict[str, str]
    outputs: dict[str, str]
    operations: dict[str, int]
    unknown: tuple[str, ...]


@dataclass(frozen=True)
class ConstantView:
    """One constant that lies in the weight file."""

    function: str
    name: str
    type: str
    offset: int
    n_bytes: int


@dataclass(frozen=True)
class PackageView:
    """A whole package. `metadata` is the model's user-defined metadata."""

    path: Path
    specification: int
    metadata: dict[str, str]
    functions: tuple[FunctionView, ...]
    constants: tuple[ConstantView, ...]
    program_bytes: int
    weight_bytes: int


def inspect_package(path: Path) -> PackageView:
    """Raises PackageError or BlobError where the package is damaged."""
    package = Package(path)
    constants = [
        ConstantView(f.name, c.name, str(c.type), c.blob_offset, package.weights.entry(c.blob_offset).n_bytes)
        for f in package.functions.values()
        for c in f.constants()
        if c.blob_offset is not None
    ]
    has_weights = package.weight_path.exists()
    if has_weights:
        blob.verify(package.weight_path)
    return PackageView(
        path,
        package.spec.specificationVersion,
        dict(package.spec.description.metadata.userDefined),
        tuple(_function(f) for f in package.functions.values()),
        tuple(constants),
        package.model_path.stat().st_size,
        package.weight_path.stat().st_size if has_weights else 0,
    )


def _function(function: Function) -> FunctionView:
    operations = Counter(op.type for op in function.operations)
    declared = {o.name: o.type for op in function.operations for o in op.outputs}
    outputs = {
        name: str(TensorType.of(declared[name].tensorType, name))
        for name in function.outputs
        if name in declared
    }
    return FunctionView(
        function.name,
        {name: str(kind) for name, kind in function.inputs.items()},
        {name: str(kind) for name, kind in function.states.items()},
        outputs,
        dict(operations.most_common()),
        tuple(sorted(set(operations) - set(OPERATIONS) - WALKED)),
    )
