"""Aim: a page written from a template is byte for byte what coremltools would have built; failures leave nothing.

Method: whole packages compared file by file over several geometries, fresh and over an older page; damaged templates; a
disk that takes no large file (RLIMIT_FSIZE).
"""

import resource
import shutil

import numpy as np
import pytest

from common.errors import EngineError, PackageError
from device.coreml import blob
from device.coreml.geometry import PageGeometry
from device.coreml.page_rows import GGML_F16, PageConstants
from device.coreml.page_writer import write_page
from device.coreml.template import build_package, build_template, find_template, open_template

GEOMETRY = PageGeometry(2, 16, 32, 4, 512, 256)


def filled(geometry, n_keys, seed=0):
    rng = np.random.default_rng(seed)
    constants = PageConstants.allocate(geometry)
    k, v = (
        rng.standard_normal((n_keys, geometry.n_head_kv * dim)).astype(np.float16).view(np.uint8)
        for dim in (geometry.head_dim_k, geometry.head_dim_v)
    )
    constants.fill(k, v, GGML_F16)
    return constants


def files(package):
    return {p.relative_to(package): p.read_bytes() for p in sorted(package.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    return build_template(GEOMETRY, tmp_path_factory.mktemp("template"))


@pytest.mark.parametrize(
    "geometry", [GEOMETRY, PageGeometry(1, 8, 8, 1, 256), PageGeometry(3, 20, 12, 7, 1280)], ids=str
)
def test_a_written_page_equals_a_fresh_build(geometry, tmp_path):
    template = build_template(geometry, tmp_path)
    constants = filled(geometry, geometry.page_tokens - 37)
    written, built = tmp_path / "written.mlpackage", tmp_path / "built.mlpackage"
    write_page(template, constants, written)
    build_package(geometry, constants.by_name(), built)
    assert files(written) == files(built)
    assert len(blob.verify(written / template.weight_file)) == len(template.offsets)


def test_an_older_page_is_overwritten_in_place(template, tmp_path):
    old, new, fresh = (tmp_path / f"{name}.mlpackage" for name in ("old", "new", "fresh"))
    write_page(template, filled(GEOMETRY, 512, seed=1), old)
    inode = (old / template.weight_file).stat().st_ino
    write_page(template, filled(GEOMETRY, 300, seed=2), new, slot=old)
    write_page(template, filled(GEOMETRY, 300, seed=2), fresh)
    assert files(new) == files(fresh) and not old.exists()
    assert (new / template.weight_file).stat().st_ino == inode
    write_page(template, filled(GEOMETRY, 512, seed=1), new, slot=new)
    assert (new / template.weight_file).stat().st_ino == inode
    assert files(new) != files(fresh)


def test_templates_are_found_again_and_repaired(tmp_path):
    built = find_template(GEOMETRY, tmp_path)
    before = (built.path / "Manifest.json").stat().st_ino
    assert find_template(GEOMETRY, tmp_path) == built
    assert (built.path / "Manifest.json").stat().st_ino == before
    built.model_path.write_bytes(b"torn")
    assert find_template(GEOMETRY, tmp_path) == built
    assert sorted(p.name for p in tmp_path.iterdir()) == [built.path.name]


def test_a_page_is_opened_as_what_it_is(template, tmp_path):
    page = tmp_path / "layer 3.mlpackage"
    write_page(template, filled(GEOMETRY, 512), page)
    assert open_template(page).geometry == GEOMETRY


def test_other_programs_are_no_templates(mil, build):
    mb, types, opset = mil

    @mb.program(input_specs=[mb.TensorSpec((2,), types.fp16)], opset_version=opset)
    def program(x):
        return mb.add(x=x, y=x, name="y")

    with pytest.raises(PackageError, match="not a page program"):
        open_template(build(program))


def test_constants_of_another_geometry_are_refused(template, tmp_path):
    other = PageGeometry(2, 16, 16, 4, 512, 256)
    with pytest.raises(EngineError, match="do not fit a template"):
        write_page(template, filled(other, 10), tmp_path / "x.mlpackage")
    mixed = shutil.copytree(template.path, tmp_path / "mixed.mlpackage")
    model = mixed / template.model_path.relative_to(template.path)
    model.write_bytes(
        model.read_bytes().replace(GEOMETRY.name.encode(), other.name.replace("v16", "v16").encode())
    )
    with pytest.raises(
        PackageError, match=r"constant v_0_0 is \(32, 256, 1, 1\), a page of .* needs \(16, 256, 1, 1\)"
    ):
        open_template(mixed)


def test_a_full_disk_leaves_nothing_behind(template, tmp_path):
    page, constants = tmp_path / "page.mlpackage", filled(GEOMETRY, 512)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            write_page(template, constants, page)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []
