"""`outrigger verify`: proves on this machine that answers do not depend on the worker. Exit 1 when they do.

Parts: --split (the default) compares token ids with and without a worker; --turns compares chats that reuse what was
read before with reading everything again; --parity compares the engine's logits with stock llama.cpp of the same build;
--frozen compares attention by frozen pages with ordinary kernels; --held compares keys and values that left the host's
memory with all kept there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

import click

from services.bench.report import Report, report_options


@click.command()
@click.option(
    "--split", "part", flag_value="split", default="split", help="With and without worker.  [default]"
)
@click.option(
    "--turns",
    "part",
    flag_value="turns",
    help="Chats that reuse earlier turns against reading everything again.",
)
@click.option(
    "--parity", "part", flag_value="parity", help="The engine against stock llama.cpp, bit for bit."
)
@click.option(
    "--faults",
    "part",
    flag_value="faults",
    help="Every fault of the cable and the worker at every moment, and kill -9 of each process.",
)
@click.option(
    "--fuzz", "part", flag_value="fuzz", help="Hostile frames and lines to the codec and to a worker."
)
@click.option(
    "--frozen", "part", flag_value="frozen", help="Old keys as page programs, against ordinary kernels."
)
@click.option(
    "--held", "part", flag_value="held", help="Old pages out of the host's memory, against all kept there."
)
@click.option(
    "--accumulator",
    type=click.Choice(["fp32", "block64", "in-order"]),
    default="fp32",
    show_default=True,
    help="With --frozen: how page programs add; all but fp32 flush subnormals, too.",
)
@report_options
def command(part: str, accumulator: str, as_json: bool, quick: bool, results_folder: Path | None) -> None:
    """Compare answers that must be equal. Starts its own processes on free ports; nothing running is touched."""
    run = partial(_frozen, accumulator) if part == "frozen" else PARTS[part]
    if not run(partial(Report, as_json=as_json, quick=quick, results_folder=results_folder), quick):
        raise SystemExit(1)


MakeReport = Callable[[str, str], Report]
"""(bench, model) -> its report"""


def _split(report_of: MakeReport, quick: bool) -> bool:
    verify = import_module("services.bench.verify")
    report = report_of("verify", _labels(verify.models(quick)))
    totals = verify.verify_split(report)
    report.figure("compared", totals.compared, compared=totals.compared)
    report.figure("equal", totals.equal)
    report.figure("worker_tokens", totals.worker_tokens, worker_tokens=totals.worker_tokens)
    report.figure("worker_kills", totals.worker_kills)
    return _finish(report, totals.passed, totals.problems)


def _turns(report_of: MakeReport, quick: bool) -> bool:
    verify = import_module("services.bench.verify_turns")
    report = report_of("verify_turns", _labels(verify.models(quick)))
    totals = verify.verify_turns(report)
    report.figure("compared", totals.compared, compared=totals.compared)
    report.figure("equal", totals.equal)
    report.figure("reread_tokens_max", totals.reread_tokens_max)
    report.figure("tokens_cache", totals.tokens_cache, tokens_cache=totals.tokens_cache)
    report.figure("tokens_worker", totals.tokens_worker, tokens_worker=totals.tokens_worker)
    return _finish(report, totals.passed, totals.problems)


def _parity(report_of: MakeReport, quick: bool) -> bool:
    report = report_of("verify_parity", "")
    compared, equal = import_module("services.bench.parity").verify_parity(report)
    report.figure("compared", compared, compared=compared)
    report.figure("equal", equal)
    return _finish(report, compared == equal, ())


def _faults(report_of: MakeReport, quick: bool) -> bool:
    verify = import_module("services.bench.verify_faults")
    report = report_of("verify_faults", _labels(verify.fault_models(quick)))
    counts = verify.verify_faults(report)
    return _finish(report, counts.passed, counts.problems)


def _frozen(accumulator: str, report_of: MakeReport, quick: bool) -> bool:
    verify = import_module("services.bench.verify_frozen")
    report = report_of("verify_frozen", _labels(verify.frozen_models(quick)))
    totals = verify.verify_frozen(report, verify.arithmetic_of(accumulator))
    report.figure("compared", totals.compared, compared=totals.compared)
    report.figure("equal", totals.frozen.top1)
    report.figure("near_ties", totals.near_ties)
    report.figure("frozen_keys", totals.frozen.keys, frozen_keys=totals.frozen.keys)
    for way in totals.ways:
        report.figure(
            f"attention_error_max{way.name}", _rounded(way.attention_max), layers=len(way.attention)
        )
    for way in totals.ways[1:]:
        report.figure(f"layer_error_max{way.name}", _rounded(way.layer_max), layers=len(way.layers))
        report.figure(f"kl_mean{way.name}", _rounded(way.kl_mean), tokens=len(way.kl))
        report.figure(f"top1{way.name}", round(way.top1 / totals.compared, 4))
    for tie in totals.ties:
        click.echo(f"NEAR TIE {tie}", err=True)
    problems = totals.problems()
    return _finish(report, not problems, problems)


def _held(report_of: MakeReport, quick: bool) -> bool:
    verify = import_module("services.bench.verify_held")
    report = report_of("verify_held", _labels(verify.held_models(quick)))
    totals = verify.verify_held(report)
    close = totals.closeness
    report.figure("compared", totals.compared, compared=totals.compared)
    report.figure("equal", totals.equal)
    report.figure("remote_answers", totals.remote_answers, remote_answers=totals.remote_answers)
    report.figure("fallbacks", totals.fallbacks, fallbacks=totals.fallbacks)
    report.figure("shadow_checks", totals.shadow_checks, shadow_checks=totals.shadow_checks)
    report.figure("tokens_compared", totals.tokens_compared, tokens_compared=totals.tokens_compared)
    report.figure("tokens_equal", totals.tokens_equal)
    report.figure("strikes", sum(each.strikes for each in totals.processes))
    report.figure("remote_groups", sum(each.remote_groups for each in totals.processes))
    report.figure("journal_groups", sum(each.journal_groups for each in totals.processes))
    report.figure("top1_vs_stock", round(close.top1_vs_stock, 4), tokens=close.compared)
    report.figure("stock_flash_vs_nonflash", round(close.stock_flash_vs_nonflash, 4))
    report.figure("gap_max", round(max((d.gap for d in close.differences), default=0.0), 3))
    return _finish(report, totals.passed, totals.differences + totals.problems)


def _fuzz(report_of: MakeReport, quick: bool) -> bool:
    report = report_of("verify_fuzz", "synthetic")
    counts = import_module("services.bench.verify_fuzz").verify_fuzz(report)
    report.figure("frames", counts.frames, frames=counts.frames)
    report.figure("guided_runs", counts.guided_runs)
    report.figure("connections", counts.connections, connections=counts.connections)
    report.figure("control_lines", counts.control_lines, control_lines=counts.control_lines)
    report.figure("honest_hosts_served", counts.honest_hosts, honest_hosts=counts.honest_hosts)
    report.figure("errors_a_connection_max", counts.errors_a_connection_max)
    report.figure("rss_growth_mb", round(counts.rss_growth_bytes / 1e6, 1))
    report.figure("problems", len(counts.problems))
    return _finish(report, counts.passed, counts.problems)


PARTS: dict[str, Callable[[MakeReport, bool], bool]] = {
    "split": _split,
    "turns": _turns,
    "parity": _parity,
    "faults": _faults,
    "fuzz": _fuzz,
    "held": _held,
}
"""All but the one that takes an option more."""


def _labels(models: Sequence[tuple[str, Path]]) -> str:
    return "+".join(label for label, _path in models)


def _finish(report: Report, passed: bool, problems: Sequence[str]) -> bool:
    for problem in problems:
        click.echo(f"PROBLEM {problem}", err=True)
    report.finish()
    return passed


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
