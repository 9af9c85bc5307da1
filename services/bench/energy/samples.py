"""Power samples of a run from a file: CSV, or the XML that `xctrace export` writes.

A sample says at what rate the battery of the whole device was emptied, in percent of its charge an hour, over a span
that follows its time. Wrong units are refused where they can be seen: by a column's name, by the unit that is printed
beside a value, or by values no battery gives. Knows nothing of windows and energy. Called by services.cli.energy.

The shape of the XML (columns in a schema, values in rows, repeated ones by `ref` to an `id`, times in nanoseconds) is
that of xctrace's tables in general; no export of a power table was at hand to read.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from common.errors import SettingError

RATE_MAX = 200.0
"""Percent an hour: a phone empties in 30 minutes at most; more is another unit (mW, say)."""
TIME_COLUMNS = {"time_s": 1.0, "time_ms": 1e-3, "time_ns": 1e-9}
RATE_COLUMN = "percent_per_hour"
RATE_WORDS = ("percent", "power", "rate", "drain", "level", "battery")
NANOSECONDS = ("start-time", "sample-time", "event-time")
BYTES_MAX = 64 << 20


@dataclass(frozen=True)
class Sample:
    """The battery's rate over [at_s, at_s + seconds)."""

    at_s: float
    seconds: float
    percent_per_hour: float


@dataclass(frozen=True)
class Trace:
    """Samples of one run, by time, none over another. `notes` say what was odd, in sentences."""

    name: str
    samples: tuple[Sample, ...]
    notes: tuple[str, ...] = ()


def read_trace(path: Path, column: str | None = None) -> Trace:
    """Read a trace. `column` names the XML's column of rates where it cannot be told. Raises SettingError."""
    if path.stat().st_size > BYTES_MAX:
        raise SettingError(f"{path}: larger than {BYTES_MAX >> 20} MiB; export only the power table")
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    is_xml = text.lstrip().startswith("<")
    rows = _rows_of_xml(path, text, column) if is_xml else _rows_of_csv(path, text)
    return _checked(path, rows)


Rows = list[tuple[float, float | None, float]]
"""(time in s, span in s if told, percent an hour)."""


def _rows_of_csv(path: Path, text: str) -> Rows:
    reader = csv.DictReader(io.StringIO(text))
    names = [name.strip() for name in reader.fieldnames or ()]
    reader.fieldnames = names
    times = [name for name in names if name in TIME_COLUMNS]
    if len(times) != 1 or RATE_COLUMN not in names:
        raise SettingError(
            f"{path}: columns {', '.join(names) or 'none'}: one of {', '.join(TIME_COLUMNS)} is wanted, and "
            f"{RATE_COLUMN} (percent of the battery's charge an hour; watts and others are not taken)"
        )
    rows: Rows = []
    for row in reader:
        try:
            rows.append((float(row[times[0]]) * TIME_COLUMNS[times[0]], None, float(row[RATE_COLUMN])))
        except (TypeError, ValueError) as error:
            raise SettingError(f"{path}, line {reader.line_num}: not two numbers: {row}") from error
    return rows


def _rows_of_xml(path: Path, text: str, column: str | None) -> Rows:
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise SettingError(f"{path}: declares a document type; xctrace's exports have none")
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise SettingError(f"{path}: not whole XML: {error}") from error
    nodes = [node for node in root.iter("node") if node.find("row") is not None]
    if len(nodes) != 1:
        raise SettingError(f"{path}: {len(nodes)} tables with rows; export one with --xpath, the power table")
    node, known = nodes[0], {each.get("id"): each for each in root.iter() if each.get("id")}
    columns = [
        [each.findtext(tag, "") for tag in ("mnemonic", "name", "engineering-type")]
        for each in node.iter("col")
    ]
    at, rate = _time_column(path, columns), _rate_column(path, columns, column)
    spans = [i for i, (_, _, kind) in enumerate(columns) if kind == "duration"]
    rows: Rows = []
    for row in node.iter("row"):
        cells = [known.get(cell.get("ref"), cell) if cell.get("ref") else cell for cell in row]
        if len(cells) != len(columns):
            raise SettingError(f"{path}: a row has {len(cells)} values, the schema {len(columns)} columns")
        if cells[rate].tag == "sentinel":  # xctrace's word for no value
            continue
        _check_unit(path, cells[rate])
        span_s = (
            _number(path, cells[spans[0]]) * 1e-9 if spans and cells[spans[0]].tag != "sentinel" else None
        )
        rows.append((_number(path, cells[at]) * 1e-9, span_s, _number(path, cells[rate])))
    return rows


def _time_column(path: Path, columns: list[list[str]]) -> int:
    found = [i for i, (_, _, kind) in enumerate(columns) if kind in NANOSECONDS]
    if not found:
        raise SettingError(f"{path}: no column of type {', '.join(NANOSECONDS)} among {_named(columns)}")
    return found[0]


def _rate_column(path: Path, columns: list[list[str]], wanted: str | None) -> int:
    if wanted is not None:
        found = [i for i, words in enumerate(columns) if wanted in words]
    else:
        found = [
            i
            for i, words in enumerate(columns)
            if words[2] not in (*NANOSECONDS, "duration")
            and any(each in " ".join(words).lower() for each in RATE_WORDS)
        ]
    if len(found) != 1:
        raise SettingError(
            f"{path}: {len(found)} columns that may be the rate among {_named(columns)}: name one with --column"
        )
    return found[0]


def _named(columns: list[list[str]]) -> str:
    return ", ".join(words[0] for words in columns) or "none"


def _check_unit(path: Path, cell: ElementTree.Element) -> None:
    """Instruments prints a value with its unit beside the number."""
    printed = cell.get("fmt", "").strip().lower()
    unit = printed.lstrip("0123456789.,-+ ")
    if unit and "%" not in unit and "percent" not in unit:
        raise SettingError(f"{path}: {printed!r} is no percent an hour; give the table of the battery's rate")


def _number(path: Path, cell: ElementTree.Element) -> float:
    try:
        return float(cell.text or "")
    except ValueError as error:
        raise SettingError(f"{path}: <{cell.tag}> holds {cell.text!r}, no number") from error


def _checked(path: Path, rows: Rows) -> Trace:
    if len(rows) < 2:
        raise SettingError(f"{path}: {len(rows)} samples; at least two are needed")
    for at_s, _, rate in rows:
        if not (math.isfinite(at_s) and 0 <= rate <= RATE_MAX):
            raise SettingError(
                f"{path}: {rate:g} at {at_s:g} s: percent of the charge an hour lie between 0 and {RATE_MAX:g}; "
                "milliwatts, or a charging battery?"
            )
    steps = [b[0] - a[0] for a, b in itertools.pairwise(rows)]
    if min(steps) <= 0:
        at_s = rows[steps.index(min(steps)) + 1][0]
        raise SettingError(f"{path}: the sample at {at_s:g} s is not later than the one before it")
    usual_s, notes = statistics.median(steps), []
    if not 0.5 <= usual_s <= 2:
        notes.append(
            f"a sample every {usual_s:g} s, where one a second is expected: are the times in another unit?"
        )
    if max(rate for _, _, rate in rows) < 1:
        notes.append("no sample reaches 1 percent an hour: fractions instead of percent?")
    samples = [
        Sample(at_s, min(span_s or usual_s, step), rate)
        for (at_s, span_s, rate), step in zip(rows, [*steps, math.inf], strict=True)
    ]
    return Trace(path.stem, tuple(samples), tuple(notes))
