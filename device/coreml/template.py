"""Templates of page programs: built once per geometry by coremltools, then only their weight file is replaced.

A template is a whole .mlpackage with zero constants. A page made from it (page_writer) is byte for byte what
coremltools would have built from the page's own constants, because no pass looks at their values.
Called by page_writer, the frozen-page runtimes, `pages build` and `bench pages`.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.errors import PackageError
from device.coreml import blob, toolchain
from device.coreml.geometry import PageGeometry
from device.coreml.page_program import page_program
from device.coreml.reference.package import Package

GEOMETRY_KEY = "outrigger.page"
"""Key of the model's metadata under which a template and its pages say their geometry."""


@dataclass(frozen=True)
class Template:
    """A template on disk: `offsets` are the metadata offsets of its constants, in the order of the geometry."""

    geometry: PageGeometry
    path: Path
    model_path: Path
    offsets: tuple[int, ...]

    @property
    def package_files(self) -> tuple[Path, ...]:
        """The files a page shares with its template, relative to the package."""
        return (Path("Manifest.json"), self.model_path.relative_to(self.path))

    @property
    def weight_file(self) -> Path:
        """Relative path of the weight file."""
        return (self.model_path.parent / "weights" / "weight.bin").relative_to(self.path)


def build_package(geometry: PageGeometry, constants: dict[str, np.ndarray], path: Path) -> None:
    """Build a page with coremltools: the slow way (0.2-3 s), which the template exists to avoid. Replaces `path`."""
    toolchain.save_program(page_program(geometry, constants), path, {GEOMETRY_KEY: geometry.name})


def build_template(geometry: PageGeometry, folder: Path) -> Template:
    """Build the template of a geometry in `folder` and open it. A half-built template never carries the final name."""
    folder.mkdir(parents=True, exist_ok=True)
    path, unfinished = (
        folder / f"{geometry.name}.mlpackage",
        folder / f".{geometry.name}.{os.getpid()}.mlpackage",
    )
    zeros = {name: np.zeros(shape, np.float16) for name, shape in geometry.constants()}
    try:
        build_package(geometry, zeros, unfinished)
        shutil.rmtree(path, ignore_errors=True)
        unfinished.rename(path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return open_template(path)


def open_template(path: Path | str) -> Template:
    """Open a template (or a page: they differ in their weights only) and check it against the geometry it names.

    Raises PackageError where constants are missing, merged, or of another shape than the geometry asks for.
    """
    path = Path(path)
    package = Package(path)
    name = package.spec.description.metadata.userDefined.get(GEOMETRY_KEY)
    if name is None:
        raise PackageError(f"{path}: not a page program (its metadata has no {GEOMETRY_KEY!r})")
    geometry = PageGeometry.parse(name)
    found = {
        constant.name: (constant.blob_offset, constant.type.shape)
        for constant in package.function(None).constants()
        if constant.blob_offset is not None
    }
    offsets = []
    for name, shape in geometry.constants():
        offset, found_shape = found.pop(name, (None, None))
        if offset is None or found_shape != shape:
            raise PackageError(
                f"{path}: constant {name} is {found_shape}, a page of {geometry} needs {shape}"
            )
        offsets.append(offset)
    if found or offsets != blob.layout([2 * int(np.prod(shape)) for _, shape in geometry.constants()]):
        raise PackageError(f"{path}: its constants do not lie as a page of {geometry} lays them out")
    return Template(geometry, path, package.model_path, tuple(offsets))


def find_template(geometry: PageGeometry, folder: Path) -> Template:
    """The template of a geometry in `folder`, built if it is not there or is damaged."""
    path = folder / f"{geometry.name}.mlpackage"
    if path.exists():
        try:
            return open_template(path)
        except PackageError:
            shutil.rmtree(path)
    return build_template(geometry, folder)
