"""Tiny models of both architectures, their tails, an engine over each and a running worker, made once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from common.engine.engine import Engine
from common.model.geometry import Geometry
from common.model.split import write_tail
from common.model.synthetic import write_synthetic

from .worker_process import worker_process

N_CTX = 1024
SMALL = dict(n_embd=64, n_ff=96, n_head=2, n_head_kv=1, head_dim=32, n_vocab=512)


@dataclass(frozen=True)
class Case:
    """A whole model, its tail from layer `first` on, and the whole model's engine: the one that is right."""

    whole: Path
    tail: Path
    first: int
    engine: Engine

    @property
    def spec(self):
        return self.engine.spec

    @property
    def span(self):
        """The tail's layers, computed here; emptied."""
        self.engine.span(0, self.spec.n_layer_full).truncate(0)
        return self.engine.span(self.first, self.spec.n_layer_full)

    def residual(self, n_tokens: int, seed: int = 0) -> np.ndarray:
        """Some residual, f32 [n_tokens, n_embd]."""
        return np.random.default_rng(seed).standard_normal((n_tokens, self.spec.n_embd), np.float32)


@pytest.fixture(scope="session")
def cases(tmp_path_factory):
    """Case by architecture."""
    folder = tmp_path_factory.mktemp("worker-models")
    geometries = {"llama": (Geometry(arch="llama", n_layer=3, **SMALL), 1)}
    geometries["qwen35"] = (Geometry(n_layer=8, state_dim=32, **SMALL), 4)
    found = {}
    for arch, (geometry, first) in geometries.items():
        whole, tail = folder / f"{arch}.gguf", folder / f"{arch}-tail.gguf"
        write_synthetic(geometry, whole, storage="q8_0")
        write_tail(whole, first, tail, head=True)
        found[arch] = Case(whole, tail, first, Engine.load(whole, n_ctx=N_CTX, n_threads=1))
    yield found
    for case in found.values():
        case.engine.close()


@pytest.fixture(params=["llama", "qwen35"])
def case(request, cases):
    return cases[request.param]


@pytest.fixture(scope="session")
def workers(cases):
    """A running worker by architecture, shared by tests that leave it alive."""
    with (
        worker_process(cases["llama"].tail, n_ctx=N_CTX) as llama,
        worker_process(cases["qwen35"].tail, n_ctx=N_CTX) as qwen35,
    ):
        yield {"llama": llama, "qwen35": qwen35}


@pytest.fixture
def worker(case, workers):
    """The shared worker that serves `case`."""
    return workers[case.spec.arch]
