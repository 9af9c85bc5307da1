"""`outrigger bench rpc`: llama.cpp split over its own RPC backend, and ours, each against its own host alone.

The same file, one thread on one core for the host and one for the far side, everything on this machine. Each side may
choose: llama.cpp its split, both of its ways (rpc_runs.py) and its ubatch; we our split layer. Then rounds of all four
reads take turns, and those count in which other programs took least of the machine. llama.cpp's reads are random token
ids without choosing a next token, as llama-bench does it; ours are text, from asking to the first token.

    <model>.rpc_speedup          llama.cpp alone / llama.cpp with RPC, medians of 2,048-token reads
    <model>.outrigger_speedup    our host alone / our host with its worker
    <model>.llama_alone_s, rpc_s, outrigger_alone_s, outrigger_s   those medians
    <model>.rpc_layers_far, outrigger_layers_far                   layers on the far side, as chosen

Raw rows are in results/rpc.jsonl. Called by `make bench-rpc`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import click

from common.errors import ServiceError
from common.model.embedded import embedded_model
from common.model.spec import ModelSpec
from common.model.synthetic import ensure_preset
from services.bench.load import BUSY_SHARE, LoadMeter
from services.bench.report import Report, report_options
from services.bench.rig import Rig, Seat
from services.bench.rounds import NEW_TOKENS, Case, check_read
from services.bench.rpc_build import rpc_programs
from services.bench.rpc_runs import Bench, Way
from services.bench.split import planners_choice
from services.bench.texts import natural_tokens
from services.setup.checks import SetupError

N_CTX = 4096
UBATCH = 256
"""Ours; llama.cpp may take another."""
OTHER_UBATCHES = (128, 512)
ROUNDS, ROUNDS_QUICK = 3, 1
LLAMA_ALONE, RPC, OURS_ALONE, OURS = SIDES = ("llama_alone", "rpc", "outrigger_alone", "outrigger")


@dataclass
class Rounds:
    """Seconds by side, round by round, and what others took of the machine in each."""

    read_s: list[dict[str, float]] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    far_cpu_s: float = 0.0
    worker_tokens: int = 0

    def median_s(self, side: str, n_wanted: int) -> float:
        """Over the n_wanted rounds in which others took least."""
        order = sorted(range(len(self.read_s)), key=lambda index: self.others[index])
        return median(self.read_s[index][side] for index in order[:n_wanted])


def splits_to_try(n_layer: int, quick: bool) -> list[int]:
    """Numbers of layers on the far side: around the half, which equal cores make the best.

    >>> splits_to_try(30, False), splits_to_try(32, True), splits_to_try(4, False)
    ([12, 13, 14, 15, 16, 17, 18], [14, 16, 18], [1, 2, 3])
    """
    half = n_layer // 2
    if quick and n_layer > 8:
        return [half - 2, half, half + 2]
    reach = max(1, n_layer // 10)
    return [n for n in range(half - reach, half + reach + 1) if 0 < n < n_layer]


class Contest:
    """All reads of one model."""

    def __init__(self, label: str, path: Path, rig: Rig, bench: Bench, report: Report) -> None:
        self.label, self.path, self.report = label, path, report
        self._rig, self._bench = rig, bench
        self.n_layer = ModelSpec.read(path).n_layer_full

    # --- one read

    def llama(self, way: Way, kind: str) -> tuple[float, float]:
        """(seconds, processor seconds of the far server)."""
        meter = LoadMeter(self._rig.processes.pids)
        run = self._bench.read(way, NEW_TOKENS)
        self._told(kind, RPC if way.n_far else LLAMA_ALONE, way.name, run.read_s, meter.others_share())
        return run.read_s, run.far_cpu_s

    def ours(self, seat: Seat, prompt_number: int, kind: str) -> tuple[float, int]:
        """(seconds to the first token, tokens whose tail the worker ran)."""
        prompt = natural_tokens(self.path, NEW_TOKENS, skip=(1 + prompt_number) * NEW_TOKENS)
        meter = LoadMeter(self._rig.processes.pids)
        answer = seat.client.generate(prompt, 2)
        check_read(f"{self.label}, {seat.name}", 0, seat, answer, None)
        side = OURS if seat.split_layer else OURS_ALONE
        self._told(kind, side, seat.name, answer.first_token_s, meter.others_share())
        return answer.first_token_s, answer.report.tokens_worker

    def _told(self, kind: str, side: str, what: str, read_s: float, others_share: float) -> None:
        self.report.progress(
            f"{self.label}: {side}, {what}: {read_s:.2f} s ({NEW_TOKENS / read_s:.0f} tok/s), "
            f"others used {others_share:.0%} of the cores"
        )
        self.report.row(
            model=self.label,
            kind=kind,
            side=side,
            what=what,
            new_tokens=NEW_TOKENS,
            read_s=round(read_s, 4),
            others_share=round(others_share, 4),
        )

    # --- choosing

    def choose_llama(self, quick: bool) -> tuple[Way, Way]:
        """(alone, with RPC): the fastest of what there is to choose, one read each."""

        def fastest(ways: list[Way]) -> Way:
            return min(ways, key=lambda way: self.llama(way, "choose")[0])

        alone = fastest([Way(0, n) for n in ((UBATCH,) if quick else (UBATCH, *OTHER_UBATCHES))])
        ways = [Way(n, UBATCH, in_turn=True) for n in splits_to_try(self.n_layer, quick)]
        # Without a pipeline the far side is not worth half of the layers: its server keeps no repacked weights.
        ways += [Way(self.n_layer * eighths // 8, UBATCH) for eighths in ((3,) if quick else (2, 3, 4))]
        best = fastest(ways)
        if not quick:
            others = [Way(best.n_far, n, best.in_turn) for n in (UBATCH, *OTHER_UBATCHES)]
            best = fastest(others)
        return alone, best

    def choose_ours(self, case: Case, quick: bool) -> Seat:
        """A host that splits at the planner's layer, or beside it where that is faster."""
        chosen = planners_choice(self._rig, case, self.report)
        tried = [chosen] if quick else [chosen - 1, chosen, chosen + 1]
        seats = [self._rig.seat_split(layer) for layer in tried if 0 < layer < self.n_layer]
        for seat in seats:
            self.warm(seat)
        best = min(seats, key=lambda seat: self.ours(seat, 0, "choose")[0]) if len(seats) > 1 else seats[0]
        for seat in seats:
            if seat is not best:
                self._rig.close(seat)
        return best

    def warm(self, seat: Seat) -> None:
        """One read that does not count."""
        self._rig.wait_ready(seat)
        seat.client.generate(natural_tokens(self.path, 600, skip=77_000), 1)


