"""Who may connect: loopback and link-local only, and never more connections at once than there are places.

The rule itself is a pure function over addresses; that strangers are closed at once is tried with a real socket from
this machine's own outward address, where it has one.
"""

from __future__ import annotations

import socket
import time

import pytest

from common.errors import ServiceError
from common.limits import WORKER_CLIENTS_MAX
from common.wire.cable_peers import may_connect
from device.facts import thermal_of
from device.link_server import LinkServer, listen


@pytest.mark.parametrize(
    ("address", "allowed"),
    [
        ("127.0.0.1", True),
        ("127.8.9.10", True),
        ("169.254.10.20", True),
        ("::1", True),
        ("fe80::1%en5", True),
        ("::ffff:127.0.0.1", True),
        ("::ffff:169.254.0.9", True),
        ("10.0.0.1", False),
        ("192.168.1.5", False),
        ("172.20.10.1", False),
        ("8.8.8.8", False),
        ("0.0.0.0", False),
        ("::ffff:8.8.8.8", False),
        ("2001:db8::1", False),
        ("fd00::1", False),
        ("", False),
        ("localhost", False),
    ],
)
def test_addresses(address, allowed):
    assert may_connect(address) is allowed


class NoWork:
    """A compute thread for connections that never greet."""

    def submit(self, work):
        raise AssertionError(f"nobody greeted, and yet {work}")

    def release(self, client):
        pass


@pytest.fixture
def server():
    server = LinkServer(listen("0.0.0.0", 0), NoWork(), window=2)
    server.start()
    yield server
    server.stop()


def outward_address() -> str | None:
    """An address of this machine that is neither loopback nor link-local; no packet is sent to find it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        address = probe.getsockname()[0]
    return None if may_connect(address) else address


def test_a_stranger_is_closed_at_once(server):
    address = outward_address()
    if address is None:
        pytest.skip("this machine has no outward address to come from")
    with socket.create_connection((address, server.address[1]), timeout=20) as sock:
        assert sock.recv(1) == b""
    assert server.counts["refused_address"] == 1 and server.counts["accepted"] == 0


def test_connections_beyond_the_places_are_closed(server):
    socks = [
        socket.create_connection(("127.0.0.1", server.address[1]), timeout=20)
        for _ in range(WORKER_CLIENTS_MAX)
    ]
    try:
        with socket.create_connection(("127.0.0.1", server.address[1]), timeout=20) as one_more:
            assert one_more.recv(1) == b""
        assert server.counts["refused_full"] == 1
    finally:
        for sock in socks:
            sock.close()


def test_stopping_closes_everybody(server):
    with socket.create_connection(("127.0.0.1", server.address[1]), timeout=20) as sock:
        while server.counts["accepted"] < 1:
            time.sleep(0.01)
        server.stop()
        assert sock.recv(1) == b""


def test_a_taken_port_is_named(server):
    with pytest.raises(ServiceError, match=str(server.address[1])):
        listen("0.0.0.0", server.address[1])


@pytest.mark.parametrize(
    ("current", "high", "critical", "thermal"),
    [
        (50, 80, 100, 0),
        (72, 80, 100, 1),
        (85, 80, 100, 2),
        (101, 80, 100, 3),
        (60, None, None, -1),
        (99, None, 90, 3),
    ],
)
def test_heat_by_the_sensors_own_marks(current, high, critical, thermal):
    assert thermal_of(current, high, critical) == thermal
