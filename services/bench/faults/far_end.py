"""The control channel of an emulated worker, seen from a bench: arm faults, ask which of them happened.

One command, one line of JSON. A frozen worker may answer only once it thaws. Used by services.bench.faults.
"""

from __future__ import annotations

import json
import socket
import time
from typing import Any

from common.errors import ServiceError

ANSWER_S_MAX = 180.0
"""Longer than any freeze: those last longer on a busy machine, because the bridge is more patient there."""


class FarEnd:
    """Talks to the worker whose control channel is at this address. `close` it."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._sock = socket.create_connection((host, port), ANSWER_S_MAX)
        self._lines = self._sock.makefile("rb")

    def ask(self, line: str) -> dict[str, Any]:
        """One command's answer. Raises ServiceError when it is a refusal or none comes."""
        try:
            self._sock.sendall(line.encode() + b"\n")
            answer = json.loads(self._lines.readline())
        except (OSError, ValueError) as error:
            raise ServiceError(f"the worker's control channel does not answer {line!r}: {error}") from error
        if "error" in answer:
            raise ServiceError(f"the worker refused {line!r}: {answer['error']}")
        return dict(answer)

    def arm(self, script: str) -> int:
        """Let faults happen, counted from now; returns how many had happened before."""
        n_fired = len(self.ask("faults")["fired"])
        self.ask(f"fault {script}")
        return n_fired

    def fired(self, since: int) -> list[str]:
        """What happened after the first `since` faults."""
        return list(self.ask("faults")["fired"][since:])

    @property
    def armed(self) -> list[str]:
        """What has still to happen."""
        return list(self.ask("faults")["armed"])

    def wait_spent(self, timeout_s: float) -> bool:
        """Wait until nothing is armed any more; False when something still is."""
        until_s = time.monotonic() + timeout_s
        while self.armed:
            if time.monotonic() > until_s:
                return False
            time.sleep(0.02)
        return True

    def close(self) -> None:
        self._lines.close()
        self._sock.close()
