"""Walks one function of a package: checks the features, executes the operations in order, keeps states.

The complaints about features are those a caller meets on a Mac ("Feature x is required but not specified.", "MultiArray
shape (1 x 3) does not match the shape (1 x 2) specified in the model description"), so that code meets them here first.
Called by tests, benches, `pages verify`, and the frozen-page runtime that stands in for Core ML.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import PackageError, PredictionError
from device.coreml.reference.arithmetic import Arithmetic
from device.coreml.reference.ops import OPERATIONS
from device.coreml.reference.package import ANY, Function, Package, TensorType
from device.coreml.threads import one_blas_thread

State = dict[str, np.ndarray]
"""The states of one conversation by name; functions of one model that name the same state share it."""
WALKED = frozenset({"const", "read_state", "write_state"})
"""Operations that the runner executes itself."""
LIST_INPUTS = frozenset({"values"})
"""Inputs that stay a list even where they have one element."""


class Program:
    """An ML Program ready to run. `arithmetic` may be replaced between calls; constants are kept."""

    def __init__(self, package: Package, arithmetic: Arithmetic | None = None) -> None:
        self.package = package
        self.arithmetic = arithmetic or Arithmetic()
        self._constants: dict[tuple[str, str], Any] = {}
        for function in package.functions.values():
            _check_operations(package, function)

    @classmethod
    def load(cls, path: Path | str, arithmetic: Arithmetic | None = None) -> Program:
        """Open a package. Raises PackageError, BlobError."""
        return cls(Package(path), arithmetic)

    @property
    def functions(self) -> tuple[str, ...]:
        return tuple(self.package.functions)

    def make_state(self, function: str | None = None) -> State:
        """Fresh states, all zero, for `function`."""
        states = self._function(function).states
        return {name: np.zeros(kind.shape, kind.dtype) for name, kind in states.items()}

    def predict(
        self,
        features: Mapping[str, np.ndarray],
        *,
        function: str | None = None,
        state: State | None = None,
    ) -> dict[str, np.ndarray]:
        """Run one function (the default one if none is named); `state` is changed in place.

        Raises PredictionError for features, states or function names that do not fit the program.
        """
        spec = self._function(function)
        values: dict[str, Any] = {**_features(spec, features), **_states(spec, state)}
        with (
            one_blas_thread(),
            np.errstate(all="ignore"),
        ):  # infinities and NaN are results here, as they are on the hardware
            for op in spec.operations:
                self._step(spec, op, values, state)
        return {name: values[name] for name in spec.outputs}

    def _function(self, name: str | None) -> Function:
        try:
            return self.package.function(name)
        except PackageError as error:
            raise PredictionError(str(error)) from error

    def _step(self, spec: Function, op: Any, values: dict[str, Any], state: State | None) -> None:
        if op.type == "const":
            name = op.outputs[0].name
            values[name] = self._kept(spec, name, lambda: self.package.value(op.attributes["val"], name))
        elif op.type == "write_state":
            assert state is not None, "features are checked before the first operation"
            name = op.inputs["input"].arguments[0].name
            data = self._arguments(op, values)["data"]
            state[name][...] = data
            values[name] = state[name]
        elif op.type == "read_state":
            # A copy: a value that was read must not change when the state is written later.
            values[op.outputs[0].name] = np.array(self._arguments(op, values)["input"], copy=True)
        elif op.type.startswith("constexpr_"):
            name = op.outputs[0].name
            values[name] = self._kept(spec, name, lambda: self._computed(op, values)[0])
        else:
            for output, value in zip(op.outputs, self._computed(op, values), strict=True):
                values[output.name] = value

    def _kept(self, spec: Function, name: str, make: Any) -> Any:
        """A constant, made on first use. Flushing is left to the consumer, so that arithmetics share it."""
        key = (spec.name, name)
        if key not in self._constants:
            self._constants[key] = make()
        return self._constants[key]

    def _arguments(self, op: Any, values: dict[str, Any]) -> dict[str, Any]:
        flush = self.arithmetic.flush
        arguments: dict[str, Any] = {}
        for source in (op.inputs, op.attributes):
            for key in source:
                if source is op.attributes:
                    if key != "name":
                        arguments[key] = self.package.value(source[key], f"{op.type} {key}")
                    continue
                found = [self._bound(binding, values, op.type, key) for binding in source[key].arguments]
                found = [flush(v) if isinstance(v, np.ndarray) else v for v in found]
                arguments[key] = found if key in LIST_INPUTS or len(found) != 1 else found[0]
        return arguments

    def _bound(self, binding: Any, values: dict[str, Any], where: str, key: str) -> Any:
        if binding.WhichOneof("binding") != "name":
            return self.package.value(binding.value, key)
        if binding.name not in values:
            raise PackageError(
                f"{self.package.path}: {where} uses {binding.name!r} before anything defines it"
            )
        return values[binding.name]

    def _computed(self, op: Any, values: dict[str, Any]) -> list[np.ndarray]:
        where = f"{op.type} {op.outputs[0].name!r}" if op.outputs else op.type
        try:
            result = OPERATIONS[op.type](self.arithmetic, **self._arguments(op, values))
        except (TypeError, ValueError, IndexError) as error:
            raise PackageError(f"{self.package.path}: {where}: {error}") from error
        results = result if isinstance(result, list) else [result]
        if len(results) < len(op.outputs):
            raise PackageError(
                f"{self.package.path}: {where} has {len(op.outputs)} outputs, {len(results)} made"
            )
        return [
            self._declared(output, value, where) for output, value in zip(op.outputs, results, strict=False)
        ]

    def _declared(self, output: Any, value: Any, where: str) -> np.ndarray:
        """Round to the declared type and compare with the declared shape."""
        kind = TensorType.of(output.type.tensorType, where)
        rounded = self.arithmetic.round(np.asarray(value), kind.dtype)
        if not _fits(rounded.shape, kind.shape):
            raise PackageError(f"{self.package.path}: {where} gave shape {rounded.shape}, declared {kind}")
        return rounded


def _check_operations(package: Package, function: Function) -> None:
    unknown = {op.type for op in function.operations} - set(OPERATIONS) - WALKED
    if unknown:
        names = ", ".join(sorted(unknown))
        raise PackageError(
            f"{package.path}: function {function.name} uses operations not implemented here: {names}"
        )


def _features(spec: Function, features: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    extra = sorted(set(features) - set(spec.inputs))
    if extra:
        raise PredictionError(
            f"{extra[0]!r} is no input of function {spec.name}; it takes: {', '.join(spec.inputs)}"
        )
    values = {}
    for name, kind in spec.inputs.items():
        if name not in features:
            raise PredictionError(f"Feature {name} is required but not specified.")
        array = np.asarray(features[name])
        if not _fits(array.shape, kind.shape):
            raise PredictionError(
                f"{name}: MultiArray shape ({_by(array.shape)}) does not match the shape ({_by(kind.shape)}) "
                "specified in the model description"
            )
        if array.dtype.kind not in ("f" if kind.dtype.kind == "f" else "iub"):
            raise PredictionError(
                f"{name}: elements are {array.dtype}, the model description asks for {kind}"
            )
        with np.errstate(over="ignore"):
            values[name] = array.astype(kind.dtype)
    return values


def _states(spec: Function, state: State | None) -> dict[str, np.ndarray]:
    if spec.states and state is None:
        names = ", ".join(spec.states)
        raise PredictionError(f"function {spec.name} has states ({names}); pass state=program.make_state()")
    values = {}
    for name, kind in spec.states.items():
        if name not in (state or {}):
            raise PredictionError(f"state {name} is required but not specified.")
        found = (state or {})[name]
        if found.shape != kind.shape or found.dtype != kind.dtype:
            raise PredictionError(f"state {name}: {found.dtype} {found.shape} does not match {kind}")
        values[name] = found
    return values


def _fits(shape: tuple[int, ...], declared: tuple[int, ...]) -> bool:
    return len(shape) == len(declared) and all(d in (ANY, n) for n, d in zip(shape, declared, strict=True))


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join("?" if n == ANY else str(n) for n in shape)
