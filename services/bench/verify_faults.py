"""`outrigger verify --faults`: every fault at every moment, and kill -9 of every process; the tokens stay the same.

Real processes, the real worker on an emulated link that takes faults by script and says which of them happened. The
right answers are those of a host that never had a worker. A fault that did not happen fails the run, as does a worker
that is not used again afterwards, or a process that holds more than before. Called by services.cli.verify.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from common.errors import ServiceError
from common.model.embedded import embedded_model
from common.model.spec import ModelSpec
from common.model.split import plan_split
from common.model.synthetic import ensure_preset
from services.bench.faults import cases as c
from services.bench.faults.footprint import footprints, leaks
from services.bench.faults.kills import KillCounts, verify_kills
from services.bench.faults.prompts import ColdPrompts
from services.bench.faults.trial import Subject, Trial
from services.bench.report import NotMeasuredError, Report
from services.bench.rig import Rig

Way = Literal["", "guarded", "split decode"]
N_CTX = 4096
N_PROMPT, N_PROMPT_QUICK = 1200, 900
N_TOKENS, N_TOKENS_QUICK = 24, 12
ANSWER_S_MIN = 2.0
"""The bridge's patience here, at least."""
REST_S = 0.2
"""How long a lost worker rests here."""
WARM_UP = 3
"""Cases after which processes hold what they hold; footprints are taken then and at the end."""
GUARDED_KINDS = ("long freeze", "slow-down")
"""What reads that take work back from a slow worker are struck with."""
NO_RANGE = (
    "during STATE_RANGE no fault strikes: rows and states come home with the acks of their chunks. A read asks for a "
    "state by itself only when a worker's pace collapses between two sends, and none of these reads did"
)
ROUNDS_OF_KILLS, ROUNDS_OF_KILLS_QUICK = 20, 2


class Remaining:
    """How many faults are still to come, and how long they will take at the pace so far."""

    def __init__(self, n_total: int) -> None:
        self.n_total, self.n_done, self._started_s = n_total, 0, time.monotonic()

    def one_done(self) -> None:
        self.n_done += 1

    @property
    def words(self) -> str:
        """For example "12 of 80, about 14 min more"; the kills come after it."""
        pace_s = (time.monotonic() - self._started_s) / max(1, self.n_done)
        left_s = pace_s * (self.n_total - self.n_done)
        return f"{self.n_done} of {self.n_total}, about {left_s / 60:.0f} min more before the kills"


@dataclass
class FaultCounts:
    """Everything that was found; `problems` are sentences."""

    trials: list[tuple[str, Trial]] = field(default_factory=list)
    kills: KillCounts = field(default_factory=KillCounts)
    leaks: list[str] = field(default_factory=list)

    @property
    def compared(self) -> int:
        return sum(trial.n_compared for _, trial in self.trials) + self.kills.compared

    @property
    def equal(self) -> int:
        return sum(trial.n_equal for _, trial in self.trials) + self.kills.equal

    @property
    def fired(self) -> int:
        return sum(len(trial.fired) for _, trial in self.trials)

    @property
    def problems(self) -> list[str]:
        """What a reader must know when the run failed."""
        told = [
            f"{label}, {trial.case.name}: {text}" for label, trial in self.trials for text in trial.problems
        ]
        return told + self.kills.problems + self.leaks

    @property
    def passed(self) -> bool:
        return self.compared > 0 and self.equal == self.compared and not self.problems


def verify_faults(report: Report) -> FaultCounts:
    """Run everything. Raises ServiceError when processes fail, NotMeasuredError when the worker took no part."""
    counts = FaultCounts()
    chosen = [
        (label, path, way, cases)
        for index, (label, path) in enumerate(fault_models(report.quick))
        for way, cases in chosen_cases(report.quick, first=index == 0).items()
    ]
    kills = ROUNDS_OF_KILLS_QUICK if report.quick else ROUNDS_OF_KILLS
    progress = Remaining(sum(len(cases) for *_, cases in chosen))
    for label, path, way, cases in chosen:
        strike_model(label, path, report, counts, cases, way=way, remaining=progress)
    label, path = fault_models(report.quick)[-1]  # the smaller one: kills are about processes
    report.progress(f"kill -9: {kills} rounds of four processes, {label}")
    counts.kills = verify_kills(path, report, kills)
    tell(report, counts)
    return counts


def fault_models(quick: bool) -> list[tuple[str, Path]]:
    """(label, file): a model without and one with recurrent layers."""
    if quick:
        return [(name, ensure_preset(name)) for name in ("tiny", "tiny-sliding")]
    return [("smollm2", embedded_model()), ("hybrid-60m", ensure_preset("hybrid-60m"))]


