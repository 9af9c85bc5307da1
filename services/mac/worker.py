"""How the worker stands: is there a link, may a read use it, is it resting after a failure.

The loop's thread writes `link`, the compute thread reads it and reports failures; each field is replaced whole, so no
lock is needed. Knows no sockets; time is passed in as a clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from common.limits import CHUNK_WINDOW
from common.wire.messages import WorkerView
from services.mac.plan import WorkerStanding

LinkState = Literal["absent", "connecting", "ready", "refused"]


@dataclass(frozen=True)
class LinkView:
    """The link as the bridge last told. `epoch` names its life; messages of another life are refused."""

    state: LinkState = "absent"
    epoch: int = 0
    window: int = CHUNK_WINDOW
    layer_min: int = 1
    """First layer that the worker's file holds: the lowest split layer it takes."""
    detail: str = ""
    device: str = ""
    n_ctx: int = 0
    """Positions the worker's mirror holds; 0: not told."""
    token_ms: float = 0.0
    """Its layers over one token, timed when the link came up; 0: not timed."""
    rtt_us: float = 0.0


class RestTimer:
    """After a failure the worker is left alone for `rest_s` seconds."""

    def __init__(self, rest_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.rest_s = rest_s
        self._clock = clock
        self._until_s = float("-inf")

    def start(self) -> None:
        self._until_s = self._clock() + self.rest_s

    @property
    def left_s(self) -> float:
        """Seconds of rest left, 0 when over."""
        return max(0.0, self._until_s - self._clock())


class Worker:
    """The worker as the host sees it. split_layer 0 means that nothing is ever split."""

    def __init__(
        self, split_layer: int, *, rest_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.split_layer = split_layer
        self.link = LinkView()
        self._rest = RestTimer(rest_s, clock)

    @property
    def rest_s(self) -> float:
        """Seconds that a worker is left alone after it failed, or was too slow."""
        return self._rest.rest_s

    def reopens(self, split_layer: int) -> None:
        """From now on the model is split there: the link as it is now is of no use any more."""
        self.link = replace(self.link, state="connecting")
        self.split_layer = split_layer

    def failed(self) -> None:
        """A read had to be redone: rest."""
        self._rest.start()

    @property
    def standing(self) -> WorkerStanding:
        """Usable now, or why not."""
        if not self.split_layer:
            return "off"
        if self.link.state == "refused":
            return "refused"
        if self.link.state != "ready":
            return "absent"
        return "rested" if self._rest.left_s else "ready"

    def view(self) -> WorkerView:
        """For HostStatus."""
        link, left_s = self.link, self._rest.left_s
        if link.state == "ready" and left_s:
            return WorkerView("resting", f"rests {left_s:.0f} s more", self.split_layer, link.device)
        return WorkerView(link.state, link.detail, self.split_layer, link.device)
