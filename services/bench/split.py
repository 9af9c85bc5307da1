"""`outrigger bench split`: prefill on the host alone against host and worker together, one core and one thread each.

For every model and depth, rounds of one read alone and one for each split layer, taking turns on the same machine: new
tokens are always 2,048, after `depth` tokens that are there already. A figure is a ratio of medians of such reads, and
is refused unless the worker ran the tail of all ubatches but the last and every run chose the same next tokens. Rounds
that other programs disturbed are repeated, and the least disturbed ones count.

    <model>.d<depth>.speedup_40_64        time alone / time split with 40/64 of the layers on the host
    <model>.d<depth>.speedup_best_2k      the best of the split layers tried
    <model>.d<depth>.best_split           that split layer
    <model>.d<depth>.pipeline_efficiency  bound by the run's own stage times / time, at 40/64
"""

from __future__ import annotations

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
from services.bench.rounds import NEW_TOKENS, Case, Readings, Round, check_read, quietest, rounds_missing
from services.bench.texts import natural_tokens

TOKENS_COMPARED = 4
"""Tokens generated after each read, to compare what the runs chose."""
DEPTHS = (0, 4096)
REPEAT_UNTIL_S, REPEAT_UNTIL_S_QUICK = 1200, 90
"""Disturbed rounds are repeated until so long after the start; the whole bench has 30 and 4 minutes."""


def cases(quick: bool, models: tuple[str, ...], layers: tuple[int, ...]) -> list[Case]:
    """What is measured: quick is a smaller hybrid, and no second depth on the slower SmolLM2."""
    n_rounds = 2 if quick else 3
    hybrid = "hybrid-60m" if quick else "hybrid-400m"
    chosen = []
    for label in models or ("smollm2", hybrid):
        path = embedded_model() if label == "smollm2" else ensure_preset(label)
        n_layer = ModelSpec.read(path).n_layer_full
        split_layers = layers or _split_layers(n_layer, quick)
        depths = DEPTHS[:1] if quick and label == "smollm2" else DEPTHS
        chosen.append(Case(label, path, split_layers, depths, n_rounds))
    return chosen


