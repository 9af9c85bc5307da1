"""Hostile lines against a running worker's control channel: each gets one line of JSON back, or ends the connection.

Used by services.bench.verify_fuzz and tests.
"""

from __future__ import annotations

import json
import random
import socket

from common.limits import CONTROL_LINE_BYTES_MAX
from services.bench.fuzz.live import SILENCE_S_MAX, LiveCounts

COMMANDS = (
    "mem",
    "ls",
    "watch",
    "mac",
    "mac ready",
    "mac reading 1 2 3",
    "mac x",
    "fetch a b",
    "life",
    "fault",
    "",
)


def fuzz_control(address: tuple[str, int], seed: int, n_lines: int, counts: LiveCounts) -> None:
    """Lines to the control channel: commands, nearly commands, bytes, endless ones. Each has one line of JSON back."""
    rng = random.Random(seed)
    sent = 0
    while sent < n_lines:
        with socket.create_connection(address) as sock:
            sock.settimeout(SILENCE_S_MAX)
            lines = sock.makefile("rb")
            while sent < n_lines:
                line = _line(rng)
                sent += 1
                try:
                    sock.sendall(line + b"\n")
                    answer = lines.readline()
                except TimeoutError:
                    counts.problems.append(f"the control channel was silent after {line[:60]!r}")
                    return
                except OSError:
                    answer = b""
                if not answer:
                    if len(line) < CONTROL_LINE_BYTES_MAX:
                        counts.problems.append(f"the control channel closed after {line[:60]!r}")
                    break
                if not isinstance(json.loads(answer), dict):
                    counts.problems.append(f"the control channel answered {answer[:60]!r}")
                if line.strip() == b"watch":
                    break
    counts.control_lines += sent


def _line(rng: random.Random) -> bytes:
    if rng.random() < 0.6:
        words = [
            rng.choice(COMMANDS),
            *(rng.choice(("1", "-1", "9" * 30, "é", "\0")) for _ in range(rng.randrange(3))),
        ]
        return " ".join(words).encode()
    n = rng.choice((1, 10, 1000, 1000, CONTROL_LINE_BYTES_MAX + 10))
    return rng.randbytes(n).replace(b"\n", b" ")
