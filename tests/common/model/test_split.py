"""Where models are cut, and what tail files hold: exactly the layers, the head and the keys they should.

Small models with their tails, read back tensor by tensor; stock llama.cpp loads a tail and computes what our engine
computes with it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from common.errors import ModelError, SettingError
from common.ggml.header import read_header
from common.model.geometry import Geometry
from common.model.gguf import GgufFile
from common.model.spec import ModelSpec
from common.model.split import plan_split, write_tail
from common.model.synthetic import write_synthetic
from tests.common.model.stock_tail import our_logits, stock_logits

SMALL = Geometry(n_layer=8, n_embd=64, n_ff=96, n_head=4, n_head_kv=2, head_dim=32, n_vocab=100, state_dim=32)


@pytest.fixture(params=["tied", "untied"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    write_synthetic(replace(SMALL, tied=request.param == "tied"), path, storage="q8_0")
    return path


def spec_of(tmp_path: Path, **changes: object) -> ModelSpec:
    path = tmp_path / "planned.gguf"
    write_synthetic(replace(SMALL, n_embd=32, n_ff=32, **changes), path, storage="f32")
    return ModelSpec.read(path)


def tensors_of(path: Path) -> dict[str, bytes]:
    file = GgufFile(path)
    tensors = {name: file.tensor_bytes(name).tobytes() for name in file.header.tensors}
    file.close()
    return tensors


@pytest.mark.parametrize(
    ("arch", "n_layer", "layer"), [("qwen35", 32, 20), ("qwen35", 8, 4), ("llama", 30, 19), ("llama", 2, 1)]
)
def test_the_default_is_the_cycle_boundary_nearest_to_five_eighths(
    tmp_path: Path, arch: str, n_layer: int, layer: int
) -> None:
    plan = plan_split(spec_of(tmp_path, arch=arch, n_layer=n_layer))
    assert plan.layer == layer
    assert plan.on_boundary
    assert [*plan.head, *plan.tail] == list(range(n_layer))


def test_a_wished_layer_must_lie_on_a_boundary_unless_any_is_allowed(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, n_layer=12)
    assert plan_split(spec, 4).layer == 4
    assert not plan_split(spec, 5, any_layer=True).on_boundary
    with pytest.raises(
        SettingError, match=r"at layer 5: allowed are 4, 8 \(boundaries of its cycle of 4 layers\)"
    ):
        plan_split(spec, 5)
    for layer in (0, 12, -1):
        with pytest.raises(SettingError, match=f"at layer {layer}: allowed are 1 to 11"):
            plan_split(spec, layer, any_layer=True)


def test_a_model_of_one_cycle_is_cut_inside_it_or_not_at_all(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, n_layer=4)
    with pytest.raises(SettingError, match="4 layers in cycles of 4; inside a cycle it can be cut at 1 to 3"):
        plan_split(spec)
    assert plan_split(spec, any_layer=True).layer == 2
    with pytest.raises(SettingError, match="cannot be split: it has 1 layers"):
        plan_split(spec_of(tmp_path, n_layer=1, arch="llama"), any_layer=True)


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("layer", [1, 4, 7])
def test_a_tail_holds_its_layers_and_what_the_output_needs(
    model: Path, tmp_path: Path, layer: int, head: bool
) -> None:
    out = tmp_path / "tail.gguf"
    write_tail(model, layer, out, head=head)
    whole, tail = tensors_of(model), tensors_of(out)
    wanted = {
        f"blk.{int(name.split('.')[1]) - layer}.{name.split('.', 2)[2]}": data
        for name, data in whole.items()
        if name.startswith("blk.") and int(name.split(".")[1]) >= layer
    }
    if head:
        wanted["output_norm.weight"] = whole["output_norm.weight"]
        wanted["token_embd.weight"] = whole.get("output.weight", whole["token_embd.weight"])
    assert tail == wanted

    metadata = read_header(out).metadata
    assert metadata["split.layer_start"] == layer
    assert metadata["split.n_layer_full"] == 8
    assert metadata["split.no_head"] == int(not head)
    assert metadata["qwen35.block_count"] == 8 - layer
    assert metadata["qwen35.attention.recurrent_layers"] == [(at + 1) % 4 != 0 for at in range(layer, 8)]
    spec, full = ModelSpec.read(out), ModelSpec.read(model)
    assert spec.layers == range(layer, 8)
    assert [spec.kind(at) for at in spec.layers] == [full.kind(at) for at in spec.layers]
    assert (spec.has_output, spec.has_embedding, spec.n_vocab) == (head, False, 100)


def test_a_tail_of_a_tail_is_numbered_as_in_the_whole_model(model: Path, tmp_path: Path) -> None:
    write_tail(model, 3, tmp_path / "three.gguf")
    write_tail(tmp_path / "three.gguf", 5, tmp_path / "five.gguf")
    write_tail(model, 5, tmp_path / "straight.gguf")
    assert (tmp_path / "five.gguf").read_bytes() == (tmp_path / "straight.gguf").read_bytes()
    with pytest.raises(SettingError, match="at layer 3: allowed are 4 to 7"):
        write_tail(tmp_path / "three.gguf", 3, tmp_path / "again.gguf")


def test_both_ends_name_their_common_layers_alike(model: Path, tmp_path: Path) -> None:
    """The handshake compares these texts: one from the whole file, one from a tail with or without its head."""
    write_tail(model, 4, tmp_path / "tail.gguf")
    write_tail(model, 4, tmp_path / "headless.gguf", head=False)
    wanted = ModelSpec.read(model).fingerprint_text(5)
    for name in ("tail.gguf", "headless.gguf"):
        assert ModelSpec.read(tmp_path / name).fingerprint_text(5) == wanted


def test_stock_computes_with_a_tail_what_our_engine_does(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "tail.gguf"
    write_tail(model, 5, out)
    assert np.array_equal(our_logits(out, 5, 8), stock_logits(out))


def test_the_tokenizer_stays_behind(smollm2: Path, tmp_path: Path) -> None:
    out = tmp_path / "tail.gguf"
    seen: list[tuple[int, int]] = []
    write_tail(smollm2, 28, out, head=False, progress=lambda *at: seen.append(at))
    metadata = read_header(out).metadata
    assert [key for key in metadata if key.startswith("tokenizer.")] == ["tokenizer.ggml.model"]
    assert metadata["llama.vocab_size"] == 49152
    assert ModelSpec.read(out).n_vocab == 49152
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1]


def test_what_cannot_be_written_is_refused_and_leaves_nothing(model: Path, tmp_path: Path) -> None:
    before = model.read_bytes()
    with pytest.raises(ModelError, match="the tail cannot replace the model it is cut from"):
        write_tail(model, 4, tmp_path / "." / "model.gguf")
    write_tail(model, 4, tmp_path / "headless.gguf", head=False)
    with pytest.raises(
        ModelError, match=r"has no output head to copy; write its tail without one \(--no-head\)"
    ):
        write_tail(tmp_path / "headless.gguf", 6, tmp_path / "tail.gguf")
    with pytest.raises(ModelError, match="cannot be read"):
        write_tail(tmp_path / "absent.gguf", 4, tmp_path / "tail.gguf")
    assert model.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["headless.gguf", "model.gguf"]
