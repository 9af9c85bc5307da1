"""Aim: a bundle on disk is whole, resumable, and honest about its sizes; impossible options are refused before work.

Method: conversions of the tiny checkpoint into a folder, repeated after damage and with other options; meta.yaml is
read as an app would read it.
"""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import yaml

from common.errors import ModelError, SettingError
from device.coreml.convert.convert import Watch, convert
from device.coreml.convert.manifest import Manifest, wrong_files
from device.coreml.convert.options import ConvertOptions, plan_parts
from device.coreml.convert.palette import Lut
from device.coreml.convert.source import open_model
from tests.device.coreml.convert.conftest import CONFIG, tiny_tensors, write_checkpoint

OPTIONS = ConvertOptions(64, 16, 2, Lut(8), Lut(4, 8), Lut(6, 4))


def run(model, folder, options=OPTIONS):
    """(packages that were made, packages that were kept)"""
    made, kept, begun = [], [], []

    def part(part, record):
        if record is None:
            begun.append(part.package)
        else:
            (made if part.package in begun else kept).append(part.package)

    convert(model, folder, options, Watch(part=part))
    return made, kept


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundle")
    assert len(run(tiny, folder)[0]) == 4
    return folder


@pytest.fixture
def folder(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "bundle")
    return tmp_path / "bundle"


def test_a_finished_part_is_not_made_again(tiny, folder):
    made, kept = run(tiny, folder)
    assert made == []
    assert sorted(kept) == sorted(p.name for p in folder.glob("*.mlpackage"))


def test_a_damaged_part_is_made_again_and_equals_the_first(tiny, folder, finished):
    damaged = folder / "gemma3_lm_head_lut6.mlpackage/Data/com.apple.CoreML/weights/weight.bin"
    raw = bytearray(damaged.read_bytes())
    raw[len(raw) // 2] ^= 1
    damaged.write_bytes(raw)
    assert run(tiny, folder)[0] == ["gemma3_lm_head_lut6.mlpackage"]
    assert Manifest.read(folder).parts[-1].files == Manifest.read(finished).parts[-1].files


def test_an_interrupted_conversion_goes_on(tiny, tmp_path):
    convert(tiny, tmp_path, OPTIONS, only=2)
    made, kept = run(tiny, tmp_path)
    assert len(made) == 2
    assert len(kept) == 2


def test_other_options_make_only_what_they_touch(tiny, folder):
    made, kept = run(tiny, folder, replace(OPTIONS, lut_layers=None))
    assert made == ["gemma3_FFN_PF_chunk_01of02.mlpackage", "gemma3_FFN_PF_chunk_02of02.mlpackage"]
    assert kept == ["gemma3_embeddings_lut8.mlpackage", "gemma3_lm_head_lut6.mlpackage"]
    assert len(list(folder.glob("*.mlpackage"))) == 4


def test_meta_yaml_says_what_an_app_asks(finished):
    meta = yaml.safe_load((finished / "meta.yaml").read_text())["model_info"]
    assert meta["version"] == "0.3.5"
    assert meta["parameters"] == {
        "context_length": 64, "batch_size": 16, "lut_embeddings": 8, "lut_ffn": 4, "lut_ffn_per_channel": 8,
        "lut_lmhead": 6, "lut_lmhead_per_channel": 4, "num_chunks": 2, "model_prefix": "gemma3",
        "embeddings": "gemma3_embeddings_lut8.mlmodelc", "lm_head": "gemma3_lm_head_lut6.mlmodelc",
        "ffn": "gemma3_FFN_PF_lut4_chunk_01of02.mlmodelc", "split_lm_head": 1, "vocab_size": 320,
        "lm_head_chunk_sizes": [320], "sliding_window": 64, "update_mask_prefill": True,
        "prefill_dynamic_slice": False,
    }  # fmt: skip


def test_the_manifest_finds_what_a_copy_lost(finished, folder):
    manifest = Manifest.read(folder)
    assert wrong_files(manifest.others, folder) == []
    assert {"meta.yaml", "README.md", "finish-on-mac.sh"} <= set(manifest.others)
    (folder / "meta.yaml").write_bytes(b"")
    assert "has 0 bytes" in wrong_files(manifest.others, folder)[0]
    (folder / "README.md").unlink()
    assert any("README.md is missing" in line for line in wrong_files(manifest.others, folder))


def test_planned_sizes_are_those_of_the_files(tiny, finished):
    for part, record in zip(plan_parts(tiny, OPTIONS), Manifest.read(finished).parts, strict=True):
        weights = next(size for name, (size, _) in record.files.items() if name.endswith("weight.bin"))
        assert part.estimated_bytes <= weights < part.estimated_bytes * 1.3 + 60_000


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (ConvertOptions(100, 16), "multiples of 32"),
        (ConvertOptions(96, 16), "use 64 or 128"),
        (ConvertOptions(64, 65), "--batch 65"),
        (ConvertOptions(8192, 16), "made for 4096 tokens"),
        (ConvertOptions(64, 16, 8), "--chunks 8"),
        (ConvertOptions(64, 16, lut_layers=Lut(4, 24)), "groups of 24 do not divide"),
        (ConvertOptions(64, 16, lut_embeddings=Lut(4, 7)), "--lut-embeddings"),
        (ConvertOptions(64, 16, lut_head=Lut(4, 7)), "--lut-head"),
    ],
)
def test_impossible_options_are_refused(tiny, options, complaint):
    with pytest.raises(SettingError, match=complaint):
        plan_parts(tiny, options)


def test_weights_beyond_fp16_are_an_error_and_leave_no_package(tmp_path):
    tensors = tiny_tensors()
    tensors["model.layers.6.mlp.up_proj.weight"][3, 3] = 2.0**20
    model = open_model(write_checkpoint(tmp_path / "m", tensors))
    with pytest.raises(ModelError, match=r"6\.up has a weight of magnitude 1\.04858e\+06"):
        convert(model, tmp_path / "out", OPTIONS)
    assert sorted(p.name for p in (tmp_path / "out").glob("*.mlpackage")) == [
        "gemma3_FFN_PF_lut4_chunk_01of02.mlpackage",
        "gemma3_embeddings_lut8.mlpackage",
    ]


def test_a_vocabulary_larger_than_a_convolution_is_split(tmp_path):
    config = CONFIG | {"vocab_size": 16_384 + 96, "num_hidden_layers": 1}
    tensors = {k: v for k, v in tiny_tensors().items() if "layers" not in k or "layers.0." in k}
    rows = np.random.default_rng(0).standard_normal((16_480, 64)).astype(np.float32)
    tensors["model.embed_tokens.weight"] = rows
    model = open_model(write_checkpoint(tmp_path / "m", tensors, config))
    convert(model, tmp_path / "out", ConvertOptions(32, 8, 1, None, None, None))
    from device.coreml.convert.conversation import Conversation

    x = np.random.default_rng(1).standard_normal((2, 64)).astype(np.float16)
    logits = Conversation(tmp_path / "out").logits(x)
    expected = x.astype(np.float64) @ model.rows("embed").astype(np.float64).T
    assert logits.shape == (2, 16_480)
    assert np.abs(logits - expected).max() < 0.05
