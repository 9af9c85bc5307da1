"""`outrigger bench split-decode`: what a token costs when the host holds the head layers alone, against the whole host.

One host with the whole model on one core, and one with the layers before L, whose worker has the other core. Rounds of
the same prompt take turns; a figure is the median of the rounds and is refused when a token differs. Rounds that other
programs disturbed are told.

    <model>.ms_per_token            an answer's token with split decode
    <model>.host_ms, worker_ms, link_ms   of it: the host's layers, the worker's layers and output, all the rest
    <model>.alone_ms_per_token      the same token on the host that holds everything
    <model>.decode_ratio            ms_per_token / alone_ms_per_token
    <model>.prefill_ratio           seconds to the first token / those of the host alone
    <model>.host_share              resident memory of the split host / that of the whole one
    <model>.reread_s                from killing the worker in the middle of an answer to its next token
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click
import psutil

from common.model.embedded import embedded_model
from common.model.spec import ModelSpec
from common.model.synthetic import ensure_preset
from services.bench.client import Answer
from services.bench.load import BUSY_SHARE, LoadMeter
from services.bench.report import NotMeasuredError, Report, report_options
from services.bench.rig import Rig, Seat
from services.bench.texts import natural_tokens

PROMPT_TOKENS, ANSWER_TOKENS = 1024, 64
N_CTX = 2048
ROUNDS, ROUNDS_QUICK = 5, 2


@dataclass(frozen=True)
class Token:
    """Milliseconds of one token of an answer, by where they went."""

    all_ms: float
    host_ms: float
    worker_ms: float

    @property
    def link_ms(self) -> float:
        """Bus, bridge, cable, choosing: whatever is neither side's layers."""
        return self.all_ms - self.host_ms - self.worker_ms

    @classmethod
    def of(cls, answer: Answer) -> Token:
        """The mean token of an answer; its first one is the prompt's and not counted."""
        n, report = len(answer.token_ids) - 1, answer.report
        times = (report.decode_s, report.decode_head_s, report.decode_worker_s)
        return cls(*(1000 * seconds / n for seconds in times))


def measure(label: str, path: Path, layer: int | None, report: Report) -> None:
    """All figures of one model."""
    n_layer = ModelSpec.read(path).n_layer_full
    layer = layer or n_layer * 5 // 8
    with Rig(path, n_ctx=N_CTX) as rig:
        alone = rig.seat_alone()
        split = rig.seat_split(layer, f"head{layer}", split_decode="on")
        for seat in (alone, split):
            rig.wait_ready(seat)
            seat.client.generate(natural_tokens(path, 300, skip=50_000), 4)
        rig.tell_what_runs(report, label)
        rounds = [
            _measure_round(label, rig, alone, split, number, report)
            for number in range(ROUNDS_QUICK if report.quick else ROUNDS)
        ]
        _tell(label, rounds, report)
        whole, head = (psutil.Process(rig.pids(seat)["mac"]).memory_info().rss for seat in (alone, split))
        report.figure(f"{label}.host_share", head / whole, bytes_whole=whole)
        _measure_loss(label, rig, split, rounds[0][1], report)


