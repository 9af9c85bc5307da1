"""Weights: the tensors of a model file in the memory layout that suits the device.

`plain` leaves them where the file maps them (or copies them to a device that cannot map). `repack` copies the matrices
that the device multiplies faster rearranged; it asks the device about each. Knows no architecture: a matrix is what the
caller says it is. Used by engine.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Literal

from common.errors import EngineError
from common.ggml.backend import Backend, weight_layouts
from common.ggml.layouts import takes_matrix
from common.ggml.tensor import Arena, Tensor
from common.model.gguf import GgufFile

WeightLayout = Literal["repack", "plain"]
OUTPUT = "output"
"""Name under which the output matrix is found, also where the file ties it to the embedding."""


class Weights:
    """Every tensor of the file by its name, and `output`."""

    def __init__(
        self,
        file: GgufFile,
        backend: Backend,
        layout: WeightLayout,
        matrices: set[str],
        *,
        names: Collection[str],
        has_output: bool,
    ) -> None:
        """names: the tensors of the file to place; matrices: those that are only multiplied with rows."""
        if layout not in ("repack", "plain"):
            raise EngineError(f"weights is {layout!r}; allowed are repack and plain")
        self._file, self._backend = file, backend
        self._names, self._has_output = names, has_output
        self._tensors: dict[str, Tensor] = {}
        self._arenas: list[Arena] = []
        self.placement: Counter[str] = Counter()
        self.n_bytes_copied = 0
        layouts = weight_layouts(backend.device) if layout == "repack" else {}
        plan: dict[str, list[tuple[str, str]]] = {}
        for key, name in self._wanted():
            plan.setdefault(self._choose(layouts, name, key in matrices), []).append((key, name))
        for chosen, items in plan.items():
            self.placement[chosen or "plain"] += len(items)
            if chosen:
                self._copy(items, layouts[chosen])
            else:
                self._map(items)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def get(self, name: str) -> Tensor | None:
        """The tensor, or None when the file has none of that name."""
        return self._tensors.get(name)

    def _wanted(self) -> list[tuple[str, str]]:
        """(name here, name in the file) of every tensor to place; the tied output matrix is a tensor of its own."""
        names = [(name, name) for name in self._names if name != "output.weight"]
        candidates = ("output.weight", "token_embd.weight") if self._has_output else ()
        output = next((name for name in candidates if name in self._names), None)
        return [*names, (OUTPUT, output)] if output else names

    def _choose(self, layouts: dict[str, int], name: str, is_matrix: bool) -> str:
        info = self._file.tensor(name)
        if not is_matrix:
            return ""
        for layout, buffer_type in layouts.items():
            if takes_matrix(self._backend.device, buffer_type, info.type, info.shape):
                return layout
        return ""

    def _declare(self, arena: Arena, key: str, name: str) -> Tensor:
        info = self._file.tensor(name)
        tensor = self._tensors[key] = arena.tensor(info.type, *info.shape, name=key)
        return tensor

    def _copy(self, items: list[tuple[str, str]], buffer_type: int) -> None:
        arena = Arena(len(items))
        self._arenas.append(arena)
        tensors = [(self._declare(arena, key, name), name) for key, name in items]
        self.n_bytes_copied += arena.allocate(buffer_type, weights=True)
        for tensor, name in tensors:
            tensor.write(self._file.tensor_bytes(name))

    def _map(self, items: list[tuple[str, str]]) -> None:
        largest = max(self._file.tensor(name).n_bytes for _, name in items)
        buffer = self._backend.map_host_memory(self._file.bytes, largest)
        if not buffer:
            return self._copy(items, self._backend.buffer_type)
        arena = Arena(len(items))
        self._arenas.append(arena)
        arena.adopt(
            buffer, [(self._declare(arena, key, name), self._file.tensor(name).offset) for key, name in items]
        )
        return None

    def close(self) -> None:
        """Frees all copies and mappings. Calling it again does nothing."""
        for arena in self._arenas:
            arena.close()
        self._file.close()
