"""Page programs on Apple systems: compile the template once, clone it, write a page's weights into the clone, load it.

The page's own first load still compiles it for the Neural Engine (0.7 to 1.1 s measured by others on phones); only the
package build is saved. That the weight file of a compiled model is the one of the package, at the same offsets, is
undocumented: it is checked on every compiled template, and where it does not hold each page is compiled whole.
Written for coremltools on macOS and never run on Apple hardware by us; on other systems it refuses to start.
Called through PageRuntime by FrozenPages and `device-check`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import BlobError, PageLoadError
from device.coreml import blob, toolchain
from device.coreml.geometry import PageGeometry
from device.coreml.page_program import MAX, OUT, SUM, PagePartial, pack_queries, unpack_partials
from device.coreml.page_rows import PageConstants
from device.coreml.page_writer import write_page, write_weights
from device.coreml.template import Template

FILE_CLOCK_S = 1.0
"""File times may lag behind the clock."""
E5_CACHE = "com.apple.e5rt.e5bundlecache"
COMPILED_WEIGHTS = Path("weights/weight.bin")
CAUSE_WORDS = (
    ("disk", ("no space", "disk full", "enospc")),
    ("memory", ("memory", "resource exhausted", "jetsam", "kern_resource_shortage")),
    ("compile", ("compil", "anec", "e5rt", "espresso", "mil->eir")),
)
"""Which words in Core ML's texts mean which cause, first match wins. Collected from public reports."""
UNITS = ("CPU_AND_NE", "CPU_AND_GPU", "CPU_ONLY", "ALL")


def cause_of(text: str) -> str:
    """One word for metrics from Core ML's free text."""
    low = text.lower()
    return next((cause for cause, words in CAUSE_WORDS if any(word in low for word in words)), "other")


class CoreMLRuntime:
    """Runs pages through Core ML. `compute_units` is one of UNITS; `folder` keeps compiled templates.

    Raises PageLoadError (cause "platform") where Core ML is not there.
    """

    engine, suffix = "coreml", ".mlmodelc"

    def __init__(self, folder: Path, compute_units: str = "CPU_AND_NE") -> None:
        if not toolchain.runtime_available():
            raise PageLoadError(
                f"Core ML runs on macOS with coremltools only, this is {sys.platform}", cause="platform"
            )
        if compute_units not in UNITS:
            raise PageLoadError(
                f"compute units {compute_units!r}; use one of {', '.join(UNITS)}", cause="platform"
            )
        self.folder = folder
        self.placement = "neural engine" if compute_units in ("CPU_AND_NE", "ALL") else "any"
        self._units = getattr(toolchain.coremltools().ComputeUnit, compute_units)

    def compiled_template(self, template: Template) -> Path:
        """The template as .mlmodelc, compiled once and kept."""
        path = self.folder / f"{template.geometry.name}.mlmodelc"
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            self._compile(template.path, path)
        return path

    def write(self, template: Template, constants: PageConstants, path: Path, slot: Path | None) -> None:
        compiled = self.compiled_template(template)
        shutil.rmtree(path, ignore_errors=True)
        if not same_layout(compiled / COMPILED_WEIGHTS, template):
            package = path.with_suffix(".mlpackage")
            write_page(template, constants, package)
            self._compile(package, path)
            shutil.rmtree(package)
            return
        if slot is not None and slot.exists():
            slot.rename(path)
        else:
            clone(compiled, path)
        write_weights(template, constants, path / COMPILED_WEIGHTS)

    def load(self, template: Template, path: Path) -> CoreMLPage:
        models = toolchain.coremltools().models
        try:
            model = models.CompiledMLModel(str(path), compute_units=self._units)
            placement = placement_of(path, self._units)
        except Exception as error:  # Core ML's errors arrive as RuntimeError, some as other types
            raise PageLoadError(f"{path.name}: {error}", cause=cause_of(str(error))) from error
        return CoreMLPage(template.geometry, model, placement)

    def clean(self, path: Path, since_unix_s: float) -> None:
        """Failed compilations leave gigabytes in this program's cache: remove what appeared since the load began."""
        names = {Path(sys.executable).name, "org.python.python"}
        for cache in (Path.home() / "Library" / "Caches" / name / E5_CACHE for name in sorted(names)):
            for left in cache.glob("*") if cache.is_dir() else ():
                if left.stat().st_mtime >= since_unix_s - FILE_CLOCK_S:
                    shutil.rmtree(left, ignore_errors=True)

    def _compile(self, package: Path, path: Path) -> None:
        try:
            toolchain.coremltools().models.utils.compile_model(str(package), str(path))
        except Exception as error:
            raise PageLoadError(f"compiling {package.name}: {error}", cause=cause_of(str(error))) from error


class CoreMLPage:
    """One loaded page. `placement` is the device that the plan prefers for the convolutions."""

    def __init__(self, geometry: PageGeometry, model: Any, placement: str) -> None:
        self.geometry, self.placement, self._model = geometry, placement, model

    def ask(self, queries: np.ndarray, centre: np.ndarray | None = None) -> PagePartial:
        packed = pack_queries(self.geometry, queries, centre)
        outputs = self._model.predict({"queries": packed})
        arrays = {name: np.asarray(outputs[name]) for name in (OUT, MAX, SUM)}
        return unpack_partials(self.geometry, arrays, queries.shape[1], centre)

    def close(self) -> None:
        self._model = None


def same_layout(weights: Path, template: Template) -> bool:
    """Whether a compiled model keeps the template's weight file as it is, so that pages may be written into it."""
    try:
        found = tuple(entry.offset for entry in blob.read_entries(weights))
    except BlobError:
        return False
    return found == template.offsets


def placement_of(path: Path, units: Any) -> str:
    """Where Core ML plans to run the convolutions, which are all of the work: neural engine, gpu or cpu."""
    plans, devices = toolchain.compute_plan()
    plan = plans.MLComputePlan.load_from_path(path=str(path), compute_units=units)
    places: Counter[str] = Counter()
    for function in plan.model_structure.program.functions.values():
        for operation in function.block.operations:
            usage = plan.get_compute_device_usage_for_mlprogram_operation(operation)
            if usage is None or not operation.operator_name.endswith("conv"):
                continue
            places[_place(usage.preferred_compute_device, devices)] += 1
    return places.most_common(1)[0][0] if places else "unknown"


def _place(device: Any, devices: Any) -> str:
    if isinstance(device, devices.MLNeuralEngineComputeDevice):
        return "neural engine"
    return "gpu" if isinstance(device, devices.MLGPUComputeDevice) else "cpu"


def clone(source: Path, target: Path) -> None:
    """Copy a folder; on APFS without copying its bytes."""
    if sys.platform == "darwin":
        subprocess.run(["/bin/cp", "-c", "-R", str(source), str(target)], check=True)
    else:
        shutil.copytree(source, target)
