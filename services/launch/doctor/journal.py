"""Looks at where old keys and values would go: the journal's folder, and how much one long conversation takes.

Changes nothing, not even the folder's mode. Used by services.cli.doctor.
"""

from __future__ import annotations

import os
from pathlib import Path

from common.config import Settings
from common.errors import OutriggerError
from common.limits import MIB
from common.model.spec import ModelSpec
from services.launch.doctor.facts import Journal
from services.launch.lock import is_held

F16_BYTES = 2


def look_at_journal(settings: Settings, *, runs: bool) -> Journal:
    """What is known without a broker. runs: a launch of ours keeps the folder locked, as it should."""
    host, broker = settings.host, settings.broker
    token_bytes = _token_bytes(host.model)
    limit = host.kv_host_tokens
    if host.kv_host_bytes and token_bytes:
        limit = min(limit, host.kv_host_bytes // token_bytes)
    folder = Path(broker.journal_dir).absolute()
    return Journal(
        holds=host.hold == "on" and host.n_ctx > limit and host.split_decode == "off",
        limit_tokens=limit,
        n_ctx=host.n_ctx,
        conversation_mb=-(-token_bytes * host.n_ctx // MIB),
        cap_mb=broker.journal_mib,
        on_disk_mb=sum(each.stat().st_size for each in folder.glob("*.journal")) // MIB,
        problem=folder_problem(folder) or ("" if runs else _locked(folder)),
    )


def folder_problem(folder: Path) -> str:
    """Why nothing can be kept there, without its place; empty when it can."""
    if folder.exists() and not folder.is_dir():
        return "the journal's folder is no folder"
    if folder.exists() and folder.stat().st_uid != os.getuid():
        return "the journal's folder belongs to somebody else"
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    if not os.access(place, os.W_OK | os.X_OK):
        return "the journal's folder cannot be written" if place == folder else "its folder cannot be made"
    return ""


def _locked(folder: Path) -> str:
    """Whether a broker of another run keeps its journal there: such a folder is locked."""
    return "another broker keeps its journal in the same folder" if is_held(folder) else ""


def _token_bytes(model: str) -> int:
    """Bytes of the keys and values of one token, in the layers whose pages are kept; 0 when it cannot be read."""
    try:
        spec = ModelSpec.read(model)
    except (OutriggerError, OSError):
        return 0
    n_layer = sum(spec.kind(layer) == "attention" for layer in spec.layers)
    return 2 * n_layer * spec.n_head_kv * spec.head_dim * F16_BYTES
