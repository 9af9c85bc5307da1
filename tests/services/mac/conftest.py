"""Tiny models of both architectures, and engines over them, made once for all tests of the mac process.

The hybrid decodes by pages, small ones, the dense model as stock does: what reads, splits and turns promise holds with
both.
"""

from __future__ import annotations

import pytest

from common.engine.engine import Decoding, Engine
from common.model.geometry import Geometry
from common.model.synthetic import write_synthetic

N_CTX = 2560
GEOMETRIES = {
    "llama": Geometry(
        arch="llama", n_layer=3, n_embd=64, n_ff=96, n_head=2, n_head_kv=1, head_dim=32, n_vocab=512
    ),
    "qwen35": Geometry(
        n_layer=8, n_embd=64, n_ff=96, n_head=2, n_head_kv=1, head_dim=32, state_dim=32, n_vocab=512
    ),
}
SPLIT_LAYERS = {"llama": 2, "qwen35": 4}
DECODINGS = {"llama": Decoding("fused"), "qwen35": Decoding("paged", page_tokens=192, group_pages=2)}


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory):
    """Path by architecture; no tokenizer, 512 token ids."""
    folder = tmp_path_factory.mktemp("models")
    paths = {}
    for arch, geometry in GEOMETRIES.items():
        paths[arch] = folder / f"{arch}.gguf"
        write_synthetic(geometry, paths[arch], storage="q8_0")
    return paths


@pytest.fixture(scope="session")
def new_engine(tiny_models):
    """new_engine(arch) -> Engine; all are closed at the end of the session."""
    engines = []

    def make(arch):
        load = dict(n_ctx=N_CTX, n_threads=1, device="cpu", decoding=DECODINGS[arch])
        engines.append(Engine.load(tiny_models[arch], **load))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
