"""Aim: weight files are read, verified, patched and written exactly, and no damaged file is accepted.

Method: round trips over random blobs; both directions against coremltools' own reader and writer; every truncation of a
small file and every damaged field refused with a message that names the fault.
"""

import os
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import BlobError
from device.coreml import blob, blob_format
from device.coreml.blob import Blob, BlobType

arrays = st.builds(
    lambda n, dtype, seed: np.random.default_rng(seed).integers(0, 100, n).astype(dtype),
    st.integers(1, 300),
    st.sampled_from(["<f2", "<f4", "u1", "i1", "<i2", "<u2", "<i4", "<u4"]),
    st.integers(0, 1000),
)


@pytest.fixture(scope="module")
def storage():
    return pytest.importorskip("coremltools.libmilstoragepython")


@pytest.fixture
def sample(tmp_path):
    """A file of three blobs: f16 [5], packed u4 [7], f32 [3]."""
    path = tmp_path / "weight.bin"
    half = np.arange(5, dtype=np.float16)
    small = np.arange(7, dtype=np.uint8)
    offsets = blob.write(
        path, [Blob.of(half), Blob.packed(small, BlobType.UINT4), Blob.of(np.ones(3, np.float32))]
    )
    return path, offsets, half, small


@given(st.lists(arrays, max_size=6))
def test_what_is_written_is_read_back(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("blob") / "weight.bin"
    offsets = blob.write(path, [Blob.of(a) for a in values])
    assert [entry.offset for entry in blob.verify(path)] == offsets
    with blob.WeightFile(path) as file:
        for offset, array in zip(offsets, values, strict=True):
            assert file.array(offset).dtype == array.dtype
            np.testing.assert_array_equal(file.array(offset, array.shape), array)


@pytest.mark.parametrize("name", ["UINT1", "UINT2", "UINT3", "UINT4", "UINT6"])
@given(n=st.integers(1, 100), seed=st.integers(0, 100))
def test_small_integers_survive_packing(name, n, seed):
    bits = BlobType[name].bits
    values = np.random.default_rng(seed).integers(0, 1 << bits, n)
    packed = Blob.packed(values, BlobType[name])
    assert len(packed.data) == -(-n * bits // 8)
    np.testing.assert_array_equal(
        blob_format.unpack_bits(np.frombuffer(packed.data, np.uint8), bits, n), values
    )


def test_coremltools_reads_our_files(storage, sample):
    path, offsets, half, small = sample
    reader = storage._BlobStorageReader(str(path))
    np.testing.assert_array_equal(np.asarray(reader.read_fp16_data(offsets[0])).view(np.float16), half)
    np.testing.assert_array_equal(np.asarray(reader.read_uint4_data(offsets[1])), small)
    np.testing.assert_array_equal(np.asarray(reader.read_float_data(offsets[2])), np.ones(3, np.float32))


def test_our_files_equal_coremltools_files(storage, sample, tmp_path):
    path, offsets, half, small = sample
    writer = storage._BlobStorageWriter(str(tmp_path / "theirs.bin"))
    theirs = [
        writer.write_fp16_data(half.view(np.uint16)),
        writer.write_uint4_data(small),
        writer.write_float_data(np.ones(3, np.float32)),
    ]
    del writer
    assert theirs == offsets
    assert (tmp_path / "theirs.bin").read_bytes() == path.read_bytes()


def test_patch_changes_one_blob_only(sample):
    path, offsets, half, _ = sample
    before = path.read_bytes()
    blob.patch(path, {offsets[0]: Blob.of(half + np.float16(1))})
    after = path.read_bytes()
    changed = [i for i in range(len(before)) if before[i] != after[i]]
    assert changed and offsets[0] + 64 <= min(changed) and max(changed) < offsets[0] + 64 + half.nbytes


def test_patch_checks_everything_before_it_writes(sample):
    path, offsets, half, _ = sample
    before = path.read_bytes()
    with pytest.raises(BlobError, match="blob 2 is FLOAT32 of 12 bytes, the patch is FLOAT16 of 10"):
        blob.patch(path, {offsets[0]: Blob.of(half * 2), offsets[2]: Blob.of(half)})
    with pytest.raises(BlobError, match="no blob has its metadata at byte 7"):
        blob.patch(path, {7: Blob.of(half)})
    assert path.read_bytes() == before


def test_every_truncation_is_refused(sample, tmp_path):
    path, *_ = sample
    whole = path.read_bytes()
    cut = tmp_path / "cut.bin"
    cut.write_bytes(whole)
    for n in reversed(range(len(whole))):
        os.truncate(cut, n)
        with pytest.raises(BlobError, match=r"truncated|a weight file has 64 to"):
            blob.read_entries(cut)


@pytest.mark.parametrize(
    ("at", "value", "complaint"),
    [
        (4, struct.pack("<I", 1), "blob storage version 1"),
        (0, struct.pack("<I", 1 << 20), "claims 1048576 blobs"),
        (0, struct.pack("<I", 2), "follow the last of 2 blobs"),
        (64, b"\0", "sentinel"),
        (68, struct.pack("<I", 99), "element type 99 is unknown"),
        (72, struct.pack("<Q", 1 << 50), "are no whole number"),
        (72, struct.pack("<Q", 9), "are no whole number"),
        (72, struct.pack("<Q", 10_000), "truncated"),
        (80, struct.pack("<Q", 192), "data at byte 192, expected 128"),
        (88, struct.pack("<Q", 8), "less 8 bits"),
    ],
)
def test_damaged_fields_are_named(sample, at, value, complaint):
    path, *_ = sample
    raw = bytearray(path.read_bytes())
    raw[at : at + len(value)] = value
    path.write_bytes(raw)
    with pytest.raises(BlobError, match=complaint):
        blob.read_entries(path)


def test_torn_padding_is_found_by_verify(sample):
    path, offsets, half, _ = sample
    raw = bytearray(path.read_bytes())
    raw[offsets[0] + 64 + half.nbytes + 3] = 1
    path.write_bytes(raw)
    with pytest.raises(BlobError, match=r"bytes after blob 0 .* are not zero"):
        blob.verify(path)


def test_wrong_use_is_refused(sample, tmp_path):
    path, offsets, *_ = sample
    with pytest.raises(BlobError, match="float64 have no blob type"):
        Blob.of(np.zeros(3))
    with pytest.raises(BlobError, match="not C-contiguous"):
        Blob.of(np.zeros((4, 4), np.float16).T)
    with pytest.raises(BlobError, match=r"values 0\.\.16 do not fit 4 bits"):
        Blob.packed(np.arange(17), BlobType.UINT4)
    with blob.WeightFile(path) as file, pytest.raises(BlobError, match="holds 5 elements"):
        file.array(offsets[0], (2, 3))
    with pytest.raises(BlobError, match="cannot be read"):
        blob.read_entries(tmp_path / "absent.bin")


def test_an_array_outlives_its_file(sample):
    path, offsets, half, _ = sample
    with blob.WeightFile(path) as file:
        view = file.array(offsets[0])
    np.testing.assert_array_equal(view, half)
    assert not view.flags.writeable
