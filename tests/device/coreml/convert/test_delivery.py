"""Aim: what a push says has arrived has arrived, whole; what went wrong is named; an interrupted push goes on.

Method: real folders with a bundle's manifest over small random files; damage of each kind done between the steps.
"""

import json
import os

import numpy as np
import pytest

from common.errors import PackageError, SettingError
from device.coreml.convert import delivery
from device.coreml.convert.delivery import BLOCK_BYTES, PARTIAL, RECORD, check, contents, copy_file, push
from device.coreml.convert.manifest import Manifest, PartRecord, file_records, sha256

WEIGHTS = "part_01.mlpackage/Data/weights/weight.bin"


@pytest.fixture
def bundle(tmp_path):
    folder = tmp_path / "bundle"
    (folder / WEIGHTS).parent.mkdir(parents=True)
    (folder / WEIGHTS).write_bytes(np.random.default_rng(0).bytes(BLOCK_BYTES + 12_345))
    (folder / "meta.yaml").write_text("model_info:\n")
    manifest = Manifest({}, {})
    files = file_records(folder, [folder / "part_01.mlpackage"])
    manifest.parts.append(
        PartRecord("chunk", "part_01.mlpackage", "key", [0, 1], ["infer"], 1, 0.0, 0.1, files)
    )
    manifest.others = file_records(folder, [folder / "meta.yaml"])
    manifest.write(folder)
    return folder


def pushed(bundle, folder):
    told = []
    return push(bundle, folder, contents(bundle), lambda name, size: told.append(name)), told


def test_everything_arrives_and_is_kept_the_second_time(bundle, tmp_path):
    target = tmp_path / "disk" / "model"
    done, told = pushed(bundle, target)
    assert sorted(told) == sorted([WEIGHTS, "meta.yaml", "manifest.json"])
    assert (done.n_copied, done.n_kept) == (3, 0) and done.n_bytes > BLOCK_BYTES
    assert (target / WEIGHTS).read_bytes() == (bundle / WEIGHTS).read_bytes()
    assert check(target) == (3, [], [])
    done, told = pushed(bundle, target)
    assert (done.n_copied, done.n_kept, told) == (0, 3, [])


def test_damage_is_named_and_only_it_is_pushed_again(bundle, tmp_path):
    target = tmp_path / "disk"
    pushed(bundle, target)
    (target / WEIGHTS).write_bytes(b"")
    os.unlink(target / "meta.yaml")
    _, wrong, _ = check(target)
    assert sorted(wrong) == [
        "meta.yaml is missing",
        f"{WEIGHTS} is empty: 0 bytes, not {BLOCK_BYTES + 12_345}",
    ]
    done, _ = pushed(bundle, target)
    assert (done.n_copied, done.n_kept) == (2, 1) and check(target)[1] == []
    with (target / WEIGHTS).open("r+b") as file:
        file.write(b"\0\0\0\0")
    assert "another content" in check(target)[1][0]


@pytest.mark.parametrize("n_right", [0, 1000, BLOCK_BYTES, BLOCK_BYTES + 100])
@pytest.mark.parametrize("then", [b"", b"rubbish" * 1000])
def test_an_interrupted_copy_goes_on(bundle, tmp_path, n_right, then):
    source, target = bundle / WEIGHTS, tmp_path / "weight.bin"
    whole = source.read_bytes()
    target.with_name(target.name + PARTIAL).write_bytes(whole[:n_right] + then)
    copy_file(source, target, len(whole), sha256(source))
    assert target.read_bytes() == whole
    assert not list(tmp_path.glob(f"*{PARTIAL}"))


def test_what_arrives_otherwise_than_it_left_is_refused(bundle, tmp_path):
    """The source changes (or the disk lies) between hashing and copying: nothing of it keeps the name."""
    source, target = bundle / WEIGHTS, tmp_path / "weight.bin"
    size, digest = source.stat().st_size, sha256(source)
    source.write_bytes(b"")
    with pytest.raises(PackageError, match="arrived empty"):
        copy_file(source, target, size, digest)
    source.write_bytes(b"x" * size)
    with pytest.raises(PackageError, match="differs"):
        copy_file(source, target, size, digest)
    assert not target.exists() and not list(tmp_path.glob(f"*{PARTIAL}"))


def test_a_bundle_that_is_not_in_order_does_not_leave(bundle, tmp_path):
    (bundle / WEIGHTS).write_bytes(b"")
    (bundle / "tokenizer.json").touch()
    with pytest.raises(PackageError, match=r"has 0 bytes.*tokenizer\.json is empty"):
        contents(bundle)
    with pytest.raises(PackageError, match="cannot be read"):
        contents(tmp_path)


def test_compiled_models_go_instead_of_packages(bundle):
    assert WEIGHTS in contents(bundle)
    (bundle / "part_01.mlmodelc").mkdir()
    (bundle / "part_01.mlmodelc" / "model.mil").write_text("program")
    assert set(contents(bundle)) == {"part_01.mlmodelc/model.mil", "meta.yaml", "manifest.json"}
    assert WEIGHTS in contents(bundle, packages=True)


def test_what_does_not_fit_or_belong_is_told(bundle, tmp_path):
    with pytest.raises(SettingError, match="lies in the bundle"):
        push(bundle, bundle / "copy", contents(bundle), print)
    with pytest.raises(SettingError, match="MB free"):
        push(bundle, tmp_path / "disk", {"meta.yaml": [1 << 60, "0"]}, print)
    pushed(bundle, tmp_path / "disk")
    (tmp_path / "disk" / "old.mlpackage").touch()
    assert check(tmp_path / "disk")[2] == ["old.mlpackage"]


def test_a_bundle_as_it_was_made_is_checked_by_its_manifest(bundle):
    assert check(bundle) == (2, [], [])
    (bundle / RECORD).write_text(json.dumps({"format": delivery.FORMAT + 1, "files": {}}))
    with pytest.raises(PackageError, match="another version"):
        check(bundle)
    (bundle / RECORD).write_text("[]")
    with pytest.raises(PackageError, match="not a record"):
        check(bundle)