def measure(label: str, path: Path, report: Report) -> None:
    """Choose, then rounds, then the figures of one model. Raises SetupError when the programs cannot be made."""
    programs = rpc_programs()
    n_layer, n_rounds = ModelSpec.read(path).n_layer_full, ROUNDS_QUICK if report.quick else ROUNDS
    with Rig(path, n_ctx=N_CTX) as rig:
        bench = Bench(programs, path, n_layer, (rig.host_core, rig.worker_core))
        contest = Contest(label, path, rig, bench, report)
        alone_way, rpc_way = contest.choose_llama(report.quick)
        alone = rig.seat_alone()
        contest.warm(alone)
        split = contest.choose_ours(Case(label, path, 0, (0,), n_rounds), report.quick)
        rig.tell_what_runs(report, label)
        report.ran(f"{label} llama.cpp", f"{programs.made_from}; {alone_way.name}; {rpc_way.name}")
        rounds = Rounds()
        while len(rounds.read_s) < n_rounds or (
            sum(share <= BUSY_SHARE for share in rounds.others) < n_rounds
            and len(rounds.read_s) < 2 * n_rounds
            and not report.quick
        ):
            _round(contest, rig, alone_way, rpc_way, alone, split, rounds)
    _figures(contest, rounds, n_rounds, rpc_way, split)


def _round(
    contest: Contest, rig: Rig, alone_way: Way, rpc_way: Way, alone: Seat, split: Seat, rounds: Rounds
) -> None:
    """All four reads, one after the other."""
    number = 1 + len(rounds.read_s)
    meter = LoadMeter(rig.processes.pids)
    llama_alone_s, _ = contest.llama(alone_way, "round")
    rpc_s, far_cpu_s = contest.llama(rpc_way, "round")
    ours_alone_s, _ = contest.ours(alone, number, "round")
    ours_s, worker_tokens = contest.ours(split, number, "round")
    rounds.read_s.append(
        dict(zip(SIDES, (llama_alone_s, rpc_s, ours_alone_s, ours_s), strict=True)),
    )
    rounds.others.append(meter.others_share())
    rounds.far_cpu_s += far_cpu_s
    rounds.worker_tokens += worker_tokens


def _figures(contest: Contest, rounds: Rounds, n_rounds: int, rpc_way: Way, split: Seat) -> None:
    label, report = contest.label, contest.report
    read_s = {side: rounds.median_s(side, n_rounds) for side in SIDES}
    report.figure(f"{label}.rpc_speedup", read_s[LLAMA_ALONE] / read_s[RPC], far_cpu_s=rounds.far_cpu_s)
    took_part = {"worker_tokens": rounds.worker_tokens}
    report.figure(f"{label}.outrigger_speedup", read_s[OURS_ALONE] / read_s[OURS], **took_part)
    for side in SIDES:
        report.figure(f"{label}.{side}_s", read_s[side])
    report.figure(f"{label}.rpc_layers_far", rpc_way.n_far)
    report.figure(f"{label}.outrigger_layers_far", contest.n_layer - split.split_layer)
    busy = sorted(rounds.others)[n_rounds - 1]
    if busy > BUSY_SHARE:
        report.note(f"{label}: other programs took up to {busy:.0%} of the cores; measure on a quiet machine")


@click.command()
@click.option("--model", "models", multiple=True, help="smollm2 or a preset; may be repeated.  [both]")
@report_options
def command(models: tuple[str, ...], as_json: bool, quick: bool, results_folder: Path | None) -> None:
    """llama.cpp over its RPC backend and ours, each against its own host alone, one core and one thread a side.

    The first run compiles llama-bench and the RPC server from the source package of our own wheel (cmake and a C++
    compiler are needed; about ten minutes of one core) and keeps them in .outrigger/rpc.
    """
    chosen = models or ("smollm2", "hybrid-60m" if quick else "hybrid-400m")
    report = Report("rpc", "+".join(chosen), as_json=as_json, quick=quick, results_folder=results_folder)
    try:
        for label in chosen:
            measure(label, embedded_model() if label == "smollm2" else ensure_preset(label), report)
    except SetupError as error:
        raise ServiceError(f"bench rpc: {error}") from error
    report.finish()