def chosen_cases(quick: bool, first: bool) -> dict[Way, list[c.Case]]:
    """All cases; a quick run meets refused greetings once, and only some moments with its second model."""
    lasting = [kind for kind in c.KINDS if not kind.refuses]  # a refusal ends split decode, by name
    if not quick:
        slow = [kind for kind in c.KINDS if kind.name in GUARDED_KINDS]
        return {
            "": c.cases(c.KINDS, c.MOMENTS),
            "guarded": c.cases(slow, (c.MID_CHUNK, c.BETWEEN_CHUNKS)),
            "split decode": c.cases(lasting, c.SPLIT_DECODE_MOMENTS),
        }
    if first:
        return {"": c.cases(c.KINDS, c.MOMENTS, refusals_at=(c.MID_CHUNK,))}
    return {
        "": c.cases(c.KINDS, (c.MID_CHUNK, c.DURING_SYNC), refusals_at=()),
        "split decode": c.cases(lasting, c.SPLIT_DECODE_MOMENTS[1:2]),
    }


def strike_model(
    label: str,
    path: Path,
    report: Report,
    counts: FaultCounts,
    chosen: Sequence[c.Case],
    *,
    way: Way = "",
    remaining: Remaining | None = None,
) -> None:
    """All chosen cases on one model, on processes of its own; adds to `counts`.

    way: "" the worker takes part in every read; "guarded": reads take work back from one that does not make them
    faster; "split decode": the tail layers are on the worker alone.
    """
    split_layer = plan_split(ModelSpec.read(path), None).layer
    remaining = remaining or Remaining(len(chosen))
    n_tokens = N_TOKENS_QUICK if report.quick else N_TOKENS
    name = f"{label}, {way}" if way else label
    with Rig(
        path, n_ctx=N_CTX, worker_emulate="loopback", worker_rest_s=REST_S, answer_s_min=ANSWER_S_MIN
    ) as rig:
        alone = rig.seat_alone()
        split = rig.seat_split(
            split_layer,
            split_guard="on" if way == "guarded" else "off",
            split_decode="on" if way == "split decode" else "off",
        )
        for seat in (alone, split):
            rig.wait_ready(seat)
        rig.tell_what_runs(report, name)
        prompts = ColdPrompts(
            path, alone, n_prompt=N_PROMPT_QUICK if report.quick else N_PROMPT, n_tokens=n_tokens
        )
        subject = Subject(rig, prompts, split, n_tokens=n_tokens)
        subject.prepare()
        report.progress(f"{name}: split at layer {split_layer}, {subject.n_chunks} chunks a read")
        pids = rig.pids(split)
        before = None
        for index, case in enumerate(chosen):
            if index == WARM_UP:
                before = footprints(pids)
            try:
                trial = subject.run(case)
            except ServiceError as error:
                raise ServiceError(f"{name}, {case.name}: {error}\n{rig.processes.log_ends()}") from error
            counts.trials.append((name, trial))
            _tell_trial(report, name, trial, remaining)
        if before is None:
            raise NotMeasuredError(f"{len(chosen)} faults are too few to see a leak; more than {WARM_UP} are")
        counts.leaks += [f"{name}: {text}" for text in leaks(before, lambda: footprints(pids))]
        subject.close()


def _tell_trial(report: Report, label: str, trial: Trial, remaining: Remaining) -> None:
    remaining.one_done()
    report.progress(
        f"{label}: {trial.case.name}: {trial.outcome}, {trial.n_equal} of {trial.n_compared} tokens equal, "
        f"{trial.lost_s:+.2f} s, worker used again after {trial.away_s:.1f} s"
        + "".join(f"; PROBLEM: {text}" for text in trial.problems)
        + f" ({remaining.words})"
    )
    report.row(
        model=label,
        fault=trial.case.kind.name,
        moment=trial.case.moment.name,
        fired=trial.fired,
        fallbacks=trial.fallbacks,
        tokens_returned=trial.tokens_returned,
        compared=trial.n_compared,
        equal=trial.n_equal,
        lost_s=round(trial.lost_s, 3),
        away_s=round(trial.away_s, 3),
        problems=trial.problems,
    )


def tell(report: Report, counts: FaultCounts) -> None:
    """The tables, and the figures that refuse to be told when nothing took part."""
    for label in dict.fromkeys(label for label, _ in counts.trials):
        report.table(
            f"{label}: faults, and the answers they struck",
            ("fault, moment", "worker", "equal", "compared", "lost s", "used again s"),
            [
                (each.case.name, each.outcome, each.n_equal, each.n_compared, each.lost_s, each.away_s)
                for at, each in counts.trials
                if at == label
            ],
        )
    if counts.kills.rows:
        report.table(
            "kill -9, and what the request under way met",
            ("process", "kills", "in flight", "went on", "ended with an error", "longest s to answer again"),
            counts.kills.rows,
        )
    report.note(NO_RANGE)
    report.figure("compared", counts.compared, compared=counts.compared)
    report.figure("equal", counts.equal)
    report.figure("faults_fired", counts.fired, faults_fired=counts.fired)
    report.figure("kills", counts.kills.n_kills)
    report.figure("leaks", len(counts.leaks))
    report.figure("lost_s_max", max((trial.lost_s for _, trial in counts.trials), default=0.0))
    report.figure("problems", len(counts.problems))
