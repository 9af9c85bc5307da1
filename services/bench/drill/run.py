"""All cases of a drill, one after the other, and the table at the end. Called by services.cli.drill."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.config import Settings
from services.bench.drill import past
from services.bench.drill.cases import CASES, PAST_CASES, DrillCase, Struck, possible
from services.bench.drill.past import PastSubject
from services.bench.drill.prompts import prompts
from services.bench.drill.system import PAST_THE_LIMIT, Struckable, why_not_past
from services.bench.drill.trial import Subject
from services.bench.report import Report

N_PROMPT, N_TOKENS, N_PROMPTS = 1100, 32, 4
FROZEN_S, FROZEN_S_QUICK = 20.0, 5.0
SLOW_LINK = "loopback,rate=2MB/s,rtt=5ms"
WHOLE_S_MAX = 120.0
COLUMNS = ("what went wrong", "outcome", "tokens equal", "lost s", "again s", "nothing leaked", "passed")


def run_drill(model: Path, settings: Settings, report: Report) -> list[Struck]:
    """Strike everything that can be struck here. Raises ServiceError when the system does not start or work at all."""
    struck: list[Struck] = []
    left_out: list[tuple[str, str]] = []
    for drills in (BELOW, PAST):
        report.progress(f"cases {drills.name}")
        drills.run(model, settings, report, struck, left_out)
    tell(report, struck, left_out)
    return struck


@dataclass(frozen=True)
class Drills:
    """Cases that are tried on one system, and once more on one like it with a slow link."""

    name: str
    cases: tuple[DrillCase, ...]
    subject: type[Subject]
    lengths: list[tuple[int, int]]
    n_first: int
    settings: dict[str, Any]

    def run(
        self,
        model: Path,
        settings: Settings,
        report: Report,
        struck: list[Struck],
        left_out: list[tuple[str, str]],
    ) -> None:
        """Adds to `struck` and `left_out`. Raises ServiceError when the system does not start or work at all."""
        why_not = why_not_past(settings)
        if self.settings and why_not:
            left_out += [(case.name, why_not) for case in self.cases]
            return
        frozen_s = FROZEN_S_QUICK if report.quick else FROZEN_S
        with Struckable(model, settings, **self.settings) as system:
            system.wait_whole(WHOLE_S_MAX)
            right = prompts(model, system.settings, self.lengths, report.progress, self.n_first)
            asked = itertools.cycle(right)
            end = system.far_end()
            if end:
                end.close()
            chosen, left = possible(self.cases, system.pids(), end is not None, system.own_worker)
            left_out += left
            subject = self.subject(system, lambda: next(asked), frozen_s)
            subject.prepare()
            report.progress(f"an undisturbed answer takes {subject.usual_s:.2f} s; {len(chosen)} cases")
            struck += [_told(report, subject.run(case)) for case in chosen if not case.slow_link]
        struck.append(_told(report, stopped(self.name, system)))
        for case in chosen:
            if case.slow_link:
                with Struckable(model, settings, SLOW_LINK, **self.settings) as system:
                    system.wait_whole(WHOLE_S_MAX)
                    subject = self.subject(system, lambda: next(asked), frozen_s)
                    subject.prepare()
                    struck.append(_told(report, subject.run(case)))


BELOW = Drills("below the limit", CASES, Subject, [(N_PROMPT, N_TOKENS)] * N_PROMPTS, 0, {})
PAST = Drills(
    "past the limit",
    PAST_CASES,
    PastSubject,
    [(past.N_PROMPT, past.N_TOKENS)] * past.N_PROMPTS,
    past.N_FIRST,
    PAST_THE_LIMIT,
)


def stopped(name: str, system: Struckable) -> Struck:
    """What was left of a system once it was stopped: nothing must be."""
    left = system.left_behind
    problems = [f"left behind: {text}" for text in left]
    said = "something was left" if left else "no process and no lock was left"
    return Struck(DrillCase(f"stopped, {name}"), said=said, happened=True, leaks=left, problems=problems)


def _told(report: Report, struck: Struck) -> Struck:
    wrong = "".join(f"; PROBLEM: {text}" for text in struck.problems)
    report.progress(
        f"{struck.case.name}: {struck.outcome}, {struck.n_equal} of {struck.n_compared} tokens equal, "
        f"whole again after {struck.again_s:.1f} s{wrong}"
    )
    report.row(
        case=struck.case.name,
        outcome=struck.outcome,
        happened=struck.happened,
        compared=struck.n_compared,
        equal=struck.n_equal,
        remote_groups=struck.remote,
        lost_s=round(struck.lost_s, 3),
        again_s=round(struck.again_s, 3),
        leaks=struck.leaks,
        problems=struck.problems,
    )
    return struck


def tell(report: Report, struck: list[Struck], left_out: list[tuple[str, str]]) -> None:
    """The table, what was not tried, and the figures."""
    rows: list[tuple[object, ...]] = [
        (
            each.case.name,
            each.outcome,
            f"{each.n_equal} of {each.n_compared}" if each.n_compared else "",
            "" if each.error or each.said else each.lost_s,
            "" if each.said else each.again_s,
            "no" if each.leaks else "yes",
            "no" if each.problems else "yes",
        )
        for each in struck
    ]
    rows += [(name, f"not tried: {why}", "", "", "", "", "") for name, why in left_out]
    report.table("faults on purpose, and what came of the answer under way", COLUMNS, rows)
    for each in struck:
        for problem in each.problems:
            report.note(f"{each.case.name}: {problem}")
    compared = sum(each.n_compared for each in struck)
    report.figure("cases", len(struck), cases=len(struck))
    report.figure("not_tried", len(left_out))
    report.figure("passed", sum(not each.problems for each in struck))
    report.figure("compared", compared, compared=compared)
    report.figure("equal", sum(each.n_equal for each in struck))
    report.figure("lost_s_max", max((each.lost_s for each in struck), default=0.0))
    report.figure("again_s_max", max((each.again_s for each in struck), default=0.0))
    report.figure("leaks", sum(len(each.leaks) for each in struck))
