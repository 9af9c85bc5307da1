"""Only this machine is served without a key, whatever a name looks like. Method: tables of addresses and names."""

from __future__ import annotations

import pytest

from common.errors import SettingError
from services.gateway.doors import is_loopback, require_key_off_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "127.5.5.5", "::1", "[::1]", "localhost", "LOCALHOST."])
def test_names_of_this_machine(host):
    assert is_loopback(host)
    require_key_off_loopback(host, None)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "192.168.1.5", "169.254.7.1", "localhost.evil.example", "127.0.0.1.nip.io", ""]
)
def test_addresses_that_others_can_reach_need_a_key(host):
    assert not is_loopback(host)
    with pytest.raises(SettingError, match="set OUTRIGGER_API_KEY"):
        require_key_off_loopback(host, "")
    require_key_off_loopback(host, "key")
