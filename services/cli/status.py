"""`outrigger status`: how each process is, as a table or as JSON. Asks the launch itself; guesses nothing."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import click
import msgspec

from common.config import find_file, load_settings
from common.errors import ServiceError
from common.wire.messages import LaunchStatus, ProcessStatus
from services.cli.held_view import held_facts, held_text
from services.launch.inquiry import ask_launch
from services.launch.lock import read_note, running

EXIT_ALL_WELL, EXIT_UNWELL, EXIT_NOTHING_RUNS = 0, 1, 3
WELL = ("ready", "serving")
HEADINGS = ("process", "state", "pid", "uptime", "restarts", "what")
SHOWN_ADDRESSES = ("http", "zmq", "link", "pages")
ERROR_CHARS_MAX = 160
WATCH_S = 2.0


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
@click.option("--watch", is_flag=True, help="Show it anew every two seconds, until Ctrl-C.")
def command(as_json: bool, watch: bool) -> None:
    """Show each process: its state, pid, uptime, restarts, and why its last life ended.

    States: starting, ready, serving, draining, stopped; silent (no sign of life), stuck (its working thread takes no
    turn), backoff (it ended and is tried again), failed (it ended for good).

    \b
    Exit codes: 0 all processes serve, 1 one of them does not, 2 a bad setting, 3 nothing runs.
    """
    run_dir = load_settings(find_file(os.environ), os.environ).run_dir
    while True:
        exit_code = _show(run_dir, as_json)
        if not watch:
            raise SystemExit(exit_code)
        time.sleep(WATCH_S)
        if sys.stdout.isatty():
            click.clear()


def _show(run_dir: Path, as_json: bool) -> int:
    """Tell once how things are; returns the exit code."""
    note = running(run_dir)
    if note is None:
        _tell({"state": "down", "run_dir": str(run_dir)}, _nothing_text(run_dir), as_json)
        return EXIT_NOTHING_RUNS
    try:
        status = ask_launch(run_dir)
    except ServiceError as error:
        holder = f"pid {note.get('pid')} ({note.get('state')})"
        text = f"{holder} holds {run_dir}, and does not say how it is: {error}"
        _tell({"state": "unknown", "run_dir": str(run_dir), "pid": note.get("pid")}, text, as_json)
        return EXIT_UNWELL
    held, text = held_facts(status), status_text(status, run_dir)
    facts = msgspec.to_builtins(status) | {"run_dir": str(run_dir), "held": held}
    _tell(facts, f"{text}\n\n{held_text(held)}" if held else text, as_json)
    well = status.state == "serving" and all(each.state in WELL for each in status.processes)
    return EXIT_ALL_WELL if well else EXIT_UNWELL


def status_text(status: LaunchStatus, run_dir: Path) -> str:
    """The table, with a line above it and one below for each error."""
    head = f"{status.state}: {status.model}" + (f" at {status.http}/v1" if status.http else "")
    rows: list[tuple[str, ...]] = [HEADINGS]
    rows += [("launch", status.state, str(status.pid), seconds_text(status.uptime_s), "0", str(run_dir))]
    rows += [_row(each) for each in status.processes]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    errors = [_error_line(each) for each in status.processes if each.last_error]
    return "\n".join([head, "", *(line.rstrip() for line in lines), *([""] if errors else []), *errors])


def seconds_text(seconds: float) -> str:
    """A time span for people: 7 s, 12 min, 3 h 5 min, 2 d 4 h."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def _row(each: ProcessStatus) -> tuple[str, ...]:
    pid, uptime = (str(each.pid), seconds_text(each.uptime_s)) if each.pid else ("-", "-")
    where = [
        address if name == "http" else f"{name} {address}"
        for name, address in each.listens.items()
        if name in SHOWN_ADDRESSES and not address.startswith("ipc:")
    ]
    return (each.process, each.state, pid, uptime, str(each.restarts), each.detail or ", ".join(where))


def _error_line(each: ProcessStatus) -> str:
    text = each.last_error
    text = text if len(text) <= ERROR_CHARS_MAX else f"{text[: ERROR_CHARS_MAX - 3]}..."
    return f"{each.process} ended {seconds_text(each.last_error_s)} ago: {text}"


def _nothing_text(run_dir: Path) -> str:
    text = f"nothing runs (run directory {run_dir})"
    if pid := read_note(run_dir).get("pid"):
        text += f"; the last launch here (pid {pid}) was killed"
    return f"{text}. `outrigger up` starts it."


def _tell(facts: dict[str, Any], text: str, as_json: bool) -> None:
    click.echo(msgspec.json.encode(facts).decode() if as_json else text)
