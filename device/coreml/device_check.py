"""What this device does with a page program, as one object to paste into a report.

For the owner of a Mac: a template is built, a sample page written, compiled, loaded and asked through Core ML for each
choice of compute units, and its answers are laid beside the interpreter's under every assumption about how the hardware
adds: the assumption whose answers lie nearest tells what the Neural Engine does. For the owner of a phone: `export`
writes the sample page with questions and answers. Elsewhere everything that needs no Core ML is run, and the rest says
why it was not. Decides nothing. Called by `outrigger device-check`.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from common.errors import OutriggerError, PageLoadError
from device.coreml.accuracy import Inputs, attend_float64, constants_of, make_inputs, row_errors
from device.coreml.frozen.coreml_runtime import COMPILED_WEIGHTS, UNITS, CoreMLRuntime, same_layout
from device.coreml.frozen.runtime import LoadedPage
from device.coreml.geometry import PageGeometry
from device.coreml.page_check import USUAL
from device.coreml.page_program import PagePartial, pack_queries, unpack_partials
from device.coreml.page_rows import PageConstants
from device.coreml.page_writer import write_page
from device.coreml.reference import Program
from device.coreml.template import Template, build_template

CASE = "peaky"
ASKS = 50
FORM = 1
"""Of the report; changed when a field changes its meaning."""

T = TypeVar("T")


def check_device(
    geometry: PageGeometry, folder: Path, progress: Callable[[str], None], units: tuple[str, ...] = UNITS
) -> dict[str, Any]:
    """Everything that can be found out here. Failures of the device are findings, not exceptions."""
    progress(f"building a template for {geometry}")
    template, template_s = _timed(lambda: build_template(geometry, folder))
    inputs = make_inputs(CASE, geometry)
    constants = constants_of(geometry, inputs)
    page = folder / "sample.mlpackage"
    _, write_s = _timed(lambda: write_page(template, constants, page))
    progress("asking the interpreter")
    oracle = attend_float64(inputs)
    answers = _interpreted(page, geometry, inputs)
    return {
        "form": FORM,
        "machine": machine(),
        "geometry": geometry.name,
        "template_build_s": round(template_s, 3),
        "page_write_ms": round(1e3 * write_s, 1),
        "interpreter": {name: _errors(answer, oracle) for name, answer in answers.items()},
        "core_ml": _core_ml(template, constants, folder, inputs, answers, progress, units),
    }


def machine() -> dict[str, str]:
    """What a reader of the report needs to know of the machine."""
    try:
        tools = version("coremltools")
    except PackageNotFoundError:
        tools = "absent"
    return {
        "system": f"{platform.system()} {platform.mac_ver()[0] or platform.release()}",
        "processor": platform.processor() or platform.machine(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "coremltools": tools,
        "numpy": np.__version__,
    }


def _interpreted(page: Path, geometry: PageGeometry, inputs: Inputs) -> dict[str, PagePartial]:
    program = Program.load(page)
    answers = {}
    for arithmetic in USUAL:
        program.arithmetic = arithmetic
        outputs = program.predict({"queries": pack_queries(geometry, inputs.queries, None)})
        answers[str(arithmetic)] = unpack_partials(geometry, outputs, inputs.queries.shape[1], None)
    return answers


def _core_ml(
    template: Template,
    constants: PageConstants,
    folder: Path,
    inputs: Inputs,
    answers: dict[str, PagePartial],
    progress: Callable[[str], None],
    units: tuple[str, ...],
) -> dict[str, Any]:
    try:
        CoreMLRuntime(folder / "compiled")
    except PageLoadError as error:
        return {
            "available": False,
            "why": str(error),
            "not_run": ["compile", "placement", "accuracy", "latency"],
        }
    found: dict[str, Any] = {"available": True}
    for unit in units:
        progress(f"Core ML on {unit}")
        try:
            found[unit] = _on_units(unit, template, constants, folder / "compiled", inputs, answers)
        except (OutriggerError, OSError) as error:
            found[unit] = {"failed": getattr(error, "cause", "other"), "error": str(error)}
    return found


def _on_units(
    unit: str,
    template: Template,
    constants: PageConstants,
    folder: Path,
    inputs: Inputs,
    answers: dict[str, PagePartial],
) -> dict[str, Any]:
    """Compile, write, load twice, ask: one choice of compute units."""
    runtime = CoreMLRuntime(folder, unit)
    compiled, compile_s = _timed(lambda: runtime.compiled_template(template))
    path = folder / f"sample-{unit}.mlmodelc"
    _, write_s = _timed(lambda: runtime.write(template, constants, path, None))
    first, first_load_s = _timed(lambda: runtime.load(template, path))
    first.close()
    page, load_s = _timed(lambda: runtime.load(template, path))
    answer, first_ask_s = _timed(lambda: page.ask(inputs.queries))
    return {
        "placement": page.placement,
        "template_compile_s": round(compile_s, 3),
        "weights_can_be_patched": same_layout(compiled / COMPILED_WEIGHTS, template),
        "page_write_ms": round(1e3 * write_s, 1),
        "first_load_s": round(first_load_s, 3),
        "second_load_s": round(load_s, 3),
        "first_ask_ms": round(1e3 * first_ask_s, 3),
        **_latency(page, inputs.queries),
        **_errors(answer, attend_float64(inputs)),
        "distance_to": {name: distance(answer, other) for name, other in answers.items()},
    }


def _latency(page: LoadedPage, queries: np.ndarray) -> dict[str, float]:
    times = sorted(_timed(lambda: page.ask(queries))[1] for _ in range(ASKS))
    return {
        "ask_ms_p50": round(1e3 * times[ASKS // 2], 3),
        "ask_ms_p90": round(1e3 * times[ASKS * 9 // 10], 3),
    }


def _errors(answer: PagePartial, oracle: tuple[np.ndarray, np.ndarray]) -> dict[str, float]:
    o_error, lse_error = row_errors(answer, oracle)
    return {"o_error": float(f"{o_error:.3g}"), "lse_error": float(f"{lse_error:.3g}")}


def distance(a: PagePartial, b: PagePartial) -> float:
    """Relative L2 distance of two answers' normalised outputs; 0 where they are equal to the bit."""
    left, right = (p.o.astype(np.float64) / p.l[..., None] for p in (a, b))
    return float(f"{np.linalg.norm(left - right) / np.linalg.norm(right):.3g}")


