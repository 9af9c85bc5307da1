"""llama-cpp-python: compiled once for this processor, kept by key, found again.

The key says all that decides what the compiler makes: version, flags (the user's and ours), processor, C library. It
does not name a Python version, because the wheel is libraries with a ctypes layer and fits every Python 3. pip's own
cache knows neither flags nor processor and is not asked. An interrupted compile goes on where it stopped: source and
build tree stay in .outrigger/build until the wheel is kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import NamedTuple

from services.setup import processor, steps
from services.setup.checks import SetupError

PACKAGE, VERSION = "llama-cpp-python", "0.3.36"
SOURCE_NAME = f"llama_cpp_python-{VERSION}"
EXTRA_FOLDER_VARIABLE = "OUTRIGGER_WHEEL_DIR"
FLAG_VARIABLES = ("CC", "CXX", "CFLAGS", "CXXFLAGS", "CMAKE_ARGS")


class Recipe(NamedTuple):
    """What the wheel is made from. `key` names the folder it is kept in."""

    amx: processor.AmxVerdict
    environment: dict[str, str]
    """The variables that reach the compiler: the user's, with our AMX flags added."""
    ingredients: dict[str, str]

    @property
    def key(self) -> str:
        """Readable at its head, exact at its tail: 0.3.36-linux-x86_64-3f2a9c..."""
        text = json.dumps(self.ingredients, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        return f"{VERSION}-{platform.system().lower()}-{platform.machine()}-{digest}"


def recipe(amx: processor.AmxVerdict) -> Recipe:
    """The recipe for this machine and environment."""
    environment = {name: os.environ[name] for name in FLAG_VARIABLES if os.environ.get(name)}
    if amx.flags:
        for name in ("CFLAGS", "CXXFLAGS"):
            environment[name] = " ".join([*environment.get(name, "").split(), *amx.flags])
    ingredients = {
        "version": VERSION,
        "processor": processor.identity(),
        "libc": processor.libc(),
        **{f"env {name}": value for name, value in environment.items()},
    }
    return Recipe(amx, environment, ingredients)


def kept(key: str, state: Path) -> Path | None:
    """The kept wheel of this key in `state`/wheels or in OUTRIGGER_WHEEL_DIR; None when there is none that is whole."""
    extra = os.environ.get(EXTRA_FOLDER_VARIABLE)
    for folder in [state / "wheels", *([Path(extra)] if extra else [])]:
        for path in sorted((folder / key).glob("llama_cpp_python-*.whl")):
            if zipfile.is_zipfile(path):
                return path
    return None


def build(
    made: Recipe, python: Path, state: Path, progress: steps.Progress, log: Path, env: dict[str, str]
) -> Path:
    """Compile the wheel and keep it. `env` is the environment of all our pip calls. Returns the kept wheel's path.

    Raises SetupError when the source cannot be had or does not compile.
    """
    source = unpacked_source(python, state / "build", progress, log, env)
    out = state / "build" / f"wheel-{made.key}"
    tree = state / "build" / f"tree-{made.key}"
    shutil.rmtree(out, ignore_errors=True)
    command = [
        str(python),
        "-m",
        "pip",
        "wheel",
        "-v",
        "--no-deps",
        "--no-cache-dir",
        "--wheel-dir",
        str(out),
    ]
    command += [f"--config-settings=build-dir={tree}", str(source)]
    steps.run(command, progress, log, {**env, **made.environment})
    (out / "recipe.json").write_text(json.dumps(made.ingredients, indent=2) + "\n", encoding="utf-8")
    _keep(out, state / "wheels" / made.key)
    shutil.rmtree(state / "build")
    found = kept(made.key, state)
    if found is None:
        raise SetupError(f"the compile left no wheel in {state / 'wheels' / made.key}; see {log}")
    _share(found.parent, made.key)
    return found


def unpacked_source(
    python: Path, folder: Path, progress: steps.Progress, log: Path, env: dict[str, str]
) -> Path:
    """The source package, unpacked in `folder`: downloaded once, unpacked whole or not at all. Raises SetupError."""
    source = folder / SOURCE_NAME
    if source.is_dir():
        return source
    folder.mkdir(parents=True, exist_ok=True)
    archive = folder / f"{SOURCE_NAME}.tar.gz"
    if not archive.exists():
        command = [str(python), "-m", "pip", "download", "--no-deps", "--no-binary", PACKAGE]
        command += ["--dest", str(folder), f"{PACKAGE}=={VERSION}"]
        steps.run(command, progress, log, env)
    unpacking = folder / "unpacking"
    shutil.rmtree(unpacking, ignore_errors=True)
    with tarfile.open(archive) as tar:
        if hasattr(tarfile, "data_filter"):  # 3.11.4 and later
            tar.extractall(unpacking, filter="data")
        else:
            tar.extractall(unpacking)
    os.replace(unpacking / SOURCE_NAME, source)
    return source


def _keep(out: Path, folder: Path) -> None:
    """Move a finished wheel's folder to where it is kept, in one step, so that a kept wheel is a whole one."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(out, folder)


def _share(folder: Path, key: str) -> None:
    """Copy a fresh wheel to OUTRIGGER_WHEEL_DIR, when there is one, for the next checkout or machine of this kind."""
    extra = os.environ.get(EXTRA_FOLDER_VARIABLE)
    if not extra:
        return
    partial, shared = Path(extra) / f".{key}.{os.getpid()}", Path(extra) / key
    try:
        shutil.copytree(folder, partial)
        os.replace(partial, shared)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        if not shared.is_dir():  # else somebody put the same wheel there first, which is as good
            print(f"set-up: the wheel could not be copied to {extra} ({error}); going on", file=sys.stderr)
