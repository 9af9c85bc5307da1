"""Where a worker may be: addresses to try, and which one is next. Pure.

A configured address is the only place. Places that were found are tried one after the other; one that a worker was
met at stays first. Used by services.bridge.pump, filled by services.bridge.search.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """An address of a worker's two channels; `via` says how it was found: configured, usb, usbmux."""

    host: str
    port: int
    control_port: int
    via: str = "configured"

    def __str__(self) -> str:
        return f"{self.host}:{self.port} ({self.via})"


class Places:
    """The places to try, in order. `why` says why there is none."""

    def __init__(self, places: Iterable[Place] = (), why: str = "") -> None:
        self.why = why
        self._places = list(places)
        self._tried = 0

    @property
    def current(self) -> Place | None:
        """The place to try next, or in use."""
        return self._places[self._tried % len(self._places)] if self._places else None

    def offer(self, places: Iterable[Place], why: str) -> bool:
        """Take over what was found now; the current place stays current if it is still there. True: there is news."""
        found, current = list(places), self.current
        news = set(found) - set(self._places)
        if current in found:
            found.remove(current)
            found.insert(0, current)
        self._places, self._tried, self.why = found, 0, why
        return bool(news)

    def failed(self) -> bool:
        """The current place did not answer. True when there is another one that was not tried in this round."""
        if len(self._places) < 2:
            return False
        self._tried += 1
        return self._tried % len(self._places) != 0

    def met(self) -> None:
        """A worker answered at the current place: it is first from now on."""
        current = self.current
        assert current is not None
        self._places.remove(current)
        self._places.insert(0, current)
        self._tried = 0
