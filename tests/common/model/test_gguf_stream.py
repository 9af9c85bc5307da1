"""Files written as streams, read back by libggml's reader; and what is left behind when writing goes wrong: nothing."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from common.errors import ModelError
from common.ggml.header import read_header
from common.ggml.quantize import storage_type
from common.model.gguf import GgufFile
from common.model.gguf_stream import GgufStream

F32 = storage_type("f32")


def test_what_is_written_is_read(tmp_path: Path) -> None:
    out = tmp_path / "a.gguf"
    first, second = np.arange(10, dtype=np.float32).reshape(2, 5), np.arange(3, dtype=np.float32)
    seen: list[tuple[int, int]] = []
    keys = {"x.flag": True, "x.count": 7, "x.big": 1 << 40, "x.part": 0.5, "x.word": "ü", "x.sizes": [1, -2]}
    with GgufStream(out, "llama", lambda *at: seen.append(at)) as file:
        for key, value in keys.items():
            file.add_key(key, value)
        file.declare("first", first.shape, F32, first.nbytes)
        file.declare("second", second.shape, F32, second.nbytes)
        file.begin()
        file.write([first[:1].data, first[1:].data])
        file.write([second.data])
    header = read_header(out)
    assert keys.items() <= header.metadata.items()
    assert header.metadata["general.architecture"] == "llama"
    assert header.tensors["first"].shape == (5, 2)  # ggml's order, innermost first
    opened = GgufFile(out)
    assert opened.tensor_bytes("first").tobytes() == first.tobytes()
    assert opened.tensor_bytes("second").tobytes() == second.tobytes()
    opened.close()
    assert seen == [(20, 52), (40, 52), (52, 52)]
    assert [path.name for path in tmp_path.iterdir()] == ["a.gguf"]


def test_the_old_file_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    out = tmp_path / "a.gguf"
    out.write_text("old")

    def broken() -> None:
        with GgufStream(out, "llama") as file:
            file.declare("t", (4,), F32, 16)
            file.begin()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken()
    assert out.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.gguf"]


def test_too_few_bytes_and_too_few_tensors_are_noticed(tmp_path: Path) -> None:
    out = tmp_path / "a.gguf"
    with (
        pytest.raises(ModelError, match="tensor t was given 8 bytes, 16 were declared"),
        GgufStream(out, "llama") as file,
    ):
        file.declare("t", (4,), F32, 16)
        file.begin()
        file.write([bytes(8)])
    with (
        pytest.raises(ModelError, match="0 of 1 declared tensors were written"),
        GgufStream(out, "llama") as file,
    ):
        file.declare("t", (4,), F32, 16)
        file.begin()
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    with (
        pytest.raises(ModelError, match=r"164 MiB needed .* 1 MiB free"),
        GgufStream(tmp_path / "a", "llama") as file,
    ):
        file.declare("t", (100 << 18,), F32, 100 << 20)
        file.begin()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(ModelError, match="no/such does not exist"),
        GgufStream(tmp_path / "no/such/a", "llama") as file,
    ):
        file.begin()
