"""`outrigger pages` and `outrigger device-check` as they are typed: what they say, write and refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from common.errors import PackageError, SettingError
from services.cli.device_check import command as device_check
from services.cli.pages import command as pages

pytest.importorskip(
    "coremltools", reason="needs the extra: pip install 'outrigger[coreml]'", exc_type=ImportError
)

SMALL = ["--heads", "2", "--head-dim", "32", "--rows", "4", "--page-tokens", "512"]
NAME = "page-h2-k32-v32-r4-t512-c512"


def run(command, *arguments: object) -> str:
    result = CliRunner().invoke(command, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    out = run(pages, "build", folder, "--sample", *SMALL)
    assert "512 keys x 2 heads x 32/32, 4 rows" in out and "a page of random keys" in out
    assert sorted(p.name for p in folder.iterdir()) == [f"{NAME}.mlpackage", f"sample-{NAME}.mlpackage"]
    return folder


def test_inspect(built: Path) -> None:
    text = run(pages, "inspect", built / f"{NAME}.mlpackage")
    assert "takes queries: float16 [1 x 66 x 1 x 4]" in text and "outrigger.page" in text
    view = json.loads(run(pages, "inspect", "--json", built / f"{NAME}.mlpackage"))
    assert view["functions"][0]["operations"]["conv"] == 4


def test_verify(built: Path) -> None:
    text = run(pages, "verify", "--json", "--in-order", built / f"sample-{NAME}.mlpackage")
    assert "512 of 512 keys" in text and "within bounds" in text
    result = json.loads(text.splitlines()[-1])
    assert result["passed"] == 1 and len(result["findings"]) == 6


def test_verify_refuses_what_is_no_page(built: Path) -> None:
    error = CliRunner().invoke(pages, ["verify", str(built / f"{NAME}.mlpackage")]).exception
    assert isinstance(error, PackageError) and "a template without keys" in str(error)


def test_accuracy() -> None:
    arguments = ["--heads", "1", "--head-dim", "32", "--rows", "2", "--page-tokens", "256"]
    text = run(pages, "accuracy", "--json", *arguments)
    results = json.loads(text.splitlines()[-1])["results"]
    assert len(results) == 7 * 6 and {r["arithmetic"].split(",")[0] for r in results} == {
        "fp32",
        "block64",
        "in-order",
    }


@pytest.mark.model
def test_build_for_a_model(smollm2: Path, tmp_path: Path) -> None:
    out = run(pages, "build", tmp_path, "--model", smollm2, "--page-tokens", "256")
    assert "256 keys x 3 heads x 64/64, 24 rows" in out


def test_bad_numbers_are_refused(tmp_path: Path) -> None:
    error = CliRunner().invoke(pages, ["build", str(tmp_path), "--page-tokens", "1000"]).exception
    assert isinstance(error, SettingError) and "use a multiple of 256" in str(error)


def test_device_check(tmp_path: Path) -> None:
    result = CliRunner().invoke(device_check, SMALL, catch_exceptions=False)
    report = json.loads(result.stdout)
    assert report["geometry"] == NAME and "available" in report["core_ml"]
    out = run(device_check, *SMALL, "--export", tmp_path / "sample")
    assert [Path(line).name for line in out.splitlines()] == [
        "sample.mlpackage",
        "queries.f16",
        "answers.f32",
        "sample.json",
    ]
