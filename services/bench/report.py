"""How every bench and verify speaks: progress, a table for people, raw rows on disk, one JSON object at the end.

    report = Report("split", model="smollm2", as_json=True)
    report.progress("reading 2,048 tokens, run 1 of 5")            # standard error
    report.ran("host", engine.describe())                          # kernels and layouts, printed with the figures
    report.row(kind="split", read_s=1.9, worker_tokens=1792)       # results/split.jsonl
    report.figure("smollm2.d0.speedup_40_64", 1.43, worker_tokens=1792)
    report.finish()                                                # table, then with --json the last line

A figure names the evidence that what it measures took part, as keyword counts; a count of zero is a refusal
(NotMeasuredError), not a figure. Knows nothing of models or processes. Called by services.bench.* and
services.cli.verify.
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

import click
from rich import box
from rich.console import Console
from rich.table import Table

from common.errors import OutriggerError
from services.bench.machine import CHECKOUT, commit_text, machine_text

FIGURE_NAME = re.compile(r"^[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*$")
TABLE_COLUMNS_MIN = 110
"""Width when the output is not a terminal: a table in a log file should not wrap."""


class NotMeasuredError(OutriggerError):
    """What a figure claims to measure did not take part, or the figure is not a number. The command exits with 1."""


class Report:
    """One run of one bench. Use `figure` for results and `finish` at the end; both raise NotMeasuredError."""

    def __init__(
        self,
        bench: str,
        model: str,
        *,
        as_json: bool = False,
        quick: bool = False,
        results_folder: Path | None = None,
        out: TextIO | None = None,
        err: TextIO | None = None,
    ) -> None:
        """`model` is what the JSON calls the model(s); `results_folder` defaults to results/ of the checkout."""
        self.bench, self.model, self.as_json, self.quick = bench, model, as_json, quick
        self.commit, self.machine = commit_text(), machine_text()
        self.figures: dict[str, float] = {}
        self._ran: dict[str, str] = {}
        self._notes: list[str] = []
        self._started_s = time.monotonic()
        self._rows_path = (results_folder or CHECKOUT / "results") / f"{bench}.jsonl"
        self._out, self._err = out or sys.stdout, err or sys.stderr

    @property
    def elapsed_s(self) -> float:
        """Seconds since the report was begun."""
        return time.monotonic() - self._started_s

    def progress(self, text: str) -> None:
        """Say on standard error what happens now, with the seconds since the start."""
        print(f"[{self.elapsed_s:6.1f}s] {self.bench}: {text}", file=self._err, flush=True)

    def ran(self, side: str, what: object) -> None:
        """Record which kernels and layouts computed on `side` ("host", "worker", "stock")."""
        self._ran[side] = ran_text(what)

    def note(self, text: str) -> None:
        """Something a reader of the figures must know; printed with them."""
        self._notes.append(text)

    def row(self, **values: Any) -> None:
        """Append one raw measurement to results/<bench>.jsonl, with commit, machine and time of day."""
        head = {"bench": self.bench, "commit": self.commit, "machine": self.machine, "quick": self.quick}
        self._rows_path.parent.mkdir(parents=True, exist_ok=True)
        with self._rows_path.open("a", encoding="utf-8") as rows:
            rows.write(json.dumps({**head, "time_unix_s": round(time.time(), 3), **values}) + "\n")

    def figure(self, name: str, value: float, **took_part: float) -> None:
        """Add a result. Each keyword is a count of something that must have taken part (> 0)."""
        if not FIGURE_NAME.match(name):
            raise NotMeasuredError(
                f"figure name {name!r}: use letters, digits, _ and -, with dots between parts"
            )
        for what, count in took_part.items():
            if not count > 0:
                raise NotMeasuredError(
                    f"figure {name} refused: {what} is {count}, so what it measures did not run"
                )
        if not math.isfinite(value):
            raise NotMeasuredError(f"figure {name} refused: {value} is not a finite number")
        self.figures[name] = value

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Print a table for people; the first column is left aligned, the others right."""
        table = Table(box=box.SIMPLE_HEAD)
        for index, column in enumerate(columns):
            table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
        for row in rows:
            table.add_row(*(cell_text(cell) for cell in row))
        console = self._console()
        console.print(title, highlight=False, markup=False)
        console.print(table)

    def finish(self) -> dict[str, Any]:
        """Print what ran and all figures; with as_json the JSON object as the last line. Returns that object."""
        if not self.figures:
            raise NotMeasuredError(f"bench {self.bench} measured nothing")
        console = self._console()
        for side, text in self._ran.items():
            console.print(f"  {side}: {text}", highlight=False, markup=False)
        for note in self._notes:
            console.print(f"  note: {note}", highlight=False, markup=False)
        self.table(
            f"{self.bench} · {self.model} · {self.machine} · {self.commit}{' · quick' if self.quick else ''}",
            ("figure", "value"),
            list(self.figures.items()),
        )
        result = {
            "bench": self.bench,
            "commit": self.commit,
            "machine": self.machine,
            "model": self.model,
            "figures": {name: plain_number(value) for name, value in self.figures.items()},
        }
        if self.as_json:
            print(json.dumps(result), file=self._out, flush=True)
        return result

    def _console(self) -> Console:
        width = None if self._out.isatty() else TABLE_COLUMNS_MIN
        return Console(file=self._out, width=width)


def ran_text(what: object) -> str:
    """A description as one line; nested counts in brackets."""
    if not isinstance(what, dict):
        return str(what)
    return ", ".join(
        f"{key} ({ran_text(value)})" if isinstance(value, dict) else f"{key} {value}"
        for key, value in what.items()
    )


def cell_text(cell: object) -> str:
    """Numbers with as many digits as a reader can use; everything else as it is."""
    if isinstance(cell, bool) or not isinstance(cell, int | float):
        return str(cell)
    if isinstance(cell, int) or float(cell).is_integer():
        return f"{int(cell):,}"
    return f"{cell:,.1f}" if abs(cell) >= 100 else f"{cell:.4g}" if abs(cell) < 0.01 else f"{cell:.3f}"


def plain_number(value: float) -> float | int:
    """A figure as JSON: integers stay integers, floats keep six significant digits."""
    return int(value) if float(value).is_integer() else float(f"{value:.6g}")


def report_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The three options every bench and verify takes: --json, --quick, --results."""
    for option in (
        click.option(
            "--results", "results_folder", type=click.Path(path_type=Path), help="Folder of raw rows."
        ),
        click.option("--quick", is_flag=True, help="Smaller models and fewer runs: at most four minutes."),
        click.option(
            "--json", "as_json", is_flag=True, help="One JSON object as the last line of the output."
        ),
    ):
        command = option(command)
    return command
