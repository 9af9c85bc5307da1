"""What the machine must bring: a Python that can make virtual environments, compilers, room on the disk.

Every problem comes with the line that solves it on Debian and on macOS. All problems are told at once, before anything
is written, so that nobody meets them one after the other. Knows nothing of what is done with the tools it finds.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

GIB = 1 << 30
DISK_BYTES_COMPILE = 3 * GIB
DISK_BYTES_INSTALL = 1 * GIB


class SetupError(Exception):
    """The set-up cannot go on. The text is meant for the user: what, and what to do."""


class Problem(NamedTuple):
    """One thing that is missing and the commands that bring it."""

    missing: str
    debian: str
    macos: str


class Compilers(NamedTuple):
    """The C and C++ compiler that the build will use: CC and CXX where set, else the system's."""

    cc: str
    cxx: str


def find_compilers() -> Compilers | None:
    """The compilers when both answer `--version`, else None. (A bare Mac has a cc that only says what to install.)"""
    cc = _working(os.environ.get("CC"), "cc", "gcc", "clang")
    cxx = _working(os.environ.get("CXX"), "c++", "g++", "clang++")
    return Compilers(cc, cxx) if cc and cxx else None


def _working(wished: str | None, *names: str) -> str | None:
    for name in [wished] if wished else names:
        try:
            answer = subprocess.run(
                [*name.split(), "--version"], capture_output=True, timeout=60, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        if answer.returncode == 0:
            return name
    return None


def problems(checkout: Path, need_venv: bool, need_compile: bool) -> list[Problem]:
    """Everything that stands in the way of a set-up of `checkout`; empty when it can begin."""
    found = []
    if need_venv and not all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")):
        found.append(
            Problem("Python's venv module", "apt-get install python3-venv", "brew install python@3.13")
        )
    if need_compile and find_compilers() is None:
        found.append(
            Problem("a C and a C++ compiler (cc, c++)", "apt-get install gcc g++", "xcode-select --install")
        )
    wanted = DISK_BYTES_COMPILE if need_compile else DISK_BYTES_INSTALL
    free = shutil.disk_usage(checkout).free
    if free < wanted:
        room = f"free {wanted / GIB:.0f} GiB where the checkout lies"
        found.append(Problem(f"room on the disk: {free / GIB:.1f} GiB free at {checkout}", room, room))
    if not os.access(checkout, os.W_OK):
        owner = f'chown -R "$(id -un)" {checkout}'
        found.append(Problem(f"the right to write into {checkout}", owner, owner))
    return found


def refuse(found: list[Problem]) -> None:
    """Raises SetupError listing every problem with its remedy; returns when there is none."""
    if not found:
        return
    lines = ["this machine lacks:"]
    for problem in found:
        lines += [
            f"  - {problem.missing}",
            f"      Debian, Ubuntu:  {problem.debian}",
            f"      macOS:           {problem.macos}",
        ]
    raise SetupError("\n".join(lines))
