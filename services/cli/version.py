"""`outrigger version`: what is needed to say "it works here" or "it does not" precisely."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import click

from common.errors import OutriggerError
from common.wire.base_frames import PROTO
from common.wire.codec import BUS_VERSION
from common.wire.extension_frames import EXTENSION_VERSION
from services.bench.machine import commit_text
from services.runtime.bus import libzmq_version

PACKAGES = (
    *("llama-cpp-python", "gguf", "numpy", "xxhash", "msgspec", "pyzmq", "aiohttp", "jinja2", "structlog"),
    *("prometheus-client", "supervisor", "psutil", "coremltools"),
)


@click.command()
def command() -> None:
    """Show versions of everything that matters."""
    click.echo(versions_text())


def versions_text() -> str:
    """One line a thing: this program, its commit, the protocols it speaks, Python, the packages it stands on."""
    rows = [("outrigger", f"{_of('outrigger')} (commit {commit_text()})"), *_protocols()]
    rows += [("python", f"{platform.python_version()} ({platform.python_implementation()})")]
    rows += [("system", f"{platform.system()} {platform.release()} {platform.machine()}")]
    rows += [(name, _of(name)) for name in PACKAGES]
    rows += [("ggml", _ggml()), ("libzmq", libzmq_version())]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}}  {value}" for name, value in rows)


def _of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _protocols() -> list[tuple[str, str]]:
    return [
        ("bus protocol", str(BUS_VERSION)),
        ("cable protocol", f"{PROTO} with extension {EXTENSION_VERSION}"),
    ]


def _ggml() -> str:
    """ggml's own words, asked last because its libraries take a moment to load."""
    try:
        from common.ggml.ffi import lib

        return lib.ggml_version().decode()
    except (ImportError, OSError, OutriggerError) as error:
        return f"cannot be loaded: {error}"