def _measure_round(
    label: str, rig: Rig, alone: Seat, split: Seat, number: int, report: Report
) -> tuple[Answer, Answer]:
    prompt = natural_tokens(rig.model, PROMPT_TOKENS, skip=number * PROMPT_TOKENS)
    meter = LoadMeter(rig.processes.pids)
    right, found = (seat.client.generate(prompt, ANSWER_TOKENS) for seat in (alone, split))
    others_share = meter.others_share()
    if right.token_ids != found.token_ids:
        raise NotMeasuredError(
            f"{label}: split decode wrote {found.token_ids}, the whole host {right.token_ids}"
        )
    if found.report.fallbacks or found.report.tokens_worker != PROMPT_TOKENS:
        raise NotMeasuredError(f"{label}: the worker was lost: {found.report.fallbacks}")
    one, both = Token.of(right), Token.of(found)
    report.progress(
        f"{label}: a token {both.all_ms:.2f} ms (host {both.host_ms:.2f}, worker {both.worker_ms:.2f}, link "
        f"{both.link_ms:.2f}), alone {one.all_ms:.2f} ms; others used {others_share:.0%} of the cores"
    )
    if others_share > BUSY_SHARE:
        report.note(f"{label} round {number}: other programs took {others_share:.0%} of the cores")
    report.row(
        model=label,
        split_layer=split.split_layer,
        ms_per_token=both.all_ms,
        host_ms=both.host_ms,
        worker_ms=both.worker_ms,
        link_ms=both.link_ms,
        alone_ms_per_token=one.all_ms,
        read_s=found.first_token_s,
        alone_read_s=right.first_token_s,
        others_share=round(others_share, 4),
    )
    return right, found


def _tell(label: str, rounds: list[tuple[Answer, Answer]], report: Report) -> None:
    n_tokens = {"tokens_compared": len(rounds) * ANSWER_TOKENS}
    one, both = ([Token.of(answer) for answer in side] for side in zip(*rounds, strict=True))
    alone_ms, split_ms = (median(token.all_ms for token in side) for side in (one, both))
    report.figure(f"{label}.ms_per_token", split_ms, **n_tokens)
    report.figure(f"{label}.host_ms", median(token.host_ms for token in both), **n_tokens)
    report.figure(f"{label}.worker_ms", median(token.worker_ms for token in both), **n_tokens)
    report.figure(f"{label}.link_ms", median(token.link_ms for token in both), **n_tokens)
    report.figure(f"{label}.alone_ms_per_token", alone_ms, **n_tokens)
    report.figure(f"{label}.decode_ratio", split_ms / alone_ms, **n_tokens)
    read = [median(answer.first_token_s for answer in side) for side in zip(*rounds, strict=True)]
    report.figure(f"{label}.prefill_ratio", read[1] / read[0], **n_tokens)


def _measure_loss(label: str, rig: Rig, split: Seat, before: Answer, report: Report) -> None:
    """Ask the first prompt again, kill the worker in the middle of the answer, and start it again."""
    killed_s = found_s = 0.0

    def on_token(index: int, _token_id: int) -> None:
        nonlocal killed_s, found_s
        if index == ANSWER_TOKENS // 2:
            rig.processes.kill(f"{split.name}-worker")
            killed_s = time.monotonic()
            rig.restart_worker(split)
        elif index > ANSWER_TOKENS // 2 and not found_s:
            found_s = time.monotonic()

    client, started_s = split.client, time.monotonic()
    name = client.start(natural_tokens(rig.model, PROMPT_TOKENS), ANSWER_TOKENS)
    found = client.finish(name, started_s, on_token)
    if found.token_ids != before.token_ids:
        raise NotMeasuredError(f"{label}: after a loss it wrote {found.token_ids}, before {before.token_ids}")
    took_part = {"tokens_reread": found.report.tokens_reread}
    report.figure(f"{label}.reread_s", found_s - killed_s, **took_part)


@click.command()
@click.option("--model", "models", multiple=True, help="smollm2 or a preset; may be repeated.  [both]")
@click.option("-L", "--layer", type=int, help="First layer that the worker holds.  [5/8 of the layers]")
@report_options
def command(
    models: tuple[str, ...], layer: int | None, as_json: bool, quick: bool, results_folder: Path | None
) -> None:
    """Decode with the head layers alone on the host, the rest and the output on the worker, one thread each.

    Starts host, bridge and worker processes of its own on free ports. The baseline is a host with the whole model.
    """
    chosen = models or ("smollm2", "hybrid-60m")
    report = Report(
        "split-decode", "+".join(chosen), as_json=as_json, quick=quick, results_folder=results_folder
    )
    for label in chosen:
        path = embedded_model() if label == "smollm2" else ensure_preset(label)
        measure(label, path, layer, report)
    report.finish()
