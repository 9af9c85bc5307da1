"""llama.cpp's own way of splitting a model: llama-bench and the RPC server, from the source package of our wheel.

Compiled once for this processor with the compiler flags of our own build, and kept in .outrigger/rpc by the same key;
an interrupted compile goes on where it stopped. Knows nothing of what is measured. Used by services.bench.rpc.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from services.bench.machine import CHECKOUT
from services.setup import checks, steps, wheel
from services.setup.install import amx_verdict, only_one

STATE = CHECKOUT / ".outrigger"
PROGRAMS = ("llama-bench", "ggml-rpc-server")
ON, OFF = ("GGML_RPC",), ("BUILD_SHARED_LIBS", "LLAMA_OPENSSL", "LLAMA_USE_PREBUILT_UI")
PARTS_OFF = ("TESTS", "EXAMPLES", "SERVER", "APP", "UI")
CMAKE = checks.Problem("cmake", "apt-get install cmake", "brew install cmake")
COMPILERS = checks.Problem(
    "a C and a C++ compiler (cc, c++)", "apt-get install gcc g++", "xcode-select --install"
)


@dataclass(frozen=True)
class RpcPrograms:
    """The two programs, and from what they were made."""

    bench: Path
    server: Path
    made_from: str


def rpc_programs(state: Path = STATE) -> RpcPrograms:
    """The kept programs; they are compiled first when there are none, with progress on standard error.

    Raises SetupError when cmake or a compiler is missing, the source cannot be had or does not compile.
    """
    made = wheel.recipe(amx_verdict(state))
    folder = state / "rpc" / made.key
    programs = RpcPrograms(
        folder / PROGRAMS[0],
        folder / PROGRAMS[1],
        f"{wheel.PACKAGE} {wheel.VERSION}, its llama.cpp with GGML_RPC",
    )
    if programs.bench.exists() and programs.server.exists():
        return programs
    checks.refuse(missing())
    with only_one(state / "rpc.lock"):
        _build(made, state, folder)
    return programs


def missing() -> list[checks.Problem]:
    """What the compile needs and this machine lacks."""
    found = [] if shutil.which("cmake") else [CMAKE]
    return found if checks.find_compilers() else [*found, COMPILERS]


def configure_command(source: Path, tree: Path) -> list[str]:
    """cmake's first call: only what the two programs need."""
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    switches = [f"-D{name}=ON" for name in ON] + [f"-D{name}=OFF" for name in OFF]
    switches += [f"-DLLAMA_BUILD_{part}=OFF" for part in PARTS_OFF]
    llama = source / "vendor" / "llama.cpp"
    return [
        "cmake",
        *generator,
        "-S",
        str(llama),
        "-B",
        str(tree),
        "-DCMAKE_BUILD_TYPE=Release",
        *switches,
    ]


def _build(made: wheel.Recipe, state: Path, folder: Path) -> None:
    """Fetch, configure, compile; keep the two programs alone."""
    work, log = state / "rpc" / "build", state / "rpc.log"
    env, progress = {**os.environ, **made.environment}, steps.Progress(2)
    n_jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count() or 1))
    nice = ["nice", "-n", "10"] if shutil.which("nice") else []
    progress.begin(f"fetching the source of {wheel.PACKAGE} {wheel.VERSION}", "77 MB")
    source = wheel.unpacked_source(Path(sys.executable), work, progress, log, env)
    progress.done()
    progress.begin(
        f"compiling {' and '.join(PROGRAMS)} with {n_jobs} jobs",
        "once for this processor, about ten minutes of one core",
    )
    tree = work / f"tree-{made.key}"
    steps.run(configure_command(source, tree), progress, log, env)
    steps.run([*nice, "cmake", "--build", str(tree), "-j", n_jobs, "--target", *PROGRAMS], progress, log, env)
    folder.mkdir(parents=True, exist_ok=True)
    for name in PROGRAMS:
        partial = folder / f".{name}"
        shutil.copy2(tree / "bin" / name, partial)
        os.replace(partial, folder / name)
    progress.done()
    shutil.rmtree(work)
