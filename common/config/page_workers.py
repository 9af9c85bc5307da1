"""Further workers that hold pages, from one setting: their addresses, or how many are to be started on this machine.

Pure. Workers have numbers: 0 is the one that the link leads to (`bridge.worker_host`), 1, 2, ... are these, in their
order. The number is part of the name of a worker's bridge (`bridge-1`), of its sockets, and of its label in metrics.
Used by load.py, by launch, and by the processes that talk with bridges.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from common.config.tree import BridgeSettings, Settings
from common.errors import SettingError
from common.limits import PAGE_WORKERS_MAX

CONTROL_PORT = BridgeSettings().worker_control_port
"""Where a worker's control channel is when nobody says so."""
IN_BRACKETS = re.compile(r"\[([^\[\]]+)\](?::(.*))?")
FORMS = "HOST or HOST:CONTROL_PORT, several with commas between (an IPv6 address with a port in brackets)"


class PageWorkerPlace(NamedTuple):
    """Where a worker's control channel is; it tells where its pages are."""

    host: str
    control_port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.control_port}"


def page_workers_here(text: str) -> int:
    """How many the setting asks to have started on this machine. Raises SettingError."""
    if not text.strip().isdecimal():
        return 0
    if (n := int(text)) > PAGE_WORKERS_MAX:
        raise _refused(text, f"at most {PAGE_WORKERS_MAX} are started")
    return n


def page_worker_places(text: str) -> tuple[PageWorkerPlace, ...]:
    """The addresses that the setting names; none when it is empty, or a number. Raises SettingError."""
    if not text.strip() or text.strip().isdecimal():
        return ()
    places = tuple(_place(text, part.strip()) for part in text.split(","))
    if len(places) > PAGE_WORKERS_MAX:
        raise _refused(text, f"it names {len(places)}, {PAGE_WORKERS_MAX} may be")
    if len(set(places)) < len(places):
        raise _refused(text, "it names one twice")
    return places


def worker_numbers(settings: Settings) -> tuple[int, ...]:
    """The numbers of all workers that may hold pages, each with a bridge of its own. Raises SettingError."""
    text = settings.bridge.page_workers
    further = page_workers_here(text) or len(page_worker_places(text))
    return (*((0,) if settings.host.split == "on" else ()), *range(1, further + 1))


def _place(text: str, part: str) -> PageWorkerPlace:
    host, port = part, str(CONTROL_PORT)
    if found := IN_BRACKETS.fullmatch(part):
        host, port = found[1], port if found[2] is None else found[2]
    elif part.count(":") == 1:
        host, _, port = part.partition(":")
    if not host or any(letter.isspace() or letter in "[]" for letter in host):
        raise _refused(text, f"{part!r} is no address")
    if not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise _refused(text, f"{port!r} is no port from 1 to 65535")
    return PageWorkerPlace(host, int(port))


def _refused(text: str, why: str) -> SettingError:
    return SettingError(
        f"bridge.page_workers = {text!r} (OUTRIGGER_PAGE_WORKERS, --page-workers): {why}. It must be {FORMS}; or a "
        f"number from 0 to {PAGE_WORKERS_MAX}: so many are started on this machine"
    )
