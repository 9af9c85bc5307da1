"""All cases of a drill, one after the other, and the table at the end. Called by services.cli.drill."""

from __future__ import annotations

import itertools
from pathlib import Path

from common.config import Settings
from services.bench.drill.cases import CASES, DrillCase, Struck, possible
from services.bench.drill.prompts import prompts
from services.bench.drill.system import Struckable
from services.bench.drill.trial import Prompt, Subject
from services.bench.report import Report

N_PROMPT, N_TOKENS, N_PROMPTS = 1100, 32, 4
FROZEN_S, FROZEN_S_QUICK = 20.0, 5.0
SLOW_LINK = "loopback,rate=2MB/s,rtt=5ms"
COLUMNS = ("what went wrong", "outcome", "tokens equal", "lost s", "again s", "nothing leaked", "passed")


def run_drill(model: Path, settings: Settings, report: Report) -> list[Struck]:
    """Strike everything that can be struck here. Raises ServiceError when the system does not start or work at all."""
    struck: list[Struck] = []
    with Struckable(model, settings) as system:
        system.wait_whole(120.0)
        asked = itertools.cycle(
            prompts(model, system.settings, [(N_PROMPT, N_TOKENS)] * N_PROMPTS, report.progress)
        )
        end = system.far_end()
        if end:
            end.close()
        chosen, left_out = possible(CASES, system.pids(), end is not None, system.own_worker)
        subject = Subject(system, lambda: next(asked), FROZEN_S_QUICK if report.quick else FROZEN_S)
        subject.prepare()
        report.progress(f"an undisturbed answer takes {subject.usual_s:.2f} s; {len(chosen)} cases")
        for case in chosen:
            if not case.slow_link:
                struck.append(_told(report, subject.run(case)))
    for case in chosen:
        if case.slow_link:
            struck.append(_told(report, _over_slow_link(case, model, settings, asked)))
    tell(report, struck, left_out)
    return struck


def _over_slow_link(
    case: DrillCase, model: Path, settings: Settings, asked: itertools.cycle[Prompt]
) -> Struck:
    """The same system, with a cable that carries little."""
    with Struckable(model, settings, SLOW_LINK) as system:
        system.wait_whole(120.0)
        subject = Subject(system, lambda: next(asked), FROZEN_S)
        subject.prepare()
        return subject.run(case)


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
            f"{each.n_equal} of {each.n_compared}",
            each.lost_s if not each.error else "",
            each.again_s,
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
