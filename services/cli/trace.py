"""`outrigger trace`: where the time of a read went, as a picture, a page, or a trace for chrome://tracing.

Reads the file that the mac process keeps in its run directory; the process need not run any more. Called as a
subcommand of services.cli.main.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from common.config import find_file, load_settings
from common.errors import SettingError
from services.bench.timeline import LANES, bars_of, busy_s, chrome_trace, title_of
from services.mac.read_log import FILE_NAME, KEPT, LoggedRead, load_reads

TABLE_COLUMNS = 110
"""Width when the output is no terminal."""
SUFFIXES = (".svg", ".html", ".json")


@click.command()
@click.argument("read", default="last", metavar="[last|list|NUMBER]")
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to write: .svg, .html, or .json (Chrome trace). Without it: a table.",
)
@click.option("--run-dir", help="Run directory of the processes.  [as configured]")
def command(read: str, out: Path | None, run_dir: str | None) -> None:
    """Where the time of a read went: host, link and worker, ubatch by ubatch.

    The last reads are kept; `outrigger trace list` shows them. A NUMBER is one of that list.
    """
    settings = load_settings(find_file(os.environ), os.environ, {"run_dir": run_dir})
    reads = load_reads(settings.run_dir / FILE_NAME)
    if not reads:
        raise SettingError(
            f"no read is kept in {settings.run_dir / FILE_NAME}: start `outrigger run`, ask something, and try again"
        )
    if read == "list":
        for kept in reads[-KEPT:]:
            click.echo(title_of(kept))
        return
    chosen = pick(reads, read)
    if out is None:
        print_stages(chosen)
        return
    out.write_text(rendered(chosen, out.suffix.lower()), encoding="utf-8")
    click.echo(f"{title_of(chosen)}\nwritten to {out}")


def pick(reads: list[LoggedRead], name: str) -> LoggedRead:
    """The read that is meant. Raises SettingError."""
    if name == "last":
        return reads[-1]
    found = [kept for kept in reads if str(kept.number) == name]
    if not found:
        raise SettingError(
            f"there is no read {name!r}: give last, list, or {reads[0].number} to {reads[-1].number}"
        )
    return found[-1]


def rendered(read: LoggedRead, suffix: str) -> str:
    """The read as a document of that kind. Raises SettingError."""
    if suffix not in SUFFIXES:
        raise SettingError(
            f"what a file ending in {suffix or 'nothing'} should hold is not known: use {', '.join(SUFFIXES)}"
        )
    if suffix == ".json":
        return chrome_trace(read)
    from services.bench.drawing import html_of, svg_of

    return svg_of(read) if suffix == ".svg" else html_of(read)


def milliseconds(seconds: float) -> str:
    """With as many digits as can be told apart."""
    return f"{1000 * seconds:,.0f}" if seconds >= 0.1 else f"{1000 * seconds:.1f}"


def print_stages(read: LoggedRead) -> None:
    """The stages as a table in milliseconds, and how busy each lane was."""
    report = read.report
    table = Table(title=title_of(read), title_justify="left", box=None)
    for column in ("ubatch", "position", "tokens", "head", "sent at", "worker", "waited", "round trip"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("home at", "import", "tail"):
        table.add_column(column, justify="right", no_wrap=True)
    for index, stage in enumerate(report.stages):
        sent = (stage.head_s, stage.sent_at_s, stage.worker_s, stage.queue_s, stage.round_trip_s)
        times = (*sent, stage.ack_at_s, stage.import_s, stage.tail_s)
        cells = (milliseconds(seconds) if seconds else "" for seconds in times)
        table.add_row(str(index), f"{stage.position:,}", str(stage.n_tokens), *cells)
    console = Console() if sys.stdout.isatty() else Console(width=TABLE_COLUMNS)
    console.print(table)
    bars = bars_of(report.stages)
    shares = (f"{lane} {busy_s(bars, lane) / (report.prefill_s or 1):.0%}" for lane in LANES)
    console.print(
        f"busy: {', '.join(shares)}; the host waited {1000 * report.wait_s:.1f} ms", highlight=False
    )
