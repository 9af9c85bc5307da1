"""One gateway for the client tests, from the gateway's own rig."""

from __future__ import annotations

import pytest

from tests.services.gateway.rig import Rig, finish_at_once


@pytest.fixture(scope="package")
def shared_rig(smollm2):
    with Rig(smollm2) as rig:
        yield rig


@pytest.fixture
def rig(shared_rig):
    """The shared gateway, with a host that answers nothing in particular."""
    shared_rig.host.behave = finish_at_once
    shared_rig.host.told.clear()
    return shared_rig
