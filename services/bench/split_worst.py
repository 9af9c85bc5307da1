"""The worst case of a split read: the worker slows down in the middle of it, as a hot phone does.

Measured with the guard on, against the host alone on the same prompt: the read in which the emulated worker becomes
several times slower after its third chunk, and the read after it, which should not trust that worker any more. Used by
services.bench.split.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.bench.report import NotMeasuredError, Report
from services.bench.rig import Rig, Seat
from services.bench.rounds import NEW_TOKENS, Case
from services.bench.texts import natural_tokens

SLOW = 8
"""How many times as long the worker takes from then on."""
CHUNKS_WARM, CHUNKS_BEFORE = 2 + NEW_TOKENS // 256 - 1, 3
"""Chunks of the two reads that make the pace known (600 tokens, then NEW_TOKENS), and of the read itself."""


@dataclass(frozen=True)
class Worst:
    """ratio: time / time on the host alone, of the worse of the two reads."""

    ratio: float
    tokens_returned: int
    """Tokens whose tail went back to the host in the first of them."""


def measure_worst(rig: Rig, case: Case, alone: Seat, layer: int, report: Report) -> Worst:
    """Read, slow down, read again. Raises NotMeasuredError when tokens differ."""
    fault = f"slow {SLOW} after chunk {CHUNKS_WARM + CHUNKS_BEFORE}"
    seat = rig.seat_split(layer, "slowing", split_guard="on", worker_emulate="loopback", worker_faults=fault)
    rig.wait_ready(seat)
    seat.client.generate(natural_tokens(case.path, 600, skip=77_000), 1)
    seat.client.generate(natural_tokens(case.path, NEW_TOKENS, skip=60_000), 1)
    ratios, returned = [], 0
    for number in range(2):
        prompt = natural_tokens(case.path, NEW_TOKENS, skip=(number + 1) * NEW_TOKENS)
        right, found = alone.client.generate(prompt, 4), seat.client.generate(prompt, 4)
        if right.token_ids != found.token_ids:
            raise NotMeasuredError(
                f"{case.label}, slow worker: it chose {found.token_ids}, alone {right.token_ids}"
            )
        read = found.report
        ratios.append(found.first_token_s / right.first_token_s)
        returned += 0 if number else read.tokens_returned
        report.progress(
            f"{case.label}: read {number + 1} with a worker {SLOW} times slower {found.first_token_s:.2f} s, alone "
            f"{right.first_token_s:.2f} s; worker {read.tokens_worker}, returned {read.tokens_returned} "
            f"{read.bypass_reason}"
        )
        report.row(
            model=case.label,
            kind="slow-down",
            read_s=found.first_token_s,
            alone_s=right.first_token_s,
            tokens_worker=read.tokens_worker,
            tokens_returned=read.tokens_returned,
            bypass_reason=read.bypass_reason,
        )
    rig.close(seat)
    return Worst(max(ratios), returned)