def _split_layers(n_layer: int, quick: bool) -> tuple[int, ...]:
    """40/64 of the layers, half of them, and in the full form one less than half: the host has more to do besides."""
    forty = int(n_layer * 40 / 64)
    return (forty, n_layer // 2) if quick else (forty, n_layer // 2, n_layer // 2 - 1)


# --- measuring


def measure(case: Case, report: Report) -> list[Readings]:
    """All depths of one case, on processes started for it."""
    report.progress(
        f"{case.label}: starting host alone and splits at {', '.join(map(str, case.split_layers))}"
    )
    with Rig(case.path, n_ctx=case.n_ctx) as rig:
        seats = [rig.seat_alone(), *(rig.seat_split(layer) for layer in case.split_layers)]
        for seat in seats:
            rig.wait_ready(seat)
            seat.client.generate(natural_tokens(case.path, 600, skip=77_000), 1)
        rig.tell_what_runs(report, case.label)
        return [_measure_depth(case, depth, rig, seats, report) for depth in case.depths]


def _measure_depth(case: Case, depth: int, rig: Rig, seats: list[Seat], report: Report) -> Readings:
    base = natural_tokens(case.path, depth)
    if depth:
        for seat in seats:
            report.progress(f"{case.label}: {seat.name} reads the first {depth:,} tokens")
            seat.client.generate(base, 1)
    rounds: list[Round] = []
    repeat_until_s = REPEAT_UNTIL_S_QUICK if report.quick else REPEAT_UNTIL_S
    while rounds_missing(rounds, case.n_rounds, may_repeat=report.elapsed_s < repeat_until_s):
        new = natural_tokens(case.path, NEW_TOKENS, skip=DEPTHS[-1] + (len(rounds) + 1) * NEW_TOKENS)
        rounds.append(_measure_round(case, depth, rig, seats, np.concatenate([base, new]), report))
    return Readings(case, depth, quietest(rounds, case.n_rounds))


def _measure_round(
    case: Case, depth: int, rig: Rig, seats: list[Seat], prompt: NDArray[np.int32], report: Report
) -> Round:
    """One read on every seat, of the same prompt."""
    measured = Round()
    for seat in seats:
        meter = LoadMeter(rig.processes.pids)
        answer = seat.client.generate(prompt, TOKENS_COMPARED)
        others_share = meter.others_share()
        check_read(
            f"{case.label} at depth {depth}, {seat.name}", depth, seat, answer, measured.answers.get(0)
        )
        measured.answers[seat.split_layer] = answer
        measured.others_share = max(measured.others_share, others_share)
        _tell(report, case, depth, seat, answer, others_share)
    return measured


def _tell(report: Report, case: Case, depth: int, seat: Seat, answer: Answer, others_share: float) -> None:
    read = answer.report
    report.progress(
        f"{case.label} d{depth}: {seat.name} {answer.first_token_s:.2f} s"
        f" ({NEW_TOKENS / answer.first_token_s:.0f} tok/s, worker {read.tokens_worker} tokens,"
        f" others used {others_share:.0%} of the cores)"
    )
    stages = [
        {name: round(getattr(stage, name), 5) for name in stage.__struct_fields__} for stage in read.stages
    ]
    report.row(
        model=case.label,
        depth=depth,
        new_tokens=NEW_TOKENS,
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
    """The four figures of one (model, depth)."""
    forty, best = readings.case.split_layers[0], readings.best_layer
    name = f"{readings.case.label}.d{readings.depth}"
    took_part = {"worker_tokens": readings.worker_tokens(forty), "reads_alone": len(readings.rounds)}
    report.figure(f"{name}.speedup_40_64", readings.speedup(forty), **took_part)
    report.figure(
        f"{name}.speedup_best_2k", readings.speedup(best), worker_tokens=readings.worker_tokens(best)
    )
    report.figure(f"{name}.best_split", best)
    report.figure(f"{name}.pipeline_efficiency", readings.efficiency(forty), **took_part)
    if readings.others_share > BUSY_SHARE:
        report.note(
            f"{name}: other programs took up to {readings.others_share:.0%} of the cores; measure on a quiet machine"
        )


def print_table(report: Report, everything: list[Readings]) -> None:
    """One line for each (model, depth, split layer): times, speed-up beside its limit, and where the time went."""
    rows: list[tuple[str | float, ...]] = []
    for readings in everything:
        n_layer = ModelSpec.read(readings.case.path).n_layer_full
        for layer in (0, *readings.case.split_layers):
            stages = readings.answers(layer)[-1].report.stages
            name = f"{readings.case.label} d{readings.depth}"
            head_ms = 1000 * median(stage.head_s for stage in stages)
            if not layer:
                rows.append((f"{name} alone", readings.read_s(0), "", "", "", head_ms, "", "", ""))
                continue
            remote = stages[:-1]
            rows.append(
                (
                    f"{name} split at {layer}/{n_layer}",
                    readings.read_s(layer),
                    readings.speedup(layer),
                    equal_sides_limit(len(stages), layer / n_layer),
                    readings.efficiency(layer),
                    head_ms,
                    1000 * median(stage.worker_s for stage in remote),
                    1000 * median(stage.import_s for stage in remote),
                    1000 * median(answer.report.wait_s for answer in readings.answers(layer)),
                )
            )
    columns = "read s,speed-up,limit,efficiency,host ms,worker ms,import ms,wait ms".split(",")
    report.table("2,048 new tokens; per ubatch of 256: host, worker, import", ("", *columns), rows)


@click.command()
@click.option("--model", "models", multiple=True, help="smollm2 or a preset; may be repeated.  [both]")
@click.option("-L", "--layer", "layers", multiple=True, type=int, help="Split layers to try, 40/64 first.")
@report_options
def command(
    models: tuple[str, ...], layers: tuple[int, ...], as_json: bool, quick: bool, results_folder: Path | None
) -> None:
    """Prefill with and without the worker, one core and one thread each.

    Starts host, bridge and worker processes of its own on free ports, the host's on one core and the workers on the
    other. The baseline is the host alone on its one core.
    """
    chosen = cases(quick, models, layers)
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
