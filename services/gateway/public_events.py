"""What happens here, told to every ZeroMQ subscriber: requests start, read and end; the worker comes and goes.

Never holds text or token ids. Numbers count per topic, so that a subscriber sees what it missed. Fed by trip.py (any
door's requests) and host.py (the host's status); nobody who feeds it ever waits.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from common.errors import OutriggerError
from common.log import get_log
from common.wire import public as p
from common.wire.messages import HostStatus
from services.gateway.trip import Progress
from services.runtime.bus import Publisher
from services.runtime.endpoints import CurveKeys

_KINDS: dict[str, type[p.Event]] = {
    "started": p.RequestStarted,
    "reading": p.RequestReading,
    "ended": p.RequestEnded,
}

_log = get_log()


class Events:
    """The publishing end, on any number of endpoints."""

    def __init__(self) -> None:
        self._publishers: list[Publisher] = []
        self._counts: Counter[str] = Counter()
        self._status: HostStatus | None = None
        self._told: tuple[Any, ...] | None = None

    def listen(self, endpoint: str, keys: CurveKeys | None = None) -> Publisher:
        """Open one more endpoint. The caller closes it."""
        publisher = Publisher(endpoint, self._joined, keys)
        self._publishers.append(publisher)
        return publisher

    def watch(self, progress: Progress) -> None:
        """A request moved on."""
        self._publish(_KINDS[progress.stage], request_id=progress.request_id, **progress.facts)

    def status(self, status: HostStatus | None) -> None:
        """The host told how it is; None: it was lost."""
        before, self._status = self._status, status
        was_up, is_up = _is_up(before), _is_up(status)
        if is_up and not was_up:
            assert status is not None
            self._publish(p.WorkerUp, device=status.worker.device, split_layer=status.worker.split_layer)
        elif was_up and not is_up:
            state, detail = (
                (status.worker.state, status.worker.detail)
                if status
                else ("absent", "the host process was lost")
            )
            self._publish(p.WorkerDown, state=state, detail=detail)
        facts = self._facts()
        if tuple(facts.values()) != self._told:
            self._told = tuple(facts.values())
            self._publish(p.StatusChanged, **facts)

    def _joined(self) -> None:
        self._publish(p.StatusChanged, **self._facts())

    def _facts(self) -> dict[str, Any]:
        status = self._status
        if status is None:
            return {"state": "unavailable", "requests_running": 0, "requests_waiting": 0, "worker": "absent"}
        return {
            "state": status.state,
            "requests_running": status.requests_running,
            "requests_waiting": status.requests_waiting,
            "worker": status.worker.state,
        }

    def _publish(self, kind: type[p.Event], **facts: Any) -> None:
        topic = str(kind.__struct_config__.tag)
        self._counts[topic] += 1
        frames = p.encode(kind(seq=self._counts[topic], at_s=time.time(), **facts))
        for publisher in self._publishers:
            try:
                publisher.send(frames)
            except OutriggerError as error:
                _log.warning("event was not published", topic=topic, reason=str(error))


def _is_up(status: HostStatus | None) -> bool:
    return status is not None and status.worker.state == "ready"
