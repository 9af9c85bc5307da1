"""The house plan as a table: who may import whom, which door leads to which dependency, how a file must look.

Method: every Python file is parsed, never imported, and each import is looked up in the tables below; a broken rule is
told as file, line, rule. docs/architecture.md explains the rooms; the tables here decide.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent
FILE_LINES_MAX, FUNCTION_LINES_MAX = 400, 70

# Room -> rooms it may import beside itself. The longest name that fits is a module's room; a new room needs a row.
FLOOR = "common.errors common.limits"
WORDS = f"{FLOOR} common.config common.log common.metrics common.crash_note"
MODEL = f"{WORDS} common.ggml common.model"
ENGINE = f"{MODEL} common.wire common.state common.attention common.engine"
FAR_END = "device.worker device.emulator device.coreml device.frozen_source"
ROOMS = {
    "common": "",
    "common.errors": "",
    "common.limits": "",
    "common.config": FLOOR,
    "common.log": FLOOR,
    "common.series": FLOOR,
    "common.metrics": f"{FLOOR} common.series",
    "common.crash_note": FLOOR,
    "common.wire": FLOOR,
    "common.ggml": WORDS,
    "common.model": MODEL,
    "common.state": f"{MODEL} common.wire",
    "common.attention": f"{MODEL} common.wire common.state",
    "common.engine": f"{MODEL} common.wire common.state common.attention",
    "device": ENGINE,
    "services": "",
    "services.setup": "",
    "services.runtime": f"{WORDS} common.wire",
    "services.bridge": f"{WORDS} common.wire services.runtime",
    "services.broker": f"{WORDS} common.wire services.runtime",
    "services.client": f"{FLOOR} common.wire services.runtime",
    "services.gateway": f"{MODEL} common.wire services.runtime",
    "services.mac": f"{ENGINE} services.runtime",
    "services.launch": f"{MODEL} common.wire services {FAR_END}",
    "services.bench": f"{ENGINE} services {FAR_END}",
    "services.cli": f"{ENGINE} services {FAR_END}",
}

# Dependency -> the only places of the product that import it.
DOORS = {
    "zmq": "services/runtime/bus/",
    "ctypes": "common/ggml/",
    "llama_cpp": "common/ggml/",
    "coremltools": "device/coreml/",
    "prometheus_client": "common/metrics.py services/runtime/",
}

# Place -> modules never imported there, tests included, and why.
NETWORK = "socket socketserver selectors ssl http threading _thread asyncio concurrent multiprocessing"
NEVER = {
    "": ("pickle shelve marshal dill cloudpickle joblib", "nothing is ever unpickled"),
    "common/": (NETWORK, "common opens no socket and starts no thread"),
}
NEVER_BUT = {"threading.Lock"}  # guards a load-once; starts nothing
NAMES_NEVER = re.compile(r"^_?(utils?|helpers?|misc|managers?)(\.py)?$")

# Words that belong to the place where this was written, and to no user's machine (spelled so as not to match itself).
WORDS_NEVER = re.compile(r"pyp[i]\.org|python[h]osted|npm[j]s\.|deb\.debia[n]|\.\./share[d]|/wor[k]/")

PRODUCT = [path for room in ("common", "services", "device") for path in sorted((TOP / room).rglob("*.py"))]
PYTHON = [*PRODUCT, *sorted((TOP / "tests").rglob("*.py"))]


def place(path: Path) -> str:
    return path.relative_to(TOP).as_posix()


def module(path: Path) -> str:
    return place(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def room(name: str) -> str | None:
    return max((each for each in ROOMS if f"{name}.".startswith(f"{each}.")), key=len, default=None)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path: Path) -> tuple[tuple[int, str], ...]:
    """(line, module) of every import, wherever it stands; relative ones resolved, `from a import b` told as a.b."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found += ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = place(path).split("/")[: -node.level] if node.level else []
            origin = ".".join([*above, *filter(None, [node.module])])
            found += ((node.lineno, f"{origin}.{alias.name}") for alias in node.names)
    return tuple(found)


def may_import(path: Path, name: str) -> bool:
    mine, theirs = room(module(path)), room(name)
    if theirs is None or theirs == mine:
        return True
    return any(f"{name}.".startswith(f"{each}.") for each in ROOMS[mine or ""].split())


def told(broken: Iterator[str]) -> None:
    lines = sorted(set(broken))
    assert not lines, "the house plan is broken:\n  " + "\n  ".join(lines)


def test_rooms_import_only_what_the_table_allows() -> None:
    told(
        f"{place(path)}:{line}: room {room(module(path))} may not import {name}"
        for path in PRODUCT
        for line, name in imports(path)
        if not may_import(path, name)
    )


def test_every_dependency_has_one_door() -> None:
    told(
        f"{place(path)}:{line}: {name.split('.')[0]} is imported only by {DOORS[name.split('.')[0]]}"
        for path in PRODUCT
        for line, name in imports(path)
        if not place(path).startswith(tuple(DOORS.get(name.split(".")[0], "common services device").split()))
    )


def test_what_is_never_imported() -> None:
    told(
        f"{place(path)}:{line}: never import {name} here: {why}"
        for where, (names, why) in NEVER.items()
        for path in PYTHON
        for line, name in imports(path)
        if place(path).startswith(where) and name.split(".")[0] in names.split() and name not in NEVER_BUT
    )


def test_every_file_has_a_plaque_a_sober_name_and_a_bounded_length() -> None:
    assert len(PRODUCT) > 40, "the rooms were not found"
    for path in PYTHON:
        lines = len(path.read_text(encoding="utf-8").splitlines())
        rules = {
            "has no module docstring that says what it is for": not ast.get_docstring(tree(path)),
            f"has {lines} lines, at most {FILE_LINES_MAX} fit a sitting": lines > FILE_LINES_MAX,
            "has a name that says nothing": NAMES_NEVER.match(path.name)
            or NAMES_NEVER.match(path.parent.name),
        }
        told(f"{place(path)}:1: {rule}" for rule, broken in rules.items() if broken)


def test_functions_fit_a_screen() -> None:
    told(
        f"{place(path)}:{node.lineno}: {node.name} has {length} lines, at most {FUNCTION_LINES_MAX}"
        for path in PYTHON
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES_MAX
    )


def test_no_file_names_the_place_where_it_was_written() -> None:
    command = ["git", "-C", str(TOP), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    files = [TOP / name for name in names if name and (TOP / name).is_file()]
    assert len(files) > 40
    told(
        f"{place(path)}:{number}: {found[0]!r} means nothing on a user's machine"
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        if (found := WORDS_NEVER.search(line))
    )
