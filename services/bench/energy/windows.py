"""When a run generated: windows from the command line, or from a CSV beside the trace.

`NAME.windows.csv` beside `NAME.csv` or `NAME.xml` has the columns start_s, end_s, tokens, on the trace's clock.
Called by services.cli.energy.
"""

from __future__ import annotations

import csv
from pathlib import Path

from common.errors import SettingError
from services.bench.energy.integral import Window

COLUMNS = ("start_s", "end_s", "tokens")


def parse_window(text: str) -> Window:
    """START:END:TOKENS, the first two in seconds. Raises SettingError."""
    try:
        first, last, tokens = text.split(":")
        return Window(float(first), float(last), int(tokens))
    except ValueError as error:
        raise SettingError(f"--window {text!r}: use START:END:TOKENS, as in 12.5:71:512 (seconds)") from error


def windows_beside(trace: Path) -> list[Window]:
    """The windows of a trace's own file. Raises SettingError."""
    path = trace.with_name(f"{trace.stem}.windows.csv")
    if not path.is_file():
        raise SettingError(
            f"{trace}: when did it generate? {path.name} beside it is not there (columns {', '.join(COLUMNS)}); "
            "or give --window START:END:TOKENS"
        )
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        names = [name.strip() for name in reader.fieldnames or ()]
        if sorted(names) != sorted(COLUMNS):
            raise SettingError(
                f"{path}: columns {', '.join(names) or 'none'}: {', '.join(COLUMNS)} are wanted"
            )
        reader.fieldnames = names
        windows = []
        for row in reader:
            try:
                windows.append(Window(float(row["start_s"]), float(row["end_s"]), int(row["tokens"])))
            except (TypeError, ValueError) as error:
                raise SettingError(f"{path}, line {reader.line_num}: not a window: {row}") from error
    return windows
