"""A bundle's parts through Core ML, in the interpreter's place: one loaded model a function, one state for all.

Written for coremltools 9 on macOS 15 and later; **never run** by us. Called by bundle_check.py, and only where
`toolchain.runtime_available()`.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from common.errors import PageLoadError, PredictionError
from device.coreml import toolchain
from device.coreml.convert.bundle_loading import PartLoader
from device.coreml.frozen.coreml_runtime import cause_of
from device.coreml.frozen.load_policy import DeviceFacts
from device.coreml.reference import Package

UNITS = "CPU_AND_NE"


def facts_of(path: Path) -> DeviceFacts:
    """Disk and memory as the system tells them. Python is not told the thermal state on macOS: it counts as nominal."""
    return DeviceFacts(shutil.disk_usage(path).free, psutil.virtual_memory().available)


class CoreMLPart:
    """Loads functions when first asked for; has the interpreter's `functions`, `predict` and `make_state`."""

    def __init__(self, path: Path, loader: PartLoader) -> None:
        compiled = path.with_suffix(".mlmodelc")
        self.path, self.loader = (compiled if compiled.is_dir() else path), loader
        self.functions = Package(path).functions
        self._models: dict[str, Any] = {}

    def make_state(self, function: str | None = None) -> Any:
        return self._model(function).make_state()

    def predict(
        self, features: dict[str, Any], function: str | None = None, state: Any = None
    ) -> dict[str, np.ndarray]:
        model = self._model(function)
        try:
            return model.predict(features, state=state) if state is not None else model.predict(features)
        except Exception as error:
            raise PredictionError(f"{self.path.name} {function or ''}: {error}") from error

    def _model(self, function: str | None) -> Any:
        name = function if function in self.functions and len(self.functions) > 1 else None
        key = name or "main"
        if key not in self._models:
            self._models[key] = self.loader.load(
                f"{self.path.name} {key}", self.path, lambda: self._loaded(name)
            )
        return self._models[key]

    def _loaded(self, function: str | None) -> Any:
        models = toolchain.coremltools().models
        units = getattr(toolchain.coremltools().ComputeUnit, UNITS)
        kind = models.CompiledMLModel if self.path.suffix == ".mlmodelc" else models.MLModel
        try:
            return kind(str(self.path), compute_units=units, function_name=function)
        except Exception as error:
            raise PageLoadError(f"{self.path.name}: {error}", cause=cause_of(str(error))) from error
