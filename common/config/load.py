"""From file, environment and flags (later ones win) to `Settings`; a bad value stops the start with a full sentence.

Knows how a value is named, read, checked and worked out; what settings there are is tree.py's business. Reads the
file it is given and the machine's core count; everything else is passed in, so that tests own the world.
"""

from __future__ import annotations

import difflib
import hashlib
import math
import os
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from common.config.keys import AUTO, KEYS, LEAF_TYPES, PREFIX, Key, allowed_text, bare
from common.config.page_workers import worker_numbers
from common.config.tree import EMBEDDED_MODEL, Settings
from common.errors import SettingError

FILE_NAME = "outrigger.toml"
FILE_VARIABLE = "OUTRIGGER_CONFIG"
OTHER_VARIABLES = frozenset({FILE_VARIABLE, "OUTRIGGER_WHEEL_DIR", "OUTRIGGER_DEBUG", "OUTRIGGER_PARENT_PID"})
"""With our prefix, yet no settings: the file's place, the set-up's wheels, tracebacks, whose child a process is."""


@dataclass(frozen=True)
class Explained:
    """One setting of a loaded tree, for people."""

    key: Key
    value: Any
    source: str
    allowed: str


def find_file(environ: Mapping[str, str], folder: Path | None = None) -> Path | None:
    """The settings file: the one OUTRIGGER_CONFIG names (empty: none), else outrigger.toml in `folder` if it is there.

    Raises SettingError when the named file does not exist.
    """
    if FILE_VARIABLE in environ:
        if not environ[FILE_VARIABLE]:
            return None
        named = Path(environ[FILE_VARIABLE])
        if not named.is_file():
            raise SettingError(f"{FILE_VARIABLE}: there is no file {named}")
        return named
    found = (folder or Path.cwd()) / FILE_NAME
    return found if found.is_file() else None


def load_settings(
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
    spelled: Mapping[str, str] | None = None,
) -> Settings:
    """The settings of this start. `flags` maps flat names to values; None values count as not given. `spelled` maps
    flat names to the flags that people typed, where a command calls one by a shorter name.

    Raises SettingError naming key, value, allowed range and where the value came from.
    """
    environ = os.environ if environ is None else environ
    return _build(_collect(file, environ, flags or {}, spelled or {}))