def export(geometry: PageGeometry, folder: Path) -> list[Path]:
    """The sample page with packed questions (f16) and float64 answers, for a device that runs no Python."""
    folder.mkdir(parents=True, exist_ok=True)
    template, inputs = build_template(geometry, folder), make_inputs(CASE, geometry)
    page = folder / "sample.mlpackage"
    write_page(template, constants_of(geometry, inputs), page)
    out, lse = attend_float64(inputs)
    questions, answers, described = folder / "queries.f16", folder / "answers.f32", folder / "sample.json"
    pack_queries(geometry, inputs.queries, None).tofile(questions)
    np.concatenate([out.reshape(-1), lse.reshape(-1)]).astype("<f4").tofile(answers)
    text = {
        "form": FORM,
        "geometry": geometry.name,
        "queries.f16": {"input": "queries", "shape": geometry.query_shape, "type": "little-endian float16"},
        "answers.f32": {
            "normalised output": list(out.shape),
            "then log-sum-exp": list(lse.shape),
            "type": "little-endian float32",
            "from": "l, m and o of each head and chunk: weights l exp(m - max m); output is their mean of o / gain",
            "gain": 256,
        },
        "compile": "xcrun coremlcompiler compile sample.mlpackage .",
    }
    described.write_text(json.dumps(text, indent=2) + "\n", encoding="utf-8")
    return [page, questions, answers, described]


def _timed(action: Callable[[], T]) -> tuple[T, float]:
    began_s = time.perf_counter()
    result = action()
    return result, time.perf_counter() - began_s
