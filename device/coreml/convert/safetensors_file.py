"""Tensors of .safetensors files, mapped: bf16, f16 and f32 rows as f32, nothing else read than what is asked for.

The format is a length, a JSON table, and bytes; NumPy has no bfloat16, so the bytes are widened here (a bf16 is the
upper half of an f32). Knows no model. Called by huggingface.py.
"""

from __future__ import annotations

import json
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.errors import ModelError

HEADER_BYTES_MAX = 100 << 20
INDEX = "model.safetensors.index.json"
STORED = {"BF16": "<u2", "F16": "<f2", "F32": "<f4"}


@dataclass(frozen=True)
class Tensor:
    """One tensor: its file's mapping, its stored type, shape and first byte."""

    raw: np.ndarray  # u8, the whole file
    kind: str
    shape: tuple[int, ...]
    offset: int

    def rows(self, first: int, last: int) -> np.ndarray:
        """f32 [last - first, ...] of the outermost axis."""
        width = int(np.prod(self.shape[1:], dtype=np.int64))
        stored = np.dtype(STORED[self.kind])
        begin = self.offset + first * width * stored.itemsize
        values = self.raw[begin : begin + (last - first) * width * stored.itemsize].view(stored)
        if self.kind == "BF16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        return values.astype(np.float32, copy=False).reshape(last - first, *self.shape[1:])


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a checkpoint folder, as its index names them, or all of them. Raises ModelError."""
    index = folder / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelError(f"{index}: not an index of weight files: {error!r}") from error
        files = [folder / Path(name).name for name in names]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder}: no .safetensors file in it")
    return files


def open_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint folder by name. Raises ModelError naming the file and what is wrong with it."""
    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder):
        tensors.update(_tensors_of(file))
    return tensors


def _tensors_of(path: Path) -> dict[str, Tensor]:
    try:
        n_file = path.stat().st_size
        with path.open("rb") as file:
            (n_header,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
            if n_file < 10 or n_header > min(HEADER_BYTES_MAX, n_file - 8):
                raise ModelError(
                    f"{path}: not a whole .safetensors file: {n_file} bytes, header of {n_header}"
                )
            table = json.loads(file.read(n_header))
            raw = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path}: its header is no JSON: {error}") from error
    return {
        name: _tensor(path, name, entry, raw, 8 + n_header)
        for name, entry in table.items()
        if name != "__metadata__"
    }


def _tensor(path: Path, name: str, entry: dict, raw: np.ndarray, start: int) -> Tensor:
    try:
        kind, shape = entry["dtype"], tuple(int(n) for n in entry["shape"])
        begin, end = (int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path}: tensor {name} has no type, shape or place: {error!r}") from error
    if kind in STORED:  # others may be there (counters, masks); using one is refused by name later
        n_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(STORED[kind]).itemsize
        if end - begin != n_bytes or not 0 <= begin <= end <= len(raw) - start:
            raise ModelError(
                f"{path}: tensor {name} of {kind} {list(shape)} needs {n_bytes} bytes; its place "
                f"[{begin}, {end}) does not hold them in a file of {len(raw)} bytes (truncated?)"
            )
    return Tensor(raw, kind, shape, start + begin)
