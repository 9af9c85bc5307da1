"""ModelSpec reads what a file says and refuses, by name, what the engine would run wrongly.

Small synthetic files are rewritten with one key or tensor changed; the message must name it. Fingerprints are compared
between whole files and their tails.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import ModelError
from common.ggml.header import TensorInfo
from common.model.geometry import Geometry
from common.model.gguf import GgufFile
from common.model.gguf_stream import GgufStream
from common.model.spec import ModelSpec
from common.model.split import write_tail
from common.model.synthetic import write_synthetic

HYBRID = Geometry(
    n_layer=8, n_embd=64, n_ff=64, n_head=2, n_head_kv=1, head_dim=32, state_dim=16, n_vocab=64, tied=False
)
F16 = 1


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("spec") / "hybrid.gguf"
    write_synthetic(HYBRID, path, storage="q8_0")
    return path


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("spec") / "dense.gguf"
    write_synthetic(replace(HYBRID, arch="llama"), path, storage="q8_0")
    return path


def rewritten(
    path: Path, keys: dict[str, Any] | None = None, without: str = "", extra: str = "", retyped: str = ""
) -> Path:
    """A copy with keys replaced (None removes), a tensor left out, added (f32 [4]), or stored as f16."""
    source, out = GgufFile(path), path.with_name("changed.gguf")
    metadata = {k: v for k, v in (source.header.metadata | (keys or {})).items() if v is not None}
    tensors: list[tuple[TensorInfo, np.ndarray]] = []
    for name, info in source.header.tensors.items():
        data = source.tensor_bytes(name)
        if name == retyped:
            info, data = replace(info, type=F16, n_bytes=info.n_bytes // 2), data[: info.n_bytes // 2]
        if name != without:
            tensors.append((info, data))
    if extra:
        tensors.append((TensorInfo(extra, 0, (4,), 0, 16), np.zeros(16, np.uint8)))
    with GgufStream(out, metadata.pop("general.architecture")) as file:
        for key, value in metadata.items():
            file.add_key(key, value)
        for info, _ in tensors:
            file.declare(info.name, info.shape[::-1], info.type, info.n_bytes)
        file.begin()
        for _, data in tensors:
            file.write(iter([data]))
    source.close()
    return out


def test_a_hybrid_says_the_kind_of_every_layer(hybrid: Path) -> None:
    spec = ModelSpec.read(hybrid)
    assert (spec.arch, spec.n_layer_full, spec.layers, spec.cycle) == ("qwen35", 8, range(8), 4)
    assert [spec.kind(layer) for layer in spec.layers] == (["recurrent"] * 3 + ["attention"]) * 2
    assert (spec.n_embd, spec.n_vocab, spec.n_embd_kv, spec.has_embedding, spec.has_output) == (
        64,
        64,
        32,
        True,
        True,
    )
    assert spec.recurrent is not None and spec.recurrent.d_inner == HYBRID.value_dim
    with pytest.raises(ModelError, match="layer 8 is not in this file"):
        spec.kind(8)


def test_recurrent_layers_named_by_the_file_override_the_interval(hybrid: Path, tmp_path: Path) -> None:
    tail = tmp_path / "tail.gguf"
    write_tail(hybrid, 5, tail)
    spec = ModelSpec.read(tail)
    assert (spec.layer_start, spec.layers, spec.n_layer_full) == (5, range(5, 8), 8)
    assert [spec.kind(layer) for layer in spec.layers] == ["recurrent", "recurrent", "attention"]
    assert spec.tensor_name(7, "attn_q.weight") == "blk.2.attn_q.weight"
    assert not spec.has_embedding and spec.has_output


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"general.architecture": "mamba"}, "architecture 'mamba'; supported: llama, qwen35"),
        ({"qwen35.embedding_length": None}, r"qwen35.embedding_length is None; it must be a number"),
        (
            {"qwen35.embedding_length": 1 << 30},
            "embedding_length is 1073741824; it must be a number from 1 to 32768",
        ),
        ({"qwen35.block_count": 9}, r"blk\.8\..* is missing"),
        ({"qwen35.block_count": 7}, r"tensor blk\.7\..* is not part of a supported qwen35 model"),
        ({"qwen35.attention.head_count": 3}, "has shape"),
        ({"qwen35.attention.head_count_kv": 2}, "has shape"),
        ({"qwen35.ssm.inner_size": 63}, "ssm sizes contradict each other"),
        ({"qwen35.rope.dimension_sections": [1]}, "dimension_sections is"),
        ({"qwen35.rope.scaling.type": "yarn"}, "'yarn'; supported: none, linear"),
        ({"qwen35.expert_count": 8}, "qwen35.expert_count = 8: not supported"),
        ({"qwen35.attention.recurrent_layers": [True] * 3}, "recurrent_layers names 3 layers of 8"),
        ({"split.n_layer_full": 10}, "a file must hold a whole model or its last layers"),
    ],
)
def test_what_cannot_be_run_is_refused_by_key(hybrid: Path, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        ModelSpec.read(rewritten(hybrid, keys))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"without": "blk.0.ssm_a"}, r"tensor blk\.0\.ssm_a is missing; a qwen35 model needs it"),
        ({"without": "blk.0.attn_qkv.weight"}, r"tensor blk\.0\.attn_qkv\.weight is missing"),
        ({"without": "output_norm.weight"}, r"tensor output_norm\.weight is missing"),
        (
            {"extra": "blk.3.attn_q.bias"},
            r"tensor blk\.3\.attn_q\.bias is not part of a supported qwen35 model",
        ),
        ({"retyped": "blk.0.attn_norm.weight"}, "has type f16; supported: f32"),
    ],
)
def test_what_cannot_be_run_is_refused_by_tensor(hybrid: Path, change: dict[str, str], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        ModelSpec.read(rewritten(hybrid, **change))


def test_a_tied_model_needs_no_output_matrix_of_its_own(hybrid: Path) -> None:
    spec = ModelSpec.read(rewritten(hybrid, without="output.weight"))
    assert spec.has_output and "output.weight" not in spec.tensors


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("model", ["hybrid", "dense"])
def test_a_tail_has_the_fingerprint_of_its_layers_in_the_whole(
    model: str, head: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path, tail = request.getfixturevalue(model), tmp_path / "tail.gguf"
    write_tail(path, 4, tail, head=head)
    whole, part = ModelSpec.read(path), ModelSpec.read(tail)
    assert part.has_output is head
    for layer in (4, 6):
        assert part.fingerprint_text(layer) == whole.fingerprint_text(layer)
    assert whole.fingerprint_text(4) != whole.fingerprint_text(5)
    assert whole.fingerprint_text(4, "q8_0") != whole.fingerprint_text(4, "f16")
    with pytest.raises(ModelError, match="layer 3 is not in this file"):
        part.fingerprint_text(3)


def test_a_fine_tune_of_the_same_shape_has_another_fingerprint(dense: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    write_synthetic(replace(HYBRID, arch="llama"), other, storage="q8_0", seed=1)
    ours, theirs = (ModelSpec.read(path).fingerprint_text(0).splitlines() for path in (dense, other))
    differing = [a for a, b in zip(ours, theirs, strict=True) if a != b]
    assert len(differing) == 8 * 9, "every tensor of every layer, and nothing of the shapes"


def test_other_rope_or_eps_is_another_fingerprint(dense: Path) -> None:
    text = ModelSpec.read(dense).fingerprint_text(0)
    for keys in ({"llama.rope.freq_base": 5000.0}, {"llama.attention.layer_norm_rms_epsilon": 0.5}):
        assert ModelSpec.read(rewritten(dense, keys)).fingerprint_text(0) != text
