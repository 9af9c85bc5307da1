"""Models with sliding layers: what the header says of them, and that tail files keep saying it.

Headers of a small gemma3 with keys changed; tails cut inside cycles and on their boundaries, read by us and by stock
llama.cpp, which must both go on treating each layer as the kind it was.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import ModelError, SettingError
from common.ggml.header import read_header
from common.ggml.stock import StockContext, StockModel
from common.model.geometry import Geometry
from common.model.spec import ModelSpec
from common.model.spec_reader import SpecReader
from common.model.split import plan_split, write_tail
from common.model.synthetic import write_synthetic
from tests.common.model.stock_tail import our_logits, stock_logits

SMALL = Geometry(
    arch="gemma3", n_layer=8, n_embd=64, n_ff=96, n_head=4, n_head_kv=2, head_dim=32, n_vocab=100,
    interval=3, window=8, rope_freq_base=1e6, rope_linear_factor=4.0,
)  # fmt: skip
WINDOW, PATTERN = "gemma3.attention.sliding_window", "gemma3.attention.sliding_window_pattern"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sliding") / "model.gguf"
    write_synthetic(SMALL, path, storage="q8_0")
    return path


def changed(path: Path, keys: dict[str, Any]) -> ModelSpec:
    """The spec of the file as if its header said something else; None takes a key away."""
    header = read_header(path)
    metadata = {key: value for key, value in (header.metadata | keys).items() if value is not None}
    return SpecReader(replace(header, metadata=metadata)).spec()


def spoken(spec: ModelSpec) -> str:
    """One letter a layer."""
    return "".join(spec.kind(layer)[0] for layer in spec.layers)


def test_the_last_layer_of_a_cycle_looks_far_and_the_others_slide(model: Path) -> None:
    spec = ModelSpec.read(model)
    assert (spoken(spec), spec.cycle) == ("ssassass", 3)
    assert spec.sliding is not None and spec.sliding.window == 8
    assert (spec.rope_of(0).freq_base, spec.rope_of(0).freq_scale) == (10_000.0, 1.0)
    assert (spec.rope_of(2).freq_base, spec.rope_of(2).freq_scale) == (1e6, 0.25)
    assert spec.embedding_scale == 8.0


@pytest.mark.parametrize(
    ("keys", "kinds", "cycle"),
    [
        ({PATTERN: None}, "sssssass", 6),
        ({PATTERN: 0}, "ssssssss", 1),
        ({PATTERN: 1}, "aaaaaaaa", 1),
        ({WINDOW: None}, "aaaaaaaa", 1),
        ({WINDOW: 0}, "aaaaaaaa", 1),
        ({PATTERN: [True, False] * 4}, "sasasasa", 2),
        ({PATTERN: [1, 1, 1, 0, 1, 1, 1, 0]}, "sssasssa", 4),
        ({PATTERN: [True] * 5 + [False, True, False]}, "sssssasa", 8),
    ],
)
def test_the_pattern_is_a_number_or_a_flag_a_layer(
    model: Path, keys: dict[str, Any], kinds: str, cycle: int
) -> None:
    spec = changed(model, keys)
    assert (spoken(spec), spec.cycle) == (kinds, cycle)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"gemma3.rope.scaling.type": "yarn"}, r"rope\.scaling\.type is 'yarn'; supported: none, linear"),
        ({"gemma3.rope.scaling.attn_factor": 1.5}, r"rope\.scaling\.attn_factor is set"),
        ({"gemma3.final_logit_softcapping": 30.0}, r"final_logit_softcapping = 30\.0: not supported"),
        ({"gemma3.attn_logit_softcapping": 50.0}, r"attn_logit_softcapping = 50\.0: not supported"),
        ({"gemma3.attention.key_length_swa": 16}, "key_length_swa is 16, .*key_length is 32: supported if"),
        ({WINDOW: -1}, r"sliding_window is -1; it must be a number from 1 to"),
        ({PATTERN: [True] * 7}, "sliding_window_pattern names 7 layers of 8"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused_by_key(
    model: Path, keys: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelError, match=said):
        changed(model, keys)


def test_scaling_without_a_type_is_linear_and_none_is_none(model: Path) -> None:
    assert changed(model, {"gemma3.rope.scaling.type": None}).rope.freq_scale == 0.25
    assert changed(model, {"gemma3.rope.scaling.type": "none"}).rope.freq_scale == 1.0


def test_a_split_lies_on_a_boundary_of_the_pattern_unless_any_layer_is_asked_for(model: Path) -> None:
    spec = ModelSpec.read(model)
    assert plan_split(spec).layer == 6
    with pytest.raises(SettingError, match=r"allowed are 3, 6 \(boundaries of its cycle of 3 layers\)"):
        plan_split(spec, 4)


@pytest.mark.parametrize("layer", [1, 3, 5, 7])
def test_a_tail_keeps_the_kind_of_every_layer(model: Path, tmp_path: Path, layer: int) -> None:
    full = ModelSpec.read(model)
    for head in (True, False):
        write_tail(model, layer, tmp_path / "tail.gguf", head=head)
        spec = ModelSpec.read(tmp_path / "tail.gguf")
        assert (spec.layers, spec.cycle) == (range(layer, 8), 3)
        assert [spec.kind(at) for at in spec.layers] == [full.kind(at) for at in spec.layers]
        assert spec.fingerprint_text(layer) == full.fingerprint_text(layer)


def test_a_tail_of_a_tail_has_the_same_bytes(model: Path, tmp_path: Path) -> None:
    write_tail(model, 2, tmp_path / "two.gguf")
    write_tail(tmp_path / "two.gguf", 7, tmp_path / "seven.gguf")
    write_tail(model, 7, tmp_path / "straight.gguf")
    assert (tmp_path / "seven.gguf").read_bytes() == (tmp_path / "straight.gguf").read_bytes()


def test_a_tail_of_global_layers_says_nothing_of_windows(tmp_path: Path) -> None:
    """Stock aborts on a window without a sliding layer; both tails must still name their layers as the model does."""
    whole = tmp_path / "nine.gguf"
    write_synthetic(replace(SMALL, n_layer=9), whole, storage="q8_0")
    write_tail(whole, 8, tmp_path / "global.gguf")
    spec = ModelSpec.read(tmp_path / "global.gguf")
    assert (spoken(spec), spec.sliding, spec.cycle) == ("a", None, 3)
    assert spec.fingerprint_text(8) == ModelSpec.read(whole).fingerprint_text(8)
    model_of_stock = StockModel(tmp_path / "global.gguf", repack=False)
    StockContext(model_of_stock, n_ctx=256).close()
    model_of_stock.close()


def test_window_base_and_kinds_belong_to_what_two_sides_compare(model: Path) -> None:
    same = ModelSpec.read(model).fingerprint_text(3)
    for keys in ({WINDOW: 9}, {"gemma3.rope.freq_base_swa": 20_000.0}, {PATTERN: 4}):
        assert changed(model, keys).fingerprint_text(3) != same


@pytest.mark.parametrize("layer", [1, 2, 6, 7])
def test_stock_computes_with_a_tail_what_our_engine_does(model: Path, tmp_path: Path, layer: int) -> None:
    """Gemma scales the rows of its embedding by the root of their length, here 8."""
    out = tmp_path / "tail.gguf"
    write_tail(model, layer, out)
    assert np.array_equal(our_logits(out, layer, 8, scale=8.0), stock_logits(out))
