"""Aim: the worker's tail file is cut once for each model and layer, and a changed model never gets an old tail.

Method: the tiny synthetic model, real files.
"""

from __future__ import annotations

import shutil

import pytest

from common.errors import ModelError
from common.model.geometry import preset
from common.model.spec import ModelSpec
from common.model.split import plan_split, write_tail
from common.model.synthetic import write_synthetic
from services.launch.start_check import check_model
from services.launch.tail import lowest_layer, tail_for


@pytest.fixture(scope="module")
def model(tmp_path_factory, smollm2):
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_synthetic(preset("tiny")[0], path, tokenizer=smollm2)
    return path


def test_it_is_cut_once_and_kept(model, tmp_path):
    first = tail_for(model, None, tmp_path)
    spec, tail = ModelSpec.read(model), ModelSpec.read(first)
    assert tail.layers.stop == spec.n_layer_full
    assert tail.layers.start > 0
    stamp = first.stat().st_mtime_ns
    assert tail_for(model, None, tmp_path) == first
    assert first.stat().st_mtime_ns == stamp


def test_the_file_begins_lower_when_memory_allows(smollm2):
    spec = ModelSpec.read(smollm2)
    plenty, little = lowest_layer(spec, 1 << 50), lowest_layer(spec, 0)
    assert 0 < plenty < little == plan_split(spec).layer and plenty % spec.cycle == 0


def test_another_layer_is_another_file(model, tmp_path):
    assert tail_for(model, 2, tmp_path) != tail_for(model, 4, tmp_path)


def test_a_changed_model_of_the_same_name_gets_its_own_tail(model, tmp_path, smollm2):
    other = tmp_path / model.name
    write_synthetic(preset("tiny")[0], other, tokenizer=smollm2, seed=1)
    assert tail_for(other, 4, tmp_path).name != tail_for(model, 4, tmp_path).name
    copy = tmp_path / "copy" / model.name
    copy.parent.mkdir()
    shutil.copy(model, copy)
    assert tail_for(copy, 4, tmp_path).name == tail_for(model, 4, tmp_path).name


def test_a_file_that_is_no_model_is_refused(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"not a model")
    with pytest.raises(ModelError):
        tail_for(path, None, tmp_path)
    assert not (tmp_path / "tails").exists()


def test_a_tail_is_not_served_as_a_model(tmp_path, model):
    tail = tmp_path / "tail.gguf"
    write_tail(model, 4, tail)
    check_model(model)
    with pytest.raises(ModelError, match=r"holds layers 4 to 7 of 8: it is a worker's tail"):
        check_model(tail)


def test_what_is_no_file_is_not_called_missing(tmp_path):
    with pytest.raises(ModelError, match="is not a file"):
        check_model(tmp_path)
    with pytest.raises(ModelError, match="there is no model file"):
        check_model(tmp_path / "absent")
