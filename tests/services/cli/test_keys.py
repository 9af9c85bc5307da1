"""Aim: `outrigger keys new` makes pairs that only their owner can read, and that the settings take.

Method: the command as a process; the files are read back by what reads them in the product, and used over a socket in
tests/services/gateway/test_public_door.py.
"""

from __future__ import annotations

import stat

import pytest

from common.config import ZmqSettings
from common.errors import SettingError
from services.gateway.public_endpoints import keys_of, plan_endpoints
from services.runtime.bus import public_key_of
from services.runtime.key_files import read_key
from tests.services.cli.test_main import outrigger


def test_a_pair_is_made_for_its_owner_alone_and_never_over_another(tmp_path):
    folder = tmp_path / "keys"
    assert outrigger("keys", "new", "gateway", "--folder", str(folder)).returncode == 0
    secret, public = folder / "gateway.secret", folder / "gateway.public"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, secret, public)] == [0o700, 0o600, 0o600]
    assert public_key_of(read_key(str(secret), "--x")) == read_key(str(public), "--x")
    before = secret.read_bytes()
    again = outrigger("keys", "new", "gateway", "--folder", str(folder))
    assert again.returncode == 2 and "is there already" in again.stderr
    assert secret.read_bytes() == before
    assert outrigger("keys", "new", "../gateway", "--folder", str(folder)).returncode == 2


def test_the_settings_take_the_files(tmp_path):
    for name in ("gateway", "laptop"):
        assert outrigger("keys", "new", name, "--folder", str(tmp_path)).returncode == 0
    clients = tmp_path / "clients"
    clients.write_text(
        f"# who may come in\n\n{(tmp_path / 'laptop.public').read_text().strip()}  the laptop\n"
    )
    settings = ZmqSettings(
        host="0.0.0.0", secret_file=str(tmp_path / "gateway.secret"), clients_file=str(clients)
    )
    keys = keys_of(settings)
    assert keys.pinned == {read_key(str(tmp_path / "laptop.public"), "--x")}
    assert "tcp://0.0.0.0:5570" in plan_endpoints(settings, tmp_path, has_api_key=False).ask


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"host": "0.0.0.0"}, "needs CURVE keys"),
        ({"host": "0.0.0.0", "secret_file": "here"}, "OUTRIGGER_ZMQ_CLIENTS_FILE is not set"),
        ({"clients_file": "here"}, "OUTRIGGER_ZMQ_SECRET_FILE is not set"),
        ({"secret_file": "absent", "clients_file": "absent"}, "cannot be read"),
    ],
)
def test_what_the_settings_do_not_take(tmp_path, settings, words):
    with pytest.raises(SettingError, match=words):
        plan_endpoints(ZmqSettings(**settings), tmp_path, has_api_key=False)


def test_a_file_of_something_else_is_no_key(tmp_path):
    path = tmp_path / "key"
    for text, words in (("hello\n", "40 characters"), ("", "0 keys"), ("x" * 40, "1 keys|40 characters")):
        path.write_text(text)
        try:
            key = read_key(str(path), "--secret-file")
        except SettingError as error:
            assert "--secret-file" in str(error) and any(word in str(error) for word in words.split("|"))
        else:
            assert key == b"x" * 40, "whatever has the form of a key is one"


def test_an_api_key_without_curve_keys_closes_tcp(tmp_path):
    where = plan_endpoints(ZmqSettings(), tmp_path, has_api_key=True)
    assert all(endpoint.startswith("ipc://") for endpoint in where.ask + where.events)
