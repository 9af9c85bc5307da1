"""The bound of a split read: how long it takes when nothing costs time but the stages themselves.

The host runs the head layers of one ubatch after the other; the worker runs the tail of a ubatch as soon as it has its
residual and is free; the last ubatch's tail waits for both and runs on the host. A read that takes exactly this long
has lost nothing to sending, waiting for messages, copying rows or Python. Pure; used by services.bench.split.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.wire.messages import UbatchTimes


def pipeline_bound_s(stages: Sequence[UbatchTimes]) -> float:
    """Shortest time of a read whose stages took what they took."""
    host_s = worker_s = 0.0
    for stage in stages:
        host_s += stage.head_s
        if stage.worker_s:
            worker_s = max(worker_s, host_s) + stage.worker_s
    return max(host_s, worker_s) + sum(stage.tail_s for stage in stages)


def equal_sides_limit(n_ubatches: int, head_share: float) -> float:
    """Speed-up over the host alone that two equal sides reach at best when the head is `head_share` of the layers.

    >>> round(equal_sides_limit(8, 40 / 64), 2), round(equal_sides_limit(8, 1 / 2), 2)
    (1.49, 1.78)
    """
    tail_share = 1 - head_share
    stages = [
        UbatchTimes(0, 1, 0.0, head_s=head_share, worker_s=tail_share if i < n_ubatches - 1 else 0.0)
        for i in range(n_ubatches)
    ]
    return n_ubatches / (pipeline_bound_s(stages) + tail_share)
