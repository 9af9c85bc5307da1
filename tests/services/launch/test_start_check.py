"""Aim: what can be known to be wrong is told before any process starts.

Method: settings as a person gives them and real model files in, one sentence out; `outrigger run` itself for flags.
"""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from common.config import load_settings
from common.errors import ModelError, OutriggerError, SettingError
from services.cli.run import command
from services.launch.start_check import NO_TEMPLATE, check_start


@pytest.fixture
def checked(smollm2, tmp_path):
    def check(**flags):
        return check_start(
            load_settings(environ={}, flags={"model": str(smollm2), "run_dir": tmp_path} | flags)
        )

    return check


@pytest.mark.model
def test_a_good_start_has_nothing_to_tell(checked):
    assert checked() == ()
    assert checked(http_host="0.0.0.0", api_key="k", http_port=0) == ()


@pytest.mark.model
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"http_host": "0.0.0.0"}, "OUTRIGGER_HTTP_HOST = '0.0.0.0' .* set OUTRIGGER_API_KEY"),
        ({"http_host": "192.168.1.5"}, "set OUTRIGGER_API_KEY"),
        ({"http_host": "::"}, "set OUTRIGGER_API_KEY"),
        ({"zmq_host": "0.0.0.0"}, "needs CURVE keys"),
        (
            {"listen_host": "0.0.0.0"},
            r"worker.host = '0.0.0.0' \(OUTRIGGER_LISTEN_HOST\).*OUTRIGGER_HTTP_HOST",
        ),
        ({"listen_host": "0.0.0.0", "api_key": "k"}, "OUTRIGGER_LISTEN_HOST"),
        ({"split_decode": "on", "split": "off"}, "without a worker the host has no last layers"),
        ({"chat_template": "/nowhere/t.jinja"}, r"cannot read /nowhere/t.jinja.*OUTRIGGER_CHAT_TEMPLATE"),
    ],
)
def test_an_open_door_or_a_missing_file_is_refused(checked, flags, said):
    with pytest.raises(SettingError, match=said):
        checked(**flags)


@pytest.mark.model
@pytest.mark.parametrize(
    ("text", "error"), [("", "is empty"), (" \n", "is empty"), ("{% for %}", "cannot be compiled")]
)
def test_a_template_that_cannot_be_used_is_refused(checked, tmp_path, text, error):
    file = tmp_path / "t.jinja"
    file.write_text(text)
    with pytest.raises(OutriggerError, match=error):
        checked(chat_template=str(file))


@pytest.mark.model
def test_a_context_longer_than_the_training_is_told(checked):
    assert checked(n_ctx=8192) == ()
    (note,) = checked(n_ctx=16384)
    assert "--n-ctx 16384 is more than the 8192 tokens that the model was trained for" in note


def test_a_model_without_a_template_is_told(checked, tmp_path):
    from common.model.geometry import preset
    from common.model.synthetic import write_synthetic

    geometry, storage = preset("tiny")
    bare = tmp_path / "bare.gguf"
    write_synthetic(geometry, bare, storage=storage)
    assert checked(model=str(bare)) == (NO_TEMPLATE,)


def test_missing_models_are_told_by_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIGGER_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("OUTRIGGER_CONFIG", "")
    for name, error, said in [
        ("", SettingError, "--model '' names no file"),
        (str(tmp_path / "absent.gguf"), ModelError, "there is no model file"),
        (str(tmp_path), ModelError, "is not a file"),
    ]:
        ended = CliRunner().invoke(command, ["--model", name])
        assert isinstance(ended.exception, error) and said in str(ended.exception)
    assert not list(tmp_path.glob("*.log"))
