"""Aim: a link's description is read exactly or refused with what is allowed. Method: examples."""

from __future__ import annotations

import pytest

from common.errors import SettingError
from device.emulator.profiles import PROFILES, Profile, parse_profile


def test_names_and_changes() -> None:
    assert parse_profile("usb-c") == Profile("usb-c", bytes_per_s=1.25e9, round_trip_s=96e-6)
    changed = parse_profile("usb2, rate=20MB/s, rtt=1ms, jitter=50us, slow=1.5")
    assert (changed.bytes_per_s, changed.round_trip_s, changed.slow) == (20e6, 1e-3, 1.5)
    assert changed.jitter_s == pytest.approx(50e-6)
    assert "×1.5" in str(changed)
    assert not parse_profile("loopback").shapes
    assert all(PROFILES[name].shapes for name in ("usb-c", "usb2", "wifi"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("usb4", "'usb4'; there are loopback, usb-c, usb2, wifi"),
        ("usb-c,speed=3", "no change of a link; there are rate, rtt, jitter, slow"),
        ("usb-c,rtt=3", "a number with one of us, ms, s"),
        ("usb-c,rate=fast", "a number with one of B/s"),
        ("usb-c,slow=0.5", "slow goes from 1 to 1000"),
        ("usb-c,rtt=11s", "rtt goes from 0 to 10"),
        ("usb-c,slow=2x", "slow takes a plain number"),
    ],
)
def test_what_is_not_understood_is_refused(text: str, says: str) -> None:
    with pytest.raises(SettingError) as caught:
        parse_profile(text)
    assert says in str(caught.value)
