"""The same tokens with the worker, without it, and with a worker that is killed in the middle of a read.

Real processes, natural text, greedy. Prompt lengths are ≡ 0, 1 and 2 modulo the ubatch, where kernels change. Token ids
are compared one by one with those of a host that never had a worker. Called by services.cli.verify.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from common.model.spec import ModelSpec
from common.model.split import plan_split
from common.wire import messages as m
from services.bench.client import Answer
from services.bench.compared import Compared
from services.bench.models import models
from services.bench.report import NotMeasuredError, Report
from services.bench.rig import Rig, Seat
from services.bench.texts import natural_tokens

LENGTHS = (768, 769, 770, 1537)
LENGTHS_QUICK = (768, 769, 770)
KILL_LENGTH = 2050
N_CTX = 4096
REST_S = 1.0
"""How long a killed worker rests here; an hour's rest would prove nothing more."""


@dataclass
class Totals(Compared):
    """What was compared. `worker_tokens` counts prompt tokens whose tail layers a worker ran."""

    worker_tokens: int = 0
    worker_kills: int = 0

    @property
    def passed(self) -> bool:
        return self.compared > 0 and self.equal == self.compared and self.worker_tokens > 0


def verify_split(report: Report) -> Totals:
    """Run everything; the caller decides what a difference means. Raises ServiceError when processes fail."""
    totals = Totals()
    for label, path in models(report.quick):
        verify_model(label, path, report, totals)
    report.table(
        "token ids one by one, host alone against host and worker",
        ("", "count"),
        [
            ("compared", totals.compared),
            ("equal", totals.equal),
            ("prompt tokens the worker ran", totals.worker_tokens),
            ("workers killed in the middle of a read", totals.worker_kills),
        ],
    )
    return totals


def verify_model(label: str, path: Path, report: Report, totals: Totals) -> None:
    """All comparisons on one model, on processes of its own; adds to `totals`."""
    n_tokens = 8 if report.quick else 32
    spec = ModelSpec.read(path)
    split_layer = plan_split(spec, None).layer
    report.progress(f"{label}: {spec.n_layer_full} layers, split at {split_layer}")
    with Rig(path, n_ctx=N_CTX, worker_rest_s=REST_S) as rig:
        alone, split = rig.seat_alone(), rig.seat_split(split_layer)
        for seat in (alone, split):
            rig.wait_ready(seat)
        rig.tell_what_runs(report, label)
        for index, length in enumerate(LENGTHS_QUICK if report.quick else LENGTHS):
            prompt = natural_tokens(path, length, skip=5000 * index)
            right = alone.client.generate(prompt, n_tokens)
            _compare(
                f"{label} {length} tokens", right, split.client.generate(prompt, n_tokens), report, totals
            )
        prompt = natural_tokens(path, KILL_LENGTH, skip=60_000)
        right = alone.client.generate(prompt, n_tokens)
        for name, found in _with_a_kill(rig, split, path, n_tokens):
            if name == "back":
                right = alone.client.generate(natural_tokens(path, 900, skip=90_000), n_tokens)
            _compare(f"{label} worker {name}", right, found, report, totals)
            totals.worker_kills += name == "killed"


def _compare(what: str, right: Answer, found: Answer, report: Report, totals: Totals) -> None:
    n_equal = totals.compare(what, right.token_ids, found.token_ids)
    totals.worker_tokens += found.report.tokens_worker
    report.progress(
        f"{what}: {n_equal} of {len(right.token_ids)} equal, worker ran {found.report.tokens_worker} prompt tokens"
    )
    report.row(
        what=what,
        right=right.token_ids,
        found=found.token_ids,
        tokens_worker=found.report.tokens_worker,
        fallbacks=found.report.fallbacks,
    )


def _with_a_kill(rig: Rig, split: Seat, path: Path, n_tokens: int) -> list[tuple[str, Answer]]:
    """Kill the worker while it computes; then start it again and read with it once more.

    Raises NotMeasuredError when the kill came too late to hit the read, or the worker is not used afterwards.
    """
    prompt = natural_tokens(path, KILL_LENGTH, skip=60_000)
    started_s = time.monotonic()
    request_id = split.client.start(prompt, n_tokens)
    while not isinstance(split.client.next_event(request_id), m.PrefillAdvanced):
        pass
    rig.processes.kill(f"{split.name}-worker")
    killed = split.client.finish(request_id, started_s)
    if not killed.report.fallbacks:
        raise NotMeasuredError(f"the worker was killed too late: the read of {KILL_LENGTH} tokens was over")
    rig.restart_worker(split)
    time.sleep(REST_S)
    rig.wait_ready(split)
    back = split.client.generate(natural_tokens(path, 900, skip=90_000), n_tokens)
    if not back.report.tokens_worker:
        raise NotMeasuredError(f"a worker that came back was not used: {back.report.bypass_reason}")
    return [("killed", killed), ("back", back)]
