"""Makes a bundle: part by part, streaming weights, each part finished and recorded before the next is begun.

A conversion that was interrupted goes on where it stopped: a part whose key (model, options, our format) and files are
unchanged is kept. Memory is bounded by one part: its constants as stored, one matrix in f32, and coremltools' copy.
Called by services.cli.convert, benches and tests.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.errors import PackageError
from device.coreml import toolchain
from device.coreml.convert.bundle_files import write_bundle_files
from device.coreml.convert.caches import CacheLayout
from device.coreml.convert.description import GemmaModel
from device.coreml.convert.manifest import Manifest, PartRecord, file_records
from device.coreml.convert.options import ConvertOptions, Part, plan_parts
from device.coreml.convert.programs import (
    chunk_program,
    embeddings_inputs,
    embeddings_program,
    function_names,
    head_program,
)
from device.coreml.convert.stored import WeightStore

BUILD = 1
"""Part of every key: raised whenever the same input makes other packages."""


@dataclass
class Watch:
    """What a caller may want to be told: a part is begun or kept, and weights were made ready (done, in all)."""

    part: Callable[[Part, PartRecord | None], None] = lambda part, record: None
    weights: Callable[[int, int], None] = lambda done, total: None


def convert(
    model: GemmaModel,
    folder: Path,
    options: ConvertOptions,
    watch: Watch | None = None,
    only: int | None = None,
) -> Manifest:
    """Write the bundle of `model` into `folder`; returns its manifest.

    `only` stops after so many parts (for measurements). Raises SettingError, ModelError, PackageError, OSError.
    """
    watch = watch or Watch()
    parts = plan_parts(model, options)[:only]
    folder.mkdir(parents=True, exist_ok=True)
    earlier = _earlier(folder)
    manifest = Manifest(_describe(model), _plain(options))
    progress = _Progress(watch, sum(part.n_weights for part in parts))
    for part in parts:
        key = _key(model, options, part)
        record = earlier.finished(key, folder) if earlier else None
        if record is None:
            watch.part(part, None)
            record = _make(model, folder, options, part, key, progress.made)
        else:
            progress.kept(part.n_weights)
        manifest.parts.append(record)
        manifest.write(folder)
        watch.part(part, record)
    if only is None:
        manifest.others = file_records(folder, write_bundle_files(model, folder, options, manifest))
        manifest.write(folder)
        _remove_strangers(folder, parts)
    return manifest


@dataclass
class _Progress:
    """Counts weights; kept parts count as done, and never as work."""

    watch: Watch
    total: int
    done: int = 0

    def made(self, n: int) -> None:
        self.kept(n)
        self.watch.weights(self.done, self.total)

    def kept(self, n: int) -> None:
        self.done += n


def _make(
    model: GemmaModel,
    folder: Path,
    options: ConvertOptions,
    part: Part,
    key: str,
    told: Callable[[int], None],
) -> PartRecord:
    began_s = time.monotonic()
    store = WeightStore(model, options.lut(part.kind), told)
    layout, inputs, functions = CacheLayout(model, options.context), None, ["main"]
    if part.kind == "embeddings":
        program = embeddings_program(store, options.scale)
        inputs = embeddings_inputs(options.batch)
    elif part.kind == "head":
        program = head_program(store)
    else:
        assert part.chunk is not None, "a chunk has its plan"
        program = chunk_program(store, layout, part.chunk, options.batch, options.scale)
        functions = list(function_names(layout.rotates))
    path, unfinished = folder / part.package, folder / f".unfinished-{part.package}"
    metadata = {"outrigger.part": part.kind, "outrigger.key": key}
    try:
        toolchain.save_program(program, unfinished, metadata, inputs)
        shutil.rmtree(path, ignore_errors=True)
        os.replace(unfinished, path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    layers = [part.chunk.first, part.chunk.last] if part.chunk else []
    return PartRecord(
        part.kind, part.package, key, layers, functions, part.n_weights, store.error,
        round(time.monotonic() - began_s, 2), file_records(folder, [path]),
    )  # fmt: skip


def _earlier(folder: Path) -> Manifest | None:
    try:
        return Manifest.read(folder)
    except PackageError:
        return None


def _describe(model: GemmaModel) -> dict[str, Any]:
    """The model's sizes and rules as plain values."""
    named = (
        "name",
        "n_embd",
        "n_ff",
        "n_head",
        "n_head_kv",
        "head_dim",
        "n_vocab",
        "n_ctx_train",
        "window",
        "eps",
    )
    return {
        **{name: getattr(model, name) for name in named},
        "kinds": list(model.kinds),
        "attention_scale": model.attention_scale,
        "ropes": {kind: asdict(rope) for kind, rope in model.ropes.items()},
        "tied": model.tied,
    }


def _plain(options: ConvertOptions) -> dict[str, Any]:
    return asdict(options)


def _key(model: GemmaModel, options: ConvertOptions, part: Part) -> str:
    """Hash of everything a part is made from. Files are known by name, size and time, as build tools know them."""
    files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in model.files]
    lut = options.lut(part.kind)
    facts: list[Any] = [BUILD, _describe(model), files, asdict(lut) if lut else None, part.kind]
    if part.kind == "embeddings":
        facts += [options.batch, options.scale]
    if part.chunk is not None:
        facts += [options.batch, options.scale, options.context, asdict(part.chunk)]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _remove_strangers(folder: Path, parts: tuple[Part, ...]) -> None:
    """Packages of an earlier conversion with other options would be copied to a phone for nothing."""
    names = {part.package for part in parts}
    for path in folder.glob("gemma3_*.mlpackage"):
        if path.name not in names:
            shutil.rmtree(path)
