"""Aim: a route is only ever reachable by its user on this machine, or by holders of pinned keys.

Method: real directories with wrong owners, modes and lengths; addresses of each kind.
"""

from __future__ import annotations

import os

import pytest

from common.errors import SettingError
from common.wire.routes import LIFE
from services.runtime.endpoints import SOCKET_PATH_BYTES_MAX, check_endpoint, is_loopback, route_endpoint


@pytest.mark.parametrize(
    ("endpoint", "answer"),
    [
        ("tcp://127.0.0.1:5570", True),
        ("tcp://127.8.9.1:5570", True),
        ("tcp://[::1]:5570", True),
        ("tcp://localhost:5570", True),
        ("tcp://0.0.0.0:5570", False),
        ("tcp://*:5570", False),
        ("tcp://192.0.2.7:5570", False),
        ("tcp://localhost.example:5570", False),
    ],
)
def test_what_counts_as_loopback(endpoint, answer):
    assert is_loopback(endpoint) is answer


def test_a_private_directory_is_taken(run_dir):
    check_endpoint(route_endpoint(run_dir, LIFE), has_keys=False)


def test_a_directory_others_may_enter_is_refused(run_dir):
    os.chmod(run_dir, 0o750)
    with pytest.raises(SettingError, match=r"mode 0750 .* chmod 700"):
        check_endpoint(route_endpoint(run_dir, LIFE), has_keys=False)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_somebody_else_is_refused(run_dir):
    os.chown(run_dir, 12345, -1)
    with pytest.raises(SettingError, match="belongs to user 12345"):
        check_endpoint(route_endpoint(run_dir, LIFE), has_keys=False)


def test_a_link_is_refused(run_dir):
    (run_dir / "real").mkdir(mode=0o700)
    (run_dir / "link").symlink_to(run_dir / "real")
    with pytest.raises(SettingError, match="links are refused"):
        check_endpoint(f"ipc://{run_dir}/link/life.sock", has_keys=False)


def test_a_path_longer_than_a_socket_allows_is_named_with_its_length(run_dir):
    room = SOCKET_PATH_BYTES_MAX - len("/life.sock")
    fits = run_dir / ("x" * (room - len(str(run_dir)) - 1))
    assert route_endpoint(fits, LIFE).endswith("/life.sock")
    with pytest.raises(
        SettingError, match=rf"{SOCKET_PATH_BYTES_MAX + 1} bytes .* allows {SOCKET_PATH_BYTES_MAX}"
    ):
        route_endpoint(fits.with_name(fits.name + "x"), LIFE)


@pytest.mark.parametrize("endpoint", ["ipc://@name", "ipc://life.sock", "inproc://x", "udp://1.2.3.4:5", ""])
def test_other_kinds_of_address_are_refused(endpoint):
    with pytest.raises(SettingError, match="endpoint"):
        check_endpoint(endpoint, has_keys=True)
