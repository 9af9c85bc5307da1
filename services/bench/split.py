"""`outrigger bench split`: prefill on the host alone against host and worker together, one core and one thread each.

For every model and depth, rounds of one read alone and one for each split, taking turns on the same machine, after
`depth` tokens that are there already. The best layer is the planner's own choice from measured times, with its
neighbours in the full form. A figure is a ratio of medians of such reads, and is refused unless the worker ran the tail
of all ubatches but the last and every run chose the same next tokens. Rounds that other programs disturbed are
repeated, and the least disturbed ones count.

    <model>.d<depth>.speedup_40_64        time alone / time split with 40/64 of the layers on the host; 2,048 new tokens
    <model>.d<depth>.speedup_best_2k      the best of the split layers tried (_8k: 8,192 new tokens)
    <model>.d<depth>.speedup_best_2k_usb-c  the planner's layer over the emulated cable
    <model>.d<depth>.best_split           that split layer
    <model>.d<depth>.pipeline_efficiency  bound by the run's own stage times / time, at 40/64
    <model>.worst_case_ratio              time / time alone when the worker slows down in the middle of a read
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

import click
import numpy as np
from numpy.typing import NDArray

from common.model.embedded import embedded_model
from common.model.spec import ModelSpec
from common.model.synthetic import ensure_preset
from services.bench.client import Answer
from services.bench.load import BUSY_SHARE, LoadMeter
from services.bench.pipeline import equal_sides_limit
from services.bench.report import Report, report_options
from services.bench.rig import Rig, Seat
from services.bench.rounds import (
    ALONE,
    LONG_TOKENS,
    NEW_TOKENS,
    Case,
    Readings,
    Round,
    check_read,
    quietest,
    rounds_missing,
)
from services.bench.split_worst import measure_worst
from services.bench.texts import natural_tokens

TOKENS_COMPARED = 4
"""Tokens generated after each read, to compare what the runs chose."""
WARM_TOKENS = 600
CHOICE_S = 1.0
"""How long after a read the host has certainly chosen, and greeted its worker anew."""
CABLE = "usb-c"
REPEAT_UNTIL_S, REPEAT_UNTIL_S_QUICK = 1200, 90
"""Disturbed rounds are repeated until so long after the start; the whole bench has 30 and 4 minutes."""


def cases(quick: bool, models: tuple[str, ...], layer: int | None) -> list[Case]:
    """What is measured: quick is a smaller hybrid, no long reads, and of SmolLM2 depth 0 only."""
    hybrid = "hybrid-60m" if quick else "hybrid-400m"
    chosen = []
    for label in models or ("smollm2", hybrid):
        small = label == "smollm2"
        path = embedded_model() if small else ensure_preset(label)
        forty = int(ModelSpec.read(path).n_layer_full * 40 / 64)
        depths: tuple[int, ...]
        if quick:
            depths = (0,) if small else (0, 4096)
            chosen.append(Case(label, path, forty, depths, n_rounds=2, worst=not small, layer=layer))
            continue
        depths = (0, 4096) if small else (0, 4096, 16384)
        n_ctx = 8192 if small else depths[-1] + LONG_TOKENS + 512
        chosen.append(
            Case(label, path, forty, depths, 2, n_ctx, long_reads=not small, neighbours=True, layer=layer)
        )
    return chosen


# --- measuring


def measure(case: Case, report: Report) -> list[Readings]:
    """All depths of one case, on processes started for it."""
    n_layer = ModelSpec.read(case.path).n_layer_full
    with Rig(case.path, n_ctx=case.n_ctx) as rig:
        alone, forty = rig.seat_alone(), rig.seat_split(case.forty)
        _warm(rig, case, [alone, forty], report)
        chosen = case.layer or planners_choice(rig, case, report)
        beside = [chosen - 1, chosen + 1] if case.neighbours else []
        tried = sorted({chosen, *beside} - {case.forty, 0, n_layer})
        seats = [alone, forty, *(rig.seat_split(layer) for layer in tried)]
        cable = rig.seat_split(chosen, f"split{chosen}-{CABLE}", worker_emulate=CABLE)
        _warm(rig, case, [*seats[2:], cable], report)
        rig.tell_what_runs(report, case.label)
        found = _measure_depths(case, rig, seats, cable, report)
        for seat in [forty, *seats[2:], cable]:
            rig.close(seat)
        if case.worst:
            worst = measure_worst(rig, case, alone, chosen, report)
            took_part = {"tokens_returned": worst.tokens_returned}
            report.figure(f"{case.label}.worst_case_ratio", worst.ratio, **took_part)
    return found


def _measure_depths(case: Case, rig: Rig, seats: list[Seat], cable: Seat, report: Report) -> list[Readings]:
    """All seats where nothing was read before; deeper, and for long reads, those that matter."""
    found = [_measure_depth(case, case.depths[0], rig, [*seats, cable], NEW_TOKENS, report)]
    best = next(seat for seat in seats if seat.name == found[0].best)
    if case.long_reads:
        found.append(_measure_depth(case, case.depths[0], rig, [seats[0], best, cable], LONG_TOKENS, report))
    for depth in case.depths[1:]:
        few = list(dict.fromkeys([*seats[:2], best]))
        found.append(_measure_depth(case, depth, rig, few, NEW_TOKENS, report))
        if case.long_reads:
            found.append(_measure_depth(case, depth, rig, [seats[0], best], LONG_TOKENS, report))
    return found


def _warm(rig: Rig, case: Case, seats: list[Seat], report: Report) -> None:
    report.progress(f"{case.label}: starting {', '.join(seat.name for seat in seats)}")
    for seat in seats:
        rig.wait_ready(seat)
        seat.client.generate(natural_tokens(case.path, WARM_TOKENS, skip=77_000), 1)


def planners_choice(rig: Rig, case: Case, report: Report) -> int:
    """The split layer that a host chooses from the times of two reads, its worker holding three quarters."""
    n_layer = ModelSpec.read(case.path).n_layer_full
    seat = rig.seat_split(max(1, n_layer // 4), "planner", chooses=True)
    rig.wait_ready(seat)
    for number in range(2):
        seat.client.generate(natural_tokens(case.path, NEW_TOKENS, skip=number * NEW_TOKENS), 1)
        rig.wait_ready(seat)
    time.sleep(CHOICE_S)
    rig.wait_ready(seat)
    layer = rig.status(seat).worker.split_layer
    rig.close(seat)
    report.progress(f"{case.label}: the planner chose layer {layer} of {n_layer}")
    return layer


def _measure_depth(
    case: Case, depth: int, rig: Rig, seats: list[Seat], n_new: int, report: Report
) -> Readings:
    base = natural_tokens(case.path, depth)
    if depth:
        for seat in seats:
            report.progress(f"{case.label}: {seat.name} reads the first {depth:,} tokens")
            seat.client.generate(base, 1)
    rounds: list[Round] = []
    n_rounds = case.n_rounds if n_new == NEW_TOKENS else 1
    repeat_until_s = REPEAT_UNTIL_S_QUICK if report.quick else REPEAT_UNTIL_S
    while rounds_missing(rounds, n_rounds, may_repeat=report.elapsed_s < repeat_until_s):
        new = natural_tokens(case.path, n_new, skip=case.depths[-1] + (len(rounds) + 1) * n_new)
        rounds.append(_measure_round(case, depth, rig, seats, np.concatenate([base, new]), report))
    layers = {seat.name: seat.split_layer for seat in seats if seat.split_layer}
    return Readings(case, depth, quietest(rounds, n_rounds), layers, n_new)


def _measure_round(
    case: Case, depth: int, rig: Rig, seats: list[Seat], prompt: NDArray[np.int32], report: Report
) -> Round:
    """One read on every seat, of the same prompt."""
    measured, n_new = Round(), len(prompt) - depth
    for seat in seats:
        meter = LoadMeter(rig.processes.pids)
        answer = seat.client.generate(prompt, TOKENS_COMPARED)
        others_share = meter.others_share()
        where = f"{case.label} at depth {depth}, {seat.name}"
        check_read(where, depth, seat, answer, measured.answers.get(ALONE), n_new)
        measured.answers[seat.name] = answer
        measured.others_share = max(measured.others_share, others_share)
        _tell(report, case, depth, seat, answer, n_new, others_share)
    return measured


def _tell(
    report: Report, case: Case, depth: int, seat: Seat, answer: Answer, n_new: int, others_share: float
) -> None:
    read = answer.report
    report.progress(
        f"{case.label} d{depth}: {seat.name} {answer.first_token_s:.2f} s"
        f" ({n_new / answer.first_token_s:.0f} tok/s, worker {read.tokens_worker} tokens,"
        f" others used {others_share:.0%} of the cores)"
    )
    stages = [
        {name: round(getattr(stage, name), 5) for name in stage.__struct_fields__} for stage in read.stages
    ]
    report.row(
        model=case.label,
        depth=depth,
        new_tokens=n_new,
        seat=seat.name,
        split_layer=seat.split_layer,
        read_s=answer.first_token_s,
        prefill_s=read.prefill_s,
        wait_s=read.wait_s,
        worker_tokens=read.tokens_worker,
        first_token_ids=answer.token_ids,
        others_share=round(others_share, 4),
        stages=stages,
    )


# --- telling


def add_figures(report: Report, readings: Readings) -> None:
    """The figures of one (model, depth, length)."""
    name, best = f"{readings.case.label}.d{readings.depth}", readings.best
    forty = f"split{readings.case.forty}"
    took_part = {"worker_tokens": readings.worker_tokens(best), "reads_alone": len(readings.rounds)}
    report.figure(f"{name}.speedup_best_{readings.words}", readings.speedup(best), **took_part)
    if readings.n_new == NEW_TOKENS:
        report.figure(f"{name}.best_split", readings.layers[best])
    if readings.n_new == NEW_TOKENS and forty in readings.layers:
        took_part = {"worker_tokens": readings.worker_tokens(forty), "reads_alone": len(readings.rounds)}
        report.figure(f"{name}.speedup_40_64", readings.speedup(forty), **took_part)
        report.figure(f"{name}.pipeline_efficiency", readings.efficiency(forty), **took_part)
    for seat in readings.layers:
        if seat.endswith(CABLE):
            n_tokens = readings.worker_tokens(seat)
            figure = f"{name}.speedup_best_{readings.words}_{CABLE}"
            report.figure(figure, readings.speedup(seat), worker_tokens=n_tokens)
    if readings.others_share > BUSY_SHARE:
        report.note(
            f"{name} {readings.words}: other programs took up to {readings.others_share:.0%} of the cores; "
            "measure on a quiet machine"
        )


def print_table(report: Report, everything: list[Readings]) -> None:
    """One line for each (model, depth, length, seat): times, speed-up beside its limit, and where the time went."""
    rows: list[tuple[str | float, ...]] = []
    for readings in everything:
        n_layer = ModelSpec.read(readings.case.path).n_layer_full
        for seat, layer in ({ALONE: 0} | readings.layers).items():
            stages = readings.answers(seat)[-1].report.stages
            name = f"{readings.case.label} d{readings.depth} {readings.words} {seat}"
            head_ms = 1000 * median(stage.head_s for stage in stages)
            if not layer:
                rows.append((name, readings.read_s(seat), "", "", "", head_ms, "", "", ""))
                continue
            remote = stages[:-1]
            rows.append(
                (
                    f"{name}/{n_layer}",
                    readings.read_s(seat),
                    readings.speedup(seat),
                    equal_sides_limit(len(stages), layer / n_layer),
                    readings.efficiency(seat),
                    head_ms,
                    1000 * median(stage.worker_s for stage in remote),
                    1000 * median(stage.import_s for stage in remote),
                    1000 * median(answer.report.wait_s for answer in readings.answers(seat)),
                )
            )
    columns = "read s,speed-up,limit,efficiency,host ms,worker ms,import ms,wait ms".split(",")
    report.table(
        "new tokens by time to the first; per ubatch of 256: host, worker, import", ("", *columns), rows
    )


@click.command()
@click.option("--model", "models", multiple=True, help="smollm2 or a preset; may be repeated.  [both]")
@click.option("-L", "--layer", type=int, help="Split layer to take for the best.  [the planner's choice]")
@report_options
def command(
    models: tuple[str, ...], layer: int | None, as_json: bool, quick: bool, results_folder: Path | None
) -> None:
    """Prefill with and without the worker, one core and one thread each.

    Starts host, bridge and worker processes of its own on free ports, the host's on one core and the workers on the
    other. The baseline is the host alone on its one core.
    """
    chosen = cases(quick, models, layer)
    report = Report(
        "split",
        "+".join(case.label for case in chosen),
        as_json=as_json,
        quick=quick,
        results_folder=results_folder,
    )
    everything: list[Readings] = []
    for case in chosen:
        everything += measure(case, report)
    for readings in everything:
        add_figures(report, readings)
    print_table(report, everything)
    report.finish()
