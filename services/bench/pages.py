"""`outrigger bench pages`: what it costs to turn stored keys into a Core ML page program, on this machine.

For the 27B's attention geometry (4 KV heads, head_dim 256, 48 query rows) and, without --quick, for several page sizes:

    page_write_ms          arrays ready (67 MB at 16,384 keys), written into files that exist: those of a page that was
                           given up, or on Apple systems a clone of the template
    page_new_ms            the same into new files
    page_write_vs_memcpy   page_write_ms / copying the same arrays to fresh memory, taken in turns
    page_new_vs_memcpy     page_new_ms / the same copy
    page_build_ms          stored f16 rows to arrays: transpose and chunk; page_build_q8_0_ms dequantises first
    template_build_ms      the template, once per geometry, by coremltools
    fresh_build_ms         the same page built whole by coremltools, which the template spares
    identical              1: every file of the written page equals the built one's, byte for byte

Nothing here needs or uses Apple hardware. Files stay in the page cache, as they would where they are loaded next.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TypeVar

import click
import numpy as np

from device.coreml.geometry import PAGE_TOKENS, PageGeometry
from device.coreml.page_rows import GGML_F16, GGML_Q8_0, Q8_0, Q8_0_BLOCK, PageConstants
from device.coreml.page_writer import write_page
from device.coreml.template import Template, build_package, build_template
from services.bench.report import Report, report_options

N_HEAD_KV, HEAD_DIM, N_ROWS = 4, 256, 48
SIZES = (1024, 4096, PAGE_TOKENS)
ROUNDS, ROUNDS_QUICK = 15, 7

T = TypeVar("T")


@click.command("pages")
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where to write.  [system's temporary one]",
)
@report_options
def command(as_json: bool, quick: bool, results_folder: Path | None, folder: Path | None) -> None:
    """Time page programs: from stored rows to a package on disk."""
    report = Report("pages", "none", as_json=as_json, quick=quick, results_folder=results_folder)
    report.ran(
        "host", "NumPy and the file system; coremltools builds the template and the page compared with"
    )
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        for tokens in (PAGE_TOKENS,) if quick else SIZES:
            _measure(report, PageGeometry(N_HEAD_KV, HEAD_DIM, HEAD_DIM, N_ROWS, tokens), Path(scratch))
    report.finish()


def _measure(report: Report, geometry: PageGeometry, folder: Path) -> None:
    report.progress(f"{geometry.page_tokens:,} keys: building the template")
    template, template_s = _timed(lambda: build_template(geometry, folder))
    constants = PageConstants.allocate(geometry)
    report.progress(f"{geometry.page_tokens:,} keys: rows to arrays")
    build_q8_0_s = _median_fill(constants, _q8_0_rows(geometry), GGML_Q8_0)
    build_s = _median_fill(constants, _f16_rows(geometry), GGML_F16)
    rounds = ROUNDS_QUICK if report.quick else ROUNDS
    report.progress(f"{geometry.page_tokens:,} keys: {rounds} times written and copied")
    times = [_round(template, constants, folder) for _ in range(rounds)]
    for new_s, again_s, copy_s in times:
        report.row(page_tokens=geometry.page_tokens, new_s=new_s, write_s=again_s, memcpy_s=copy_s)
    report.progress(f"{geometry.page_tokens:,} keys: building the same page whole")
    built = folder / "built.mlpackage"
    _, fresh_s = _timed(lambda: build_package(geometry, constants.by_name(), built))
    n_files, n_equal = _compare(built, folder / "page.mlpackage")
    prefix = "" if geometry.page_tokens == PAGE_TOKENS else f"t{geometry.page_tokens}."
    took_part = {"bytes": geometry.weight_bytes, "rounds": rounds}
    figures = {
        "page_write_ms": 1e3 * median(again for _, again, _ in times),
        "page_new_ms": 1e3 * median(new for new, _, _ in times),
        "memcpy_ms": 1e3 * median(copy for _, _, copy in times),
        "page_write_vs_memcpy": median(again / copy for _, again, copy in times),
        "page_new_vs_memcpy": median(new / copy for new, _, copy in times),
        "page_build_ms": 1e3 * build_s,
        "page_build_q8_0_ms": 1e3 * build_q8_0_s,
        "template_build_ms": 1e3 * template_s,
        "fresh_build_ms": 1e3 * fresh_s,
        "page_megabytes": geometry.weight_bytes / 1e6,
    }
    for name, value in figures.items():
        report.figure(prefix + name, value, **took_part)
    report.figure(prefix + "identical", int(n_files == n_equal), files=n_files)


def _round(template: Template, constants: PageConstants, folder: Path) -> tuple[float, float, float]:
    """Seconds of a new package, of the same over older files, and of copying the arrays."""
    page = folder / "page.mlpackage"
    shutil.rmtree(page, ignore_errors=True)
    _, copy_s = _timed(lambda: (constants.k.copy(), constants.v.copy(), constants.bias.copy()))
    _, new_s = _timed(lambda: write_page(template, constants, page))
    _, again_s = _timed(lambda: write_page(template, constants, page, slot=page))
    return new_s, again_s, copy_s


def _median_fill(constants: PageConstants, rows: tuple[np.ndarray, np.ndarray], ggml_type: int) -> float:
    return median(_timed(lambda: constants.fill(*rows, ggml_type))[1] for _ in range(5))


def _f16_rows(geometry: PageGeometry) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    k, v = (
        rng.standard_normal((geometry.page_tokens, N_HEAD_KV * HEAD_DIM), dtype=np.float32).astype(np.float16)
        for _ in "kv"
    )
    return k.view(np.uint8), v.view(np.uint8)


def _q8_0_rows(geometry: PageGeometry) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    rows = np.zeros((2, geometry.page_tokens, N_HEAD_KV * HEAD_DIM // Q8_0_BLOCK), Q8_0)
    rows["scale"] = rng.uniform(0.001, 0.02, rows.shape)
    rows["quants"] = rng.integers(-127, 128, (*rows.shape, Q8_0_BLOCK), dtype=np.int8)
    k, v = rows.view(np.uint8).reshape(2, geometry.page_tokens, -1)
    return k, v


def _compare(built: Path, written: Path) -> tuple[int, int]:
    """Files of both packages, and how many of them are equal."""
    names = {p.relative_to(root) for root in (built, written) for p in root.rglob("*") if p.is_file()}
    equal = [
        (built / name).is_file()
        and (written / name).is_file()
        and (built / name).read_bytes() == (written / name).read_bytes()
        for name in names
    ]
    return len(names), sum(equal)


def _timed(action: Callable[[], T]) -> tuple[T, float]:
    began_s = time.perf_counter()
    result = action()
    return result, time.perf_counter() - began_s
