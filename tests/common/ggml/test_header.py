"""GGUF headers are read as an independent reader reads them, and damage is a ModelError whatever was damaged."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ModelError
from common.ggml.header import StringArray, read_header


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("header") / "some.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("some.number", 7)
    writer.add_float32("some.fraction", 0.5)
    writer.add_bool("some.flag", True)
    writer.add_string("some.text", "grün")
    writer.add_array("some.numbers", [3, 1, 2])
    writer.add_array("some.flags", [True, False, True])
    writer.add_array("some.words", ["a", "bc", ""])
    writer.add_tensor("a.weight", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("b.weight", np.ones((2, 1, 32), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_keeps_values_and_types(file: Path) -> None:
    meta = read_header(file).metadata
    assert meta["some.number"] == 7 and meta["some.fraction"] == 0.5 and meta["some.flag"] is True
    assert meta["some.text"] == "grün" and meta["some.numbers"] == [3, 1, 2]
    assert meta["some.flags"] == [True, False, True]
    assert meta["some.words"] == StringArray(3)
    assert read_header(file, strings=True).metadata["some.words"] == ["a", "bc", ""]


def test_tensors_lie_where_an_independent_reader_finds_them(file: Path) -> None:
    header = read_header(file)
    reader = gguf.GGUFReader(file)
    assert list(header.tensors) == [t.name for t in reader.tensors]
    raw = file.read_bytes()
    for theirs in reader.tensors:
        ours = header.tensors[theirs.name]
        assert (ours.type, ours.n_bytes) == (int(theirs.tensor_type), int(theirs.n_bytes))
        assert raw[ours.offset : ours.offset + ours.n_bytes] == theirs.data.tobytes()
    assert header.tensors["a.weight"].shape == (4, 3)
    assert header.tensors["b.weight"].shape == (32, 1, 2)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not a GGUF file"),
        (b"GGUF", "truncated: a GGUF file has more than 4 bytes"),
        (b"PK\x03\x04" + bytes(100), "not a GGUF file"),
        (b"GGUF" + (9).to_bytes(4, "little") + bytes(16), "version 9; supported: 2, 3"),
        (b"GGUF" + (3).to_bytes(4, "little") + b"\xff" * 8 + bytes(8), "claims -1 tensors"),
        (
            b"GGUF" + (3).to_bytes(4, "little") + bytes(8) + (1 << 40).to_bytes(8, "little"),
            "1099511627776 keys",
        ),
    ],
)
def test_other_files_are_refused_by_what_they_are(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=said):
        read_header(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere\.gguf: cannot be read"):
        read_header(tmp_path / "nowhere.gguf")


@given(keep=st.floats(0, 1, exclude_max=True))
def test_every_truncation_is_noticed(
    file: Path, tmp_path_factory: pytest.TempPathFactory, keep: float
) -> None:
    raw = file.read_bytes()
    path = tmp_path_factory.getbasetemp() / "short.gguf"
    path.write_bytes(raw[: int(keep * len(raw))])
    with pytest.raises(ModelError):
        read_header(path)


@given(where=st.floats(0, 1, exclude_max=True), wide=st.booleans(), value=st.integers(0, 2**64 - 1))
def test_damaged_numbers_never_end_the_process(
    file: Path, tmp_path_factory: pytest.TempPathFactory, where: float, wide: bool, value: int
) -> None:
    """One number anywhere in the header replaced: either it is still a header, or it is a ModelError."""
    raw = bytearray(file.read_bytes())
    size = 8 if wide else 1
    at = int(where * (read_header(file).data_offset - size))
    raw[at : at + size] = value.to_bytes(8, "little")[:size]
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(raw)
    try:
        header = read_header(path)
    except ModelError:
        return
    assert all(t.offset + t.n_bytes <= len(raw) for t in header.tensors.values())
