"""`outrigger logs`: what the processes logged, as one stream. Reading is services.launch.log_reader's."""

from __future__ import annotations

import os
import time

import click

from common.config import find_file, load_settings
from common.errors import ServiceError, SettingError
from services.launch.log_reader import LogLine, LogReader, processes_logged
from services.launch.logs import parse_event

LOOK_S = 0.2
HEAD_KEYS = ("timestamp", "level", "process", "event")


@click.command()
@click.argument("process", required=False)
@click.option("-f", "--follow", is_flag=True, help="Go on with what is written from now on, until Ctrl-C.")
@click.option(
    "-n", "--lines", default=50, show_default=True, type=click.IntRange(0), help="Lines to begin with."
)
@click.option("--raw", is_flag=True, help="Lines as they were written (JSON).")
def command(process: str | None, follow: bool, lines: int, raw: bool) -> None:
    """Show what all processes logged, or one PROCESS: gateway, mac, broker, bridge, worker, launch, supervisor.

    Further page workers and their bridges are worker-1, bridge-1 and so on.

    Times are UTC. Works while they run and after they ended; the run before is kept beside as NAME.log.previous.

    \b
    Examples:
      outrigger logs -f
      outrigger logs mac -n 200
    """
    run_dir = load_settings(find_file(os.environ), os.environ).run_dir
    there = processes_logged(run_dir)
    if not there:
        raise ServiceError(f"no logs in {run_dir}: nothing ran here yet; `outrigger up` starts it")
    if process is not None and process not in there:
        raise SettingError(f"no log of {process!r} in {run_dir}; there are {', '.join(there)}")
    reader = LogReader(run_dir, [process] if process else there)
    try:
        _show(reader.last(lines), raw)
        while follow:
            time.sleep(LOOK_S)
            _show(reader.new(), raw)
    except KeyboardInterrupt:
        pass  # the way to end it
    finally:
        reader.close()


def _show(lines: list[LogLine], raw: bool) -> None:
    for line in lines:
        click.echo(line.text if raw else line_text(line))


def line_text(line: LogLine) -> str:
    """A line for people: time, process, level, phrase, values."""
    event = parse_event(line.text)
    if event is None:
        return f"{'':12}  {line.process:10}  {'':7}  {line.text}"
    clock = str(event.get("timestamp", ""))[11:23]
    values = " ".join(f"{key}={_value(value)}" for key, value in event.items() if key not in HEAD_KEYS)
    text = f"{clock:12}  {line.process:10}  {event.get('level', '')!s:7}  {event['event']}"
    return f"{text}  {values}" if values else text


def _value(value: object) -> str:
    text = str(value)
    return repr(text) if not text or " " in text or "\n" in text else text
