"""What a runtime of page programs must offer, and the two that run anywhere: the interpreter and ordinary kernels.

A runtime puts a page on disk in the form it loads, and loads it. Loading may take seconds or never end; whoever calls
guards against that (`load`). Nothing here decides. Called by FrozenPages, `device-check` and the benches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np

from common.errors import EngineError
from device.coreml import blob
from device.coreml.geometry import PageGeometry
from device.coreml.page_program import PagePartial, pack_queries, unpack_partials
from device.coreml.page_rows import PageConstants
from device.coreml.page_writer import write_page
from device.coreml.reference import Arithmetic, Program
from device.coreml.template import Template
from device.coreml.threads import one_blas_thread


class LoadedPage(Protocol):
    """A page program in memory, asked by one thread at a time."""

    placement: str
    """Where it runs: neural engine, gpu, cpu, interpreter, kernels."""

    def ask(self, queries: np.ndarray, centre: np.ndarray | None = None) -> PagePartial:
        """Partial attention of scaled queries f32 [n_head_kv, n <= n_rows, head_dim_k]; see pack_queries."""
        ...

    def close(self) -> None:
        """Give its memory back; asking it again is an error."""
        ...


class PageRuntime(Protocol):
    """Something that runs page programs."""

    engine: str
    """Its name in metrics: coreml, interpreter, kernels."""
    placement: str
    """Where its pages must run to be worth using."""
    suffix: str
    """Of the folders it loads."""

    def write(self, template: Template, constants: PageConstants, path: Path, slot: Path | None) -> None:
        """Put a page on disk at `path`, over the older page `slot` where one is free."""
        ...

    def load(self, template: Template, path: Path) -> LoadedPage:
        """Load a written page. Raises PageLoadError with its cause."""
        ...

    def clean(self, path: Path, since_unix_s: float) -> None:
        """Remove what a failed load of `path`, begun at `since_unix_s`, left outside the page itself."""
        ...


class _PackageRuntime:
    """Shared by the runtimes that load .mlpackage folders as they are."""

    suffix = ".mlpackage"

    def write(self, template: Template, constants: PageConstants, path: Path, slot: Path | None) -> None:
        write_page(template, constants, path, slot)

    def clean(self, path: Path, since_unix_s: float) -> None:
        """Nothing is left behind: no compiler and no cache is involved."""


class InterpreterRuntime(_PackageRuntime):
    """Runs pages as the reference interpreter does, under one assumption about the hardware."""

    engine = placement = "interpreter"

    def __init__(self, arithmetic: Arithmetic | None = None) -> None:
        self.arithmetic = arithmetic or Arithmetic()

    def load(self, template: Template, path: Path) -> LoadedPage:
        return InterpreterPage(template.geometry, Program.load(path, self.arithmetic))


class InterpreterPage:
    placement = "interpreter"

    def __init__(self, geometry: PageGeometry, program: Program) -> None:
        self.geometry, self.program = geometry, program

    def ask(self, queries: np.ndarray, centre: np.ndarray | None = None) -> PagePartial:
        outputs = self.program.predict({"queries": pack_queries(self.geometry, queries, centre)})
        return unpack_partials(self.geometry, outputs, queries.shape[1], centre)

    def close(self) -> None:
        self.program.package.weights.close()


class KernelRuntime(_PackageRuntime):
    """Ordinary kernels over the same constants in fp32: the fallback, and the check of a freshly loaded page."""

    engine = placement = "kernels"

    def load(self, template: Template, path: Path) -> LoadedPage:
        weights = blob.WeightFile(path / template.weight_file)
        constants = {
            name: weights.array(offset, shape)
            for (name, shape), offset in zip(template.geometry.constants(), template.offsets, strict=True)
        }
        return KernelPage(template.geometry, constants, weights)


class KernelPage:
    """Attention over a page's constants, chunk by chunk, in fp32 from fp16 storage."""

    placement = "kernels"

    def __init__(
        self, geometry: PageGeometry, constants: dict[str, np.ndarray], weights: blob.WeightFile | None = None
    ) -> None:
        self.geometry, self.constants, self._weights = geometry, constants, weights

    def ask(self, queries: np.ndarray, centre: np.ndarray | None = None) -> PagePartial:
        g = self.geometry
        if queries.ndim != 3 or (queries.shape[0], queries.shape[2]) != (g.n_head_kv, g.head_dim_k):
            raise EngineError(f"queries of shape {queries.shape} do not fit a page of {g}")
        with one_blas_thread():
            heads = [self._head(head, queries[head].astype(np.float32)) for head in range(g.n_head_kv)]
        m, l, o = (np.stack(parts) for parts in zip(*heads, strict=True))  # noqa: E741
        return PagePartial(m, l, o)

    def _head(self, head: int, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(m [n], l [n], o [n, head_dim_v]) of one KV head, one maximum for the whole page."""
        g = self.geometry
        scores = [
            queries @ self.constants[f"k_{head}_{chunk}"][:, :-1, 0, 0].astype(np.float32).T
            + self.constants[f"bias_{chunk}"].astype(np.float32)
            for chunk in range(g.n_chunks)
        ]
        m = np.max([s.max(axis=1) for s in scores], axis=0)
        l, o = np.zeros_like(m), np.zeros((len(queries), g.head_dim_v), np.float32)  # noqa: E741
        for chunk, s in enumerate(scores):
            e = np.exp(s - m[:, None])
            l += e.sum(axis=1)  # noqa: E741
            o += e @ self.constants[f"v_{head}_{chunk}"][:, :, 0, 0].astype(np.float32).T
        return m, l, o

    def close(self) -> None:
        self.constants = {}
        if self._weights is not None:
            self._weights.close()
