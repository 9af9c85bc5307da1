"""A saved .mlpackage as it lies on disk: manifest, program, functions, constants.

Only the protobuf classes and the weight file are needed; nothing is converted and nothing is built. Every count, shape
and file name is checked here, so that the runner may trust what it is given.
Called by the runner, by the template reader and by `pages inspect`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import PackageError
from device.coreml import blob, blob_format, toolchain

DATA_FOLDER = Path("Data/com.apple.CoreML")
MODEL_FILE = DATA_FOLDER / "model.mlmodel"
WEIGHT_FILE = DATA_FOLDER / "weights" / "weight.bin"
MODEL_BYTES_MAX = 1 << 30
MANIFEST_BYTES_MAX = 1 << 20
ELEMENTS_MAX = 1 << 34
RANK_MAX = 8
ANY = -1
"""A dimension that a program leaves open."""

DTYPES = {
    "FLOAT16": "<f2", "FLOAT32": "<f4", "FLOAT64": "<f8", "BOOL": "?", "INT8": "i1", "INT16": "<i2", "INT32": "<i4",
    "INT64": "<i8", "UINT8": "u1", "UINT16": "<u2", "UINT32": "<u4", "UINT64": "<u8",
}  # fmt: skip
PACKED_BITS = {"UINT1": 1, "UINT2": 2, "UINT3": 3, "UINT4": 4, "UINT6": 6, "INT4": 4}


@dataclass(frozen=True)
class TensorType:
    """Declared type of a tensor. `kind` is MIL's name (FLOAT16, UINT4, STRING...); open dimensions are -1."""

    kind: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, proto: Any, where: str) -> TensorType:
        """From a MIL TensorType message; `where` names the value in errors."""
        kind = toolchain.mil_proto().DataType.Name(proto.dataType)
        shape = tuple(
            d.constant.size if d.WhichOneof("dimension") == "constant" else ANY for d in proto.dimensions
        )
        n_elements = int(np.prod([max(n, 1) for n in shape], dtype=np.float64))
        if len(shape) > RANK_MAX or n_elements > ELEMENTS_MAX:
            raise PackageError(
                f"{where}: shape {shape} passes the bounds (rank {RANK_MAX}, {ELEMENTS_MAX} elements)"
            )
        return cls(kind, shape)

    @property
    def dtype(self) -> np.dtype:
        """NumPy type that holds the elements; packed integers are held in one byte each."""
        if self.kind in PACKED_BITS:
            return np.dtype("i1" if self.kind == "INT4" else "u1")
        if self.kind not in DTYPES:
            raise PackageError(f"element type {self.kind} is not supported; supported: {', '.join(DTYPES)}")
        return np.dtype(DTYPES[self.kind])

    @property
    def n_elements(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    def __str__(self) -> str:
        return f"{self.kind.lower()} [{' x '.join('?' if n == ANY else str(n) for n in self.shape)}]"


@dataclass(frozen=True)
class Constant:
    """A constant of a function. `blob_offset` is None where the value lies in the program itself."""

    name: str
    type: TensorType
    blob_offset: int | None
    proto: Any


@dataclass(frozen=True)
class Function:
    """One function: its inputs and states by name, its outputs, its operations in order (protobuf messages)."""

    name: str
    inputs: dict[str, TensorType]
    states: dict[str, TensorType]
    outputs: tuple[str, ...]
    operations: tuple[Any, ...]

    def constants(self) -> Iterator[Constant]:
        for op in self.operations:
            if op.type == "const":
                value, name = op.attributes["val"], op.outputs[0].name
                in_file = value.WhichOneof("value") == "blobFileValue"
                offset = value.blobFileValue.offset if in_file else None
                if value.type.WhichOneof("type") == "tensorType":
                    yield Constant(name, TensorType.of(value.type.tensorType, name), offset, value)


class Package:
    """An opened .mlpackage. Raises PackageError (or BlobError) naming the file and what is wrong with it."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.model_path = self.path / _model_item(self.path)
        self.spec = _parse(self.model_path)
        if self.spec.WhichOneof("Type") != "mlProgram":
            raise PackageError(f"{self.path}: a {self.spec.WhichOneof('Type')}, not an ML Program")
        program = self.spec.mlProgram.functions
        self.functions = {name: _function(name, program[name], self.path) for name in sorted(program)}
        default = self.spec.description.defaultFunctionName or "main"
        self.default_function = default if default in self.functions else next(iter(self.functions))

    @property
    def weight_path(self) -> Path:
        return self.model_path.parent / "weights" / "weight.bin"

    @cached_property
    def weights(self) -> blob.WeightFile:
        return blob.WeightFile(self.weight_path)

    def function(self, name: str | None) -> Function:
        """The function called `name`, or the default one. Raises PackageError with the names that exist."""
        if name is None:
            return self.functions[self.default_function]
        if name not in self.functions:
            raise PackageError(
                f"{self.path}: no function {name!r}; the model has: {', '.join(self.functions)}"
            )
        return self.functions[name]

    def value(self, proto: Any, name: str) -> Any:
        """A MIL Value message as an array, a string, or a list of those."""
        if proto.type.WhichOneof("type") == "listType":
            return [self.value(item, name) for item in proto.immediateValue.list.values]
        if proto.type.WhichOneof("type") != "tensorType":
            raise PackageError(
                f"{self.path}: {name} is a {proto.type.WhichOneof('type')}, which is not supported"
            )
        declared = TensorType.of(proto.type.tensorType, name)
        if proto.WhichOneof("value") == "blobFileValue":
            return self._from_file(proto.blobFileValue, declared, name)
        return self._immediate(proto.immediateValue.tensor, declared, name)

    def _from_file(self, reference: Any, declared: TensorType, name: str) -> np.ndarray:
        if Path(reference.fileName).name != "weight.bin":
            raise PackageError(f"{self.path}: {name} lies in {reference.fileName!r}; only weight.bin is read")
        found = self.weights.entry(reference.offset).type.name
        if found != declared.kind:
            raise PackageError(f"{self.path}: {name} is declared {declared}, its blob holds {found.lower()}")
        return self.weights.array(reference.offset, declared.shape)

    def _immediate(self, tensor: Any, declared: TensorType, name: str) -> Any:
        kind = tensor.WhichOneof("value")
        if kind == "strings":
            return tensor.strings.values[0] if declared.shape == () else list(tensor.strings.values)
        if kind != "bytes":
            values = list(getattr(tensor, kind).values) if kind else []
            array = np.array(values, declared.dtype)
        elif declared.kind in PACKED_BITS:
            raw = np.frombuffer(tensor.bytes.values, np.uint8)
            array = blob_format.unpack_bits(raw, PACKED_BITS[declared.kind], declared.n_elements)
            if declared.kind == "INT4":
                array = blob_format.sign_extend_4(array)
        else:
            array = np.frombuffer(tensor.bytes.values, declared.dtype)
        if array.size != declared.n_elements:
            raise PackageError(f"{self.path}: {name} is declared {declared}, it holds {array.size} elements")
        return array.reshape(declared.shape)


def _model_item(path: Path) -> Path:
    """Where the manifest says the model lies; the usual place is not assumed, a path out of the package is refused."""
    manifest = path / "Manifest.json"
    try:
        if manifest.stat().st_size > MANIFEST_BYTES_MAX:
            raise PackageError(f"{manifest}: larger than {MANIFEST_BYTES_MAX} bytes")
        content = json.loads(manifest.read_text(encoding="utf-8"))
        item = content["itemInfoEntries"][content["rootModelIdentifier"]]["path"]
        inside = Path("Data") / item
    except FileNotFoundError as error:
        raise PackageError(f"{path}: not a .mlpackage folder: {error.filename} is missing") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PackageError(f"{manifest}: not a package manifest: {error!r}") from error
    if inside.is_absolute() or ".." in inside.parts:
        raise PackageError(f"{manifest}: the model's path {item!r} leads out of the package")
    return inside


def _parse(path: Path) -> Any:
    model = toolchain.model_proto().Model()
    try:
        if path.stat().st_size > MODEL_BYTES_MAX:
            raise PackageError(f"{path}: larger than {MODEL_BYTES_MAX} bytes; weights belong in weight.bin")
        model.ParseFromString(path.read_bytes())
    except OSError as error:
        raise PackageError(f"{path}: cannot be read: {error.strerror}") from error
    except Exception as error:  # protobuf's DecodeError lives in another module in each of its versions
        raise (
            error if isinstance(error, PackageError) else PackageError(f"{path}: damaged: {error}")
        ) from error
    return model


def _function(name: str, proto: Any, path: Path) -> Function:
    where = f"{path}: function {name}"
    if proto.opset not in proto.block_specializations:
        raise PackageError(f"{where} names opset {proto.opset!r}, for which it has no block")
    block = proto.block_specializations[proto.opset]
    inputs, states = {}, {}
    for item in proto.inputs:
        if item.type.WhichOneof("type") == "stateType":
            wrapped = item.type.stateType.wrappedType.tensorType
            states[item.name] = TensorType.of(wrapped, f"{where}, state {item.name}")
        else:
            inputs[item.name] = TensorType.of(item.type.tensorType, f"{where}, input {item.name}")
    return Function(name, inputs, states, tuple(block.outputs), tuple(block.operations))
