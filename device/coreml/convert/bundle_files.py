"""The small files of a bundle: meta.yaml, tokenizer, a script for the Mac, and a README that says what was not tried.

meta.yaml has the form that ANEMLL 0.3.5 reads (a subset of YAML: this writes plain scalars and quoted strings only).
Called by convert.py, when all packages are there.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from device.coreml.convert.description import GemmaModel
from device.coreml.convert.manifest import Manifest
from device.coreml.convert.options import PREFIX, ConvertOptions, plan_parts
from device.coreml.convert.palette import Lut
from device.coreml.convert.programs import head_pieces
from device.coreml.convert.tokenizer import write_tokenizer

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "chat_template.json", "generation_config.json", "config.json",
)  # fmt: skip
META, SCRIPT, README = "meta.yaml", "finish-on-mac.sh", "README.md"


def write_bundle_files(
    model: GemmaModel, folder: Path, options: ConvertOptions, manifest: Manifest
) -> list[Path]:
    """Write them all; returns their paths."""
    written = [folder / META, folder / SCRIPT, folder / README]
    written[0].write_text(meta_yaml(model, options), encoding="utf-8")
    written[1].write_text(SCRIPT_TEXT, encoding="utf-8")
    written[1].chmod(0o755)
    tokenizer = _tokenizer(model, folder)
    written[2].write_text(_readme(model, options, manifest, bool(tokenizer)), encoding="utf-8")
    return written + tokenizer


def meta_yaml(model: GemmaModel, options: ConvertOptions) -> str:
    """What an app needs to know. `sliding_window` is always there: without it apps assume 512."""
    embeddings, *chunks, head = plan_parts(model, options)
    sizes = [last - first for first, last in head_pieces(model.n_vocab)]
    parameters = {
        "context_length": options.context,
        "batch_size": options.batch,
        **_lut("lut_embeddings", options.lut_embeddings),
        **_lut("lut_ffn", options.lut_layers),
        **_lut("lut_lmhead", options.lut_head),
        "num_chunks": len(chunks),
        "model_prefix": PREFIX,
        "embeddings": f"{embeddings.name}.mlmodelc",
        "lm_head": f"{head.name}.mlmodelc",
        "ffn": f"{chunks[0].name}.mlmodelc",
        "split_lm_head": len(sizes),
        "vocab_size": model.n_vocab,
        "lm_head_chunk_sizes": sizes,
        "sliding_window": model.window,
        "update_mask_prefill": "true",
        "prefill_dynamic_slice": "false",
    }
    head_lines = {
        "name": json.dumps(f"{model.name}-ctx{options.context}"),
        "version": "0.3.5",
        "description": json.dumps(
            f"{model.name} for Core ML, context {options.context}, made by outrigger convert"
        ),
        "framework": "Core ML",
        "architecture": PREFIX,
        "model_type": "chunked",
    }
    lines = ["model_info:", *(f"  {key}: {value}" for key, value in head_lines.items()), "  parameters:"]
    return "\n".join([*lines, *(f"    {key}: {value}" for key, value in parameters.items())]) + "\n"


def _lut(key: str, lut: Lut | None) -> dict[str, int | str]:
    if lut is None:
        return {key: "none"}
    return {key: lut.bits, **({f"{key}_per_channel": lut.group} if lut.group else {})}


def _tokenizer(model: GemmaModel, folder: Path) -> list[Path]:
    """Copied from a checkpoint; made from a GGUF's vocabulary."""
    source = model.files[0]
    if source.suffix == ".gguf":
        return write_tokenizer(source, folder)
    written = []
    for name in TOKENIZER_FILES:
        if (source.parent / name).is_file():
            shutil.copyfile(source.parent / name, folder / name)
            written.append(folder / name)
    return written


def _readme(model: GemmaModel, options: ConvertOptions, manifest: Manifest, has_tokenizer: bool) -> str:
    rows = [
        f"| `{part.package}` | {part.n_bytes / 1e6:,.1f} MB | {', '.join(part.functions)} |"
        for part in manifest.parts
    ]
    missing = (
        "" if has_tokenizer else "\nThe model had no tokenizer files beside it: put tokenizer.json here.\n"
    )
    return README_TEXT.format(
        name=model.name, context=options.context, batch=options.batch, window=model.window, parts="\n".join(rows),
        missing=missing, scale=f"{options.scale:g}",
    )  # fmt: skip


SCRIPT_TEXT = """#!/bin/sh
# Compiles this bundle's packages on a Mac with Xcode, which no other system can. Run it in any folder; it prints one
# line a package and stops at the first failure. Then copy this folder to the phone, without the .mlpackage folders.
set -eu
cd "$(dirname "$0")"
command -v xcrun >/dev/null || { echo "xcrun is missing: install Xcode (a Mac is needed)" >&2; exit 2; }
for package in *.mlpackage; do
    compiled="${package%.mlpackage}.mlmodelc"
    rm -rf "$compiled"
    xcrun coremlcompiler compile "$package" . >/dev/null || { echo "$package: does not compile" >&2; exit 1; }
    [ -s "$compiled/weights/weight.bin" ] || { echo "$compiled: its weight file is empty" >&2; exit 1; }
    cmp -s "$package/Data/com.apple.CoreML/weights/weight.bin" "$compiled/weights/weight.bin" \\
        || echo "$compiled: the compiler changed the weights (told, not an error)" >&2
    echo "$compiled: $(du -sk "$compiled" | cut -f1) kB"
done
"""

README_TEXT = """# {name} for Core ML

Made by `outrigger convert`: context {context}, prefill batches of {batch}, sliding window {window}, residual
scale {scale}. Checked through an interpreter on Linux. **Never run in an app or on Apple hardware by its maker.**

| part | size | functions |
|---|---|---|
{parts}
{missing}
1. On a Mac with Xcode: `sh finish-on-mac.sh` makes the `.mlmodelc` folders that meta.yaml names.
2. Copy this folder, without the `.mlpackage` folders, to the app. manifest.json has every file's size and SHA-256:
   copies to phones have been seen to leave empty files without an error.
3. The app must pass `update_mask` to `prefill`: [1, 1, {context}, {batch}], 1 at (position, token) for each token to be
   written, 0 elsewhere. Tokens without a 1 are computed and forgotten, so a partial batch is one call, not one call a
   token. ANEMLL's Swift runtime 0.3.5 passes the mask to monolithic models only: this is the change it needs.
4. One state serves all chunks: they declare the same states and use their own layers' rows.

`infer` and `prefill` are right at every position; `*_rotate`, where they are listed, are the same functions under the
names that apps call beyond the window.
"""
