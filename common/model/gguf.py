"""A GGUF file opened for reading: header checked, tensor bytes mapped, nothing copied.

Knows neither architectures nor devices. Used by spec.py (fingerprints), split.py and common/engine/weights.py.
"""

from __future__ import annotations

import contextlib
import mmap
from pathlib import Path

import numpy as np

from common.errors import ModelError
from common.ggml.header import GgufHeader, TensorInfo, read_header


class GgufFile:
    """One mapped file. Close it after everything that refers to its memory is gone."""

    def __init__(self, path: str | Path) -> None:
        self.header: GgufHeader = read_header(path)
        with self.header.path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.bytes = np.frombuffer(self._map, np.uint8)

    def tensor(self, name: str) -> TensorInfo:
        """Place of one tensor. Raises ModelError when the file has none of that name."""
        info = self.header.tensors.get(name)
        if info is None:
            raise ModelError(f"{self.header.path}: tensor {name} is missing")
        return info

    def tensor_bytes(self, name: str) -> np.ndarray:
        """u8 [n_bytes], a read-only view on the mapping."""
        info = self.tensor(name)
        return self.bytes[info.offset : info.offset + info.n_bytes]

    def close(self) -> None:
        """Gives the mapping back as soon as nothing refers to it any more."""
        self.bytes = np.empty(0, np.uint8)
        with contextlib.suppress(
            BufferError
        ):  # somebody still holds a view: the mapping goes with the last one
            self._map.close()
