"""Aim: every setting can be given by file, environment and flag, the later source wins, and a bad value says all of
key, value, range and source.

Method: the whole table of settings is run through each source; hypothesis draws values in and out of each range.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec import inspect

from common.config import find_file, load_settings, to_environ
from common.config.keys import KEYS, allowed_text, bare
from common.config.load import explain_settings
from common.errors import SettingError

NUMBERS = [key for key in KEYS.values() if isinstance(bare(key.type), inspect.IntType | inspect.FloatType)]


def value_of(settings, key):
    return getattr(getattr(settings, key.leaf), key.field)


def in_range(kind, value) -> bool:
    return (
        (kind.ge is None or value >= kind.ge)
        and (kind.gt is None or value > kind.gt)
        and (kind.le is None or value <= kind.le)
        and (kind.multiple_of is None or value % kind.multiple_of == 0)
    )


def test_nothing_given_is_a_working_tree():
    settings = load_settings(environ={})
    assert settings.gateway.http_port == 8080
    assert settings.host.n_threads >= 1
    assert settings.host.model.endswith(".gguf")
    assert settings.run_dir.is_absolute()
    assert settings.host.split_layer is None


def test_later_sources_win(tmp_path):
    file = tmp_path / "outrigger.toml"
    file.write_text("[gateway]\nhttp_port = 1\n[host]\nn_ctx = 1024\nn_threads = 3\n")
    environ = {"OUTRIGGER_HTTP_PORT": "2", "PATH": "/bin"}
    assert load_settings(file, {}).gateway.http_port == 1
    assert load_settings(file, environ).gateway.http_port == 2
    settings = load_settings(file, environ, {"http_port": 3, "n_ctx": None})
    assert (settings.gateway.http_port, settings.host.n_ctx, settings.host.n_threads) == (3, 1024, 3)


@given(
    st.sampled_from(NUMBERS), st.integers(-10, 70_000) | st.sampled_from([256, 512, 1024, 8192]), st.data()
)
def test_numbers_are_taken_in_their_range_and_refused_outside(key, value, data):
    source = data.draw(st.sampled_from(["environment", "flag"]))
    environ = {key.variable: str(value)} if source == "environment" else {}
    flags = {key.flat: value} if source == "flag" else {}
    if not in_range(bare(key.type), value):
        with pytest.raises(SettingError) as refused:
            load_settings(environ=environ, flags=flags)
        text = str(refused.value)
        assert all(part in text for part in (key.path, str(value), allowed_text(key.type), source))
        return
    try:
        assert value_of(load_settings(environ=environ, flags=flags), key) == value
    except SettingError as error:
        assert "give each a port of its own" in str(error)


@given(
    st.sampled_from(list(KEYS.values())), st.text(st.characters(blacklist_categories=("Cs",)), max_size=20)
)
def test_any_text_is_a_value_or_a_setting_error(key, text):
    assume("\0" not in text)
    try:
        load_settings(environ={key.variable: text})
    except SettingError as error:
        assert key.path in str(error)


@pytest.mark.parametrize("text", ["nan", "inf", "-inf"])
def test_numbers_must_be_finite(text):
    with pytest.raises(SettingError, match="worker_rest_s"):
        load_settings(environ={"OUTRIGGER_WORKER_REST_S": text})


def test_auto_asks_for_what_is_worked_out():
    settings = load_settings(environ={"OUTRIGGER_THREADS": "auto", "OUTRIGGER_SPLIT_LAYER": "auto"})
    assert settings == load_settings(environ={})


def test_unknown_names_are_refused_with_the_nearest_known(tmp_path):
    with pytest.raises(SettingError, match="OUTRIGGER_NCTX in the environment; did you mean OUTRIGGER_N_CTX"):
        load_settings(environ={"OUTRIGGER_NCTX": "512"})
    with pytest.raises(SettingError, match=r"http_prt; did you mean http_port"):
        load_settings(environ={}, flags={"http_prt": 1})
    file = tmp_path / "outrigger.toml"
    for text, near in (("[gateway]\nport = 1", "gateway.http_port"), ("n_ctx = 1", "host.n_ctx")):
        file.write_text(text)
        with pytest.raises(SettingError, match=rf"did you mean {near}\?"):
            load_settings(file, {})


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    file = tmp_path / "outrigger.toml"
    file.write_text("[gateway\n")
    with pytest.raises(SettingError, match=r"cannot read the settings file .*outrigger.toml"):
        load_settings(file, {})
    file.write_text("[host]\nmodel = [1, 2]\n")
    with pytest.raises(SettingError, match=r"host.model = \[1, 2\]"):
        load_settings(file, {})


def test_where_the_file_is_looked_for(tmp_path):
    assert find_file({}, tmp_path) is None
    (tmp_path / "outrigger.toml").touch()
    assert find_file({}, tmp_path) == tmp_path / "outrigger.toml"
    assert find_file({"OUTRIGGER_CONFIG": ""}, tmp_path) is None
    with pytest.raises(SettingError, match="OUTRIGGER_CONFIG: there is no file"):
        find_file({"OUTRIGGER_CONFIG": str(tmp_path / "absent.toml")}, tmp_path)


def test_a_child_process_gets_exactly_the_same_tree(tmp_path):
    settings = load_settings(environ={"OUTRIGGER_DATA_DIR": str(tmp_path), "OUTRIGGER_SPLIT_LAYER": "7"})
    environ = to_environ(settings)
    assert find_file(environ, tmp_path) is None
    assert load_settings(environ=environ) == settings


def test_one_port_is_not_given_twice():
    with pytest.raises(SettingError, match=r"metrics.mac_port and gateway.http_port are both 9571"):
        load_settings(environ={"OUTRIGGER_HTTP_PORT": "9571"})
    assert load_settings(environ={"OUTRIGGER_HTTP_PORT": "0", "OUTRIGGER_LISTEN_PORT": "0"})


def test_a_run_directory_is_short_and_its_own_for_each_data_folder(tmp_path):
    deep = tmp_path / ("x" * 150)
    runs = {load_settings(environ={"OUTRIGGER_DATA_DIR": str(folder)}).run_dir for folder in (deep, tmp_path)}
    assert len(runs) == 2
    assert all(len(str(run)) < 75 and str(os.getuid()) in str(run) for run in runs)


def test_the_tree_is_frozen():
    settings = load_settings(environ={})
    with pytest.raises(AttributeError):
        settings.gateway.http_port = 1
    assert isinstance(settings.host, msgspec.Struct)


def test_every_setting_is_explained_with_its_source(tmp_path):
    rows = explain_settings(None, {"OUTRIGGER_MODEL": "m.gguf"}, {"http_port": 0})
    assert [row.key.path for row in rows] == list(KEYS)
    sources = {row.key.path: row.source for row in rows}
    assert sources["host.model"] == "environment variable OUTRIGGER_MODEL"
    assert sources["gateway.http_port"] == "flag --http-port"
    assert sources["host.n_ctx"] == "default"
    values = {row.key.path: row.value for row in rows}
    assert values["host.model"] == str(Path.cwd() / "m.gguf")


def test_the_host_leaves_half_of_the_cores_to_a_worker_beside_it():
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert load_settings(environ={}).host.n_threads == max(1, cores // 2)
    assert load_settings(environ={"OUTRIGGER_SPLIT": "off"}).host.n_threads == cores
    assert load_settings(environ={"OUTRIGGER_WORKER_HOST": "169.254.1.1"}).host.n_threads == cores
    assert load_settings(environ={"OUTRIGGER_SPLIT": "off", "OUTRIGGER_THREADS": "1"}).host.n_threads == 1
