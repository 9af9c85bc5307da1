"""Which page of the journal is looked at next: each of a conversation in turn, slowly. Pure; called by broker.py."""

from __future__ import annotations

from common.wire.held import PagePlace
from services.broker.ledger import Held


class Looking:
    """One page with each call, so that the disk and the processor have other things to do."""

    def __init__(self) -> None:
        self._after = (-1, -1)

    def next_place(self, held: Held | None) -> PagePlace | None:
        """The page behind the one that was looked at last, in the order of pages and layers; None: there is none."""
        if held is None or not held.places:
            return None
        behind = [at for at in held.places if at > self._after]
        self._after = min(behind or held.places)
        return held.places[self._after]
