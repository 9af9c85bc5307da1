"""Makes a page package from a template by writing its weight file: milliseconds where building takes seconds.

Called by the background builder, `pages build`, `bench pages`.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from common.errors import EngineError
from device.coreml import blob
from device.coreml.page_rows import PageConstants
from device.coreml.template import Template


def write_page(template: Template, constants: PageConstants, path: Path, slot: Path | None = None) -> None:
    """Write a page package at `path` (replaced if it exists). A half-written page never carries the final name.

    `slot` is an older page of the same template that nobody needs any more: its files are taken over and overwritten in
    place, which is three times as fast as writing fresh ones. Raises EngineError where template and constants are of
    different geometries, OSError when the disk does not take it.
    """
    if template.geometry != constants.geometry:
        raise EngineError(f"constants of {constants.geometry} do not fit a template of {template.geometry}")
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        if slot is not None and slot.exists():
            slot.rename(unfinished)
        for file in template.package_files:
            (unfinished / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(template.path / file, unfinished / file)
        write_weights(template, constants, unfinished / template.weight_file)
        if path.exists():
            shutil.rmtree(path)
        unfinished.rename(path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def write_weights(template: Template, constants: PageConstants, path: Path) -> None:
    """Write just the weight file of a page, over an older one where there is one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    offsets = blob.write(path, [blob.Blob.of(array) for array in constants.by_name().values()], reuse=True)
    assert tuple(offsets) == template.offsets, "template and page are laid out by the same function"