def explain_settings(
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> list[Explained]:
    """Every setting with its value, where the value came from and what is allowed."""
    environ = os.environ if environ is None else environ
    given = _collect(file, environ, flags or {})
    settings = _build(given)
    return [
        Explained(
            key,
            _for_people(key, getattr(getattr(settings, key.leaf), key.field)),
            _source(key, given),
            allowed_text(key.type),
        )
        for key in KEYS.values()
    ]


def _source(key: Key, given: Given) -> str:
    if key.path in given and given[key.path][0] is not None:
        return given[key.path][1]
    return "worked out" if key.path in COMPUTED else "default"


def _for_people(key: Key, value: Any) -> Any:
    return "(set)" if value and key.path in SECRETS else value


def to_environ(settings: Settings) -> dict[str, str]:
    """Variables that make a child process load exactly these settings, whatever file lies about."""
    pairs = {FILE_VARIABLE: ""}
    for key in KEYS.values():
        value = getattr(getattr(settings, key.leaf), key.field)
        pairs[key.variable] = AUTO if value is None else str(value)
    return pairs


# --- reading ----------------------------------------------------------------------------------------------------

Given = dict[str, tuple[Any, str]]
"""Path of a setting -> (checked value, where it came from)."""


def _collect(
    file: Path | None,
    environ: Mapping[str, str],
    flags: Mapping[str, Any],
    spelled: Mapping[str, str] | None = None,
) -> Given:
    given: Given = {}
    of_flags = _from_flags(flags, spelled or {})
    for key, value, source in (*_from_file(file), *_from_environ(environ), *of_flags):
        given[key.path] = (_checked(key, value, source), source)
    return given


def _from_file(file: Path | None) -> Iterable[tuple[Key, Any, str]]:
    if file is None:
        return
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingError(f"cannot read the settings file {file}: {error}") from error
    for leaf, section in content.items():
        if not isinstance(section, dict):
            raise SettingError(
                f"{leaf} in {file}: put it under a section such as [host]; {_nearest(leaf, _paths())}"
            )
        for field, value in section.items():
            key = KEYS.get(f"{leaf}.{field}")
            if key is None:
                raise SettingError(
                    f"unknown setting {leaf}.{field} in {file}; {_nearest(f'{leaf}.{field}', _paths())}"
                )
            yield key, value, str(file)


def _from_environ(environ: Mapping[str, str]) -> Iterable[tuple[Key, Any, str]]:
    by_variable = {key.variable: key for key in KEYS.values()}
    for name, text in environ.items():
        if not name.startswith(PREFIX) or name in OTHER_VARIABLES:
            continue
        if name not in by_variable:
            raise SettingError(f"unknown setting {name} in the environment; {_nearest(name, by_variable)}")
        yield by_variable[name], text, f"environment variable {name}"


def _from_flags(flags: Mapping[str, Any], spelled: Mapping[str, str]) -> Iterable[tuple[Key, Any, str]]:
    by_flat = {key.flat: key for key in KEYS.values()}
    for name, value in flags.items():
        if value is None:
            continue
        if name not in by_flat:
            raise SettingError(f"unknown setting {name}; {_nearest(name, by_flat)}")
        yield by_flat[name], value, f"flag {spelled.get(name, by_flat[name].flag)}"


def _checked(key: Key, value: Any, source: str) -> Any:
    """`value` in the setting's type, or None for auto where a value can be worked out."""
    nullable = isinstance(bare(key.type), inspect.UnionType)
    if value == AUTO and (nullable or key.path in COMPUTED):
        return None
    try:
        if not isinstance(value, str | int | float | Path):
            raise msgspec.ValidationError("not a single value")
        text = str(value) if isinstance(value, Path) else value
        checked = msgspec.convert({key.field: text}, LEAF_TYPES[key.leaf], strict=False)
        result = getattr(checked, key.field)
        if isinstance(result, float) and not math.isfinite(result):
            raise msgspec.ValidationError("not a finite number")
    except msgspec.ValidationError as error:
        auto = f", or {AUTO}" if key.path in COMPUTED else ""
        raise SettingError(
            f"{key.path} = {value!r} ({source}): it must be {allowed_text(key.type)}{auto}. Meaning: {key.text}."
        ) from error
    return result


def _nearest(name: str, known: Iterable[str]) -> str:
    """The known name that was probably meant."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else "see `outrigger config show`"


def _paths() -> list[str]:
    return list(KEYS)


# --- building ----------------------------------------------------------------------------------------------------


def _build(given: Given) -> Settings:
    values = {path: value for path, (value, _source) in given.items() if value is not None}
    for path, work_out in COMPUTED.items():
        if not values.get(path):
            values[path] = work_out(values)
    for path in FILES:
        if values.get(path):
            values[path] = os.path.abspath(os.path.expanduser(values[path]))
    leaves: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        leaf, field = path.split(".")
        leaves.setdefault(leaf, {})[field] = value
    settings = Settings(**{leaf: LEAF_TYPES[leaf](**fields) for leaf, fields in leaves.items()})
    _check_ports(settings)
    worker_numbers(settings)
    return settings


def _check_ports(settings: Settings) -> None:
    """No two listeners of one machine on one port."""
    taken: dict[int, str] = {}
    for path in PORTS:
        leaf, field = path.split(".")
        port = getattr(getattr(settings, leaf), field)
        if port and port in taken:
            raise SettingError(f"{path} and {taken[port]} are both {port}; give each a port of its own, or 0")
        taken[port] = path


def _data_dir(_values: Mapping[str, Any]) -> str:
    """.outrigger in the checkout the code runs from; without a checkout, ~/.outrigger."""
    checkout = Path(__file__).resolve().parents[2]
    return str((checkout if (checkout / "pyproject.toml").exists() else Path.home()) / ".outrigger")


def _run_dir(values: Mapping[str, Any]) -> str:
    """A short private folder, one for each data folder: a checkout may lie deeper than a socket's path may be long."""
    digest = hashlib.blake2b(os.fsencode(os.path.abspath(values["run.data_dir"])), digest_size=4).hexdigest()
    return str(Path(tempfile.gettempdir()) / f"outrigger-{os.getuid()}" / digest)


def _model(values: Mapping[str, Any]) -> str:
    return str(Path(values["run.data_dir"]) / "models" / EMBEDDED_MODEL)


def _journal_dir(values: Mapping[str, Any]) -> str:
    """One for each run directory: two runs never share a journal, and the next run finds its own again."""
    digest = hashlib.blake2b(os.fsencode(os.path.abspath(values["run.run_dir"])), digest_size=4).hexdigest()
    return str(Path(values["run.data_dir"]) / "journal" / digest)


def _host_threads(values: Mapping[str, Any]) -> int:
    """All cores, or half of them when the other half is for a worker on this machine."""
    alone = values.get("host.split") == "off" or values.get("bridge.worker_host")
    return _cores() if alone else max(1, _cores() // 2)


def _worker_threads(_values: Mapping[str, Any]) -> int:
    return max(1, _cores() // 2)


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


COMPUTED: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "run.data_dir": _data_dir,
    "run.run_dir": _run_dir,
    "host.model": _model,
    "host.n_threads": _host_threads,
    "worker.n_threads": _worker_threads,
    "broker.journal_dir": _journal_dir,
}
"""Settings that are worked out when nobody gives them, in this order; "auto" asks for it in words."""

FILES = (
    *("run.data_dir", "run.run_dir", "host.model", "worker.model", "broker.journal_dir"),
    *("gateway.chat_template", "zmq.secret_file", "zmq.clients_file"),
)
"""Made absolute, so that a child process or another folder changes nothing."""

SECRETS = ("gateway.api_key",)
"""Never shown."""

PORTS = (
    "gateway.http_port",
    "zmq.port",
    "zmq.events_port",
    "worker.port",
    "worker.control_port",
    "metrics.gateway_port",
    "metrics.mac_port",
    "metrics.broker_port",
    "metrics.bridge_port",
)
