"""`outrigger convert`, `bundle` and `device-check --bundle` as they are typed: what they say, write and refuse."""

import json

import pytest
from click.testing import CliRunner

from common.errors import SettingError
from common.model.synthetic import ensure_preset
from services.cli.bundle import command as bundle
from services.cli.convert import command as convert
from services.cli.device_check import command as device_check

SMALL = ("--context", 64, "--batch", 16)


def run(command, *arguments, code=0):
    done = CliRunner().invoke(command, [str(each) for each in arguments])
    assert done.exit_code == code, done.output or done.exception
    return done.stdout


@pytest.fixture(scope="module")
def model():
    pytest.importorskip("coremltools", exc_type=ImportError)
    return ensure_preset("tiny-sliding")


@pytest.fixture(scope="module")
def made(model, tmp_path_factory):
    """(folder, what was said)"""
    folder = tmp_path_factory.mktemp("bundle")
    options = ("--lut-embeddings", "4", "--lut-head", "4", "--lut-layers", "4,8")
    return folder, run(convert, model, folder, *SMALL, *options, "--json")


def test_a_conversion_tells_what_it_made(made):
    folder, text = made
    assert "10 sliding layers: rotary base 10,000" in text
    assert "2 global layers: rotary base 1,000,000, positions divided by 8" in text
    assert "instead of" in text
    assert "largest activation" in text
    figures = json.loads(text.splitlines()[-1])
    assert figures["findings"] == 0
    sizes = {part["package"]: part["bytes"] for part in figures["parts"]}
    assert set(sizes) == {path.name for path in folder.glob("*.mlpackage")}
    assert all(0 < part["error"] < 0.2 for part in figures["parts"])


def test_a_second_run_keeps_everything(made, model):
    folder, _ = made
    options = ("--lut-embeddings", "4", "--lut-head", "4", "--lut-layers", "4,8", "--fp16-scale", "1")
    assert run(convert, model, folder, *SMALL, *options).count("kept from before") == 3


def test_a_dry_run_writes_nothing(model, tmp_path):
    text = run(convert, model, tmp_path / "x", "--dry-run", "--fp16-scale", 1)
    assert "gemma3_lm_head_lut6" in text
    assert not (tmp_path / "x").exists()


def test_a_bundle_is_checked_and_a_damaged_one_fails(made):
    folder, _ = made
    done = CliRunner().invoke(
        device_check, ["--bundle", str(folder), "--prompt-tokens", "5", "--tokens", "2"]
    )
    assert done.exit_code == 0, done.output or done.exception
    found = json.loads(done.stdout)
    assert found["wrong_files"] == [] and len(found["interpreter"]["tokens"]) == 2
    assert "5 tokens), 2 tokens" in done.stderr
    meta = (folder / "meta.yaml").read_bytes()
    (folder / "meta.yaml").write_bytes(b"")
    found = json.loads(run(device_check, "--bundle", folder, code=1))
    (folder / "meta.yaml").write_bytes(meta)
    assert "meta.yaml has 0 bytes" in found["wrong_files"][0]


def test_lint_and_prove(made, model):
    folder, _ = made
    assert json.loads(run(bundle, "lint", folder, "--json").splitlines()[-1])["errors"] == 0
    text = run(bundle, "prove", folder, model, "--tokens", 40, "--single", 3, "--logits", 4, "--json")
    proof = json.loads(text.splitlines()[-1])
    assert proof["n_tokens"] == 40
    assert proof["prefill_vs_infer"] < 0.02
    (folder / "meta.yaml").write_bytes(b"")
    assert "meta.yaml has 0 bytes" in run(bundle, "lint", folder, code=1)


def test_bad_options_are_refused_by_name(model, tmp_path):
    for option, value in (
        ("--lut-head", "5"),
        ("--fp16-scale", "0.3"),
        ("--context", "100"),
        ("--batch", "0"),
    ):
        done = CliRunner().invoke(convert, [str(model), str(tmp_path), option, value])
        assert isinstance(done.exception, SettingError)
        assert option.removeprefix("--").split("-")[-1] in str(done.exception)
