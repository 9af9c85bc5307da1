"""The gateway's own rig serves the client tests, too."""

from __future__ import annotations

from tests.services.gateway.conftest import rig, shared_rig

__all__ = ["rig", "shared_rig"]
