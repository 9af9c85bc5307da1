"""Aim: checkpoints and GGUF files are read right, in every layout they come in, or refused by name.

Method: the same weights in different containers give the same forward, and that of a GGUF equals the engine's own
float64 reference.
"""

import json

import numpy as np
import pytest

from common.engine.reference import ReferenceEngine
from common.errors import ModelError
from common.model.synthetic import ensure_preset
from device.coreml.convert.forward import Forward
from device.coreml.convert.rope import Rope
from device.coreml.convert.safetensors_file import open_tensors
from device.coreml.convert.source import open_model
from tests.device.coreml.convert.conftest import CONFIG, N_LAYER, tiny_tensors, write_checkpoint

TOKENS = np.array([2, 17, 300, 5, 5, 99, 12, 250])


def outcome(model, tokens=TOKENS):
    return list(Forward(model).residuals(tokens))[-1]


@pytest.fixture(scope="module")
def expected(tiny):
    return outcome(tiny)


def test_the_sizes_of_a_configuration(tiny):
    assert (tiny.n_layer, tiny.n_embd, tiny.n_head_kv, tiny.window, tiny.n_vocab) == (7, 64, 2, 64, 320)
    assert tiny.kinds == ("sliding",) * 5 + ("global", "sliding")
    assert tiny.ropes == {"sliding": Rope(1e4), "global": Rope(1e6, 8.0)}
    assert tiny.attention_scale == 40**-0.5
    assert tiny.tied


def test_a_norm_is_one_plus_what_is_stored(tiny):
    stored = tiny_tensors()["model.layers.3.self_attn.q_norm.weight"]
    assert np.array_equal(tiny.gain("3.q_norm"), 1 + stored.astype(np.float64))


@pytest.mark.parametrize("prefix", ["language_model.", "model.language_model."])
def test_multimodal_checkpoints_lose_their_vision_part_and_say_so(tmp_path, expected, prefix):
    tensors = {}
    for name, value in tiny_tensors().items():
        tensors[prefix + (name.removeprefix("model.") if prefix.startswith("model.") else name)] = value
    tensors["vision_tower.patch.weight"] = tensors["multi_modal_projector.w.weight"] = np.ones(
        (2, 2), np.float32
    )
    config = {"model_type": "gemma3", "text_config": CONFIG, "vision_config": {}, "image_token_index": 310}
    model = open_model(write_checkpoint(tmp_path / "m", tensors, config))
    assert np.array_equal(outcome(model), expected)
    assert model.n_vocab == 310
    assert "2 tensors" in model.notes[0]
    assert "310" in model.notes[1]


def test_newer_names_of_rotary_settings_and_layer_kinds(tmp_path, expected):
    config = {k: v for k, v in CONFIG.items() if not k.startswith("rope")}
    config["rope_parameters"] = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    }
    config["layer_types"] = ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    assert np.array_equal(outcome(open_model(write_checkpoint(tmp_path / "m", None, config))), expected)


def test_sharded_checkpoints(tmp_path, expected):
    tensors = tiny_tensors()
    names = sorted(tensors)
    for i in range(2):
        write_checkpoint(tmp_path / f"s{i}", {name: tensors[name] for name in names[i::2]})
        (tmp_path / f"s{i}" / "model.safetensors").rename(tmp_path / f"model-{i}.safetensors")
    index = {name: f"model-{i}.safetensors" for i in range(2) for name in names[i::2]}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert np.array_equal(outcome(open_model(tmp_path)), expected)


def test_a_gguf_is_read_as_the_engine_reads_it(tmp_path_factory):
    path = ensure_preset("tiny-sliding")
    model = open_model(path)
    assert model.ropes == {"sliding": Rope(1e4), "global": Rope(1e6, 8.0)}
    tokens = np.random.default_rng(0).integers(0, model.n_vocab, 70)
    reference = ReferenceEngine(path).span(0, model.n_layer).run(tokens, 0, "all")
    forward = Forward(model)
    logits = forward.logits(list(forward.residuals(tokens))[-1][-4:])
    assert np.abs(logits - reference[-4:]).max() < 1e-4 * np.abs(reference).max()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn' is not implemented"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"hidden_activation": "silu"}, "hidden_activation 'silu'"),
        ({"layer_types": ["sliding_attention"] * 6 + ["chunked_attention"]}, "'chunked_attention'"),
        ({"layer_types": ["sliding_attention"] * 3}, "3 entries for 7 layers"),
        ({"head_dim": 16}, "has shape"),
        ({"num_hidden_layers": N_LAYER + 1}, "is missing"),
        ({"vocab_size": 400}, "320 rows"),
        ({"attention_bias": True}, "attention_bias"),
    ],
)
def test_what_would_be_converted_wrongly_is_refused_by_name(tmp_path, change, complaint):
    folder = write_checkpoint(tmp_path / "m", None, CONFIG | change)
    with pytest.raises(ModelError, match=complaint):
        open_model(folder)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_files_of_the_safetensors_package_are_read(tmp_path, dtype):
    numpy_files = pytest.importorskip("safetensors.numpy")
    tensors = {name: np.random.default_rng(i).random((5, i + 1)).astype(dtype) for i, name in enumerate("ab")}
    numpy_files.save_file(tensors, tmp_path / "x.safetensors")
    found = open_tensors(tmp_path)
    for name, value in tensors.items():
        assert np.array_equal(found[name].rows(1, 4), value[1:4].astype(np.float32))


def test_damaged_files_are_refused(tmp_path):
    folder = write_checkpoint(tmp_path / "m")
    whole = (folder / "model.safetensors").read_bytes()
    for broken in (whole[:-100], whole[:4], b"\xff" * 64, whole[:8] + b"{" * 100):
        (folder / "model.safetensors").write_bytes(broken)
        with pytest.raises(ModelError):
            open_model(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no \.safetensors file"):
        open_model(folder)
    with pytest.raises(ModelError, match="neither a Hugging Face folder"):
        open_model(folder / "config.json")
