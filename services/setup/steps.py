"""One child process: its output to a log, its progress to the eye, its failure to a sentence.

On a terminal one live line shows the elapsed time and what goes on; elsewhere a line appears every five seconds, so
that a log of a build machine shows that it lives. A step that takes under two seconds shows only that it is done.
"""

from __future__ import annotations

import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, TextIO

from services.setup.checks import SetupError

QUIET_S = 2.0
LINE_EVERY_S = 5.0
TAIL_LINES = 12
TAIL_CHARACTERS = 160
ERROR_LINE = re.compile(r"\b(error|fatal error|FAILED):")
NINJA_COUNT = re.compile(r"^\s*\[(\d+)/(\d+)\]")
PIP_DOING = re.compile(r"^\s*(Collecting|Downloading|Installing|Building|Preparing|Getting|Processing)\b.*")

REMEDIES = (
    (
        re.compile(
            r"name resolution|NewConnectionError|Network is unreachable|ReadTimeout|Connection (refused|reset)"
        ),
        "pip could not reach its package index: check the network and `pip config list`, then run the same again",
    ),
    (
        re.compile(r"No matching distribution found|Could not find a version"),
        "the package index has no fitting version: check `pip config list` (index, constraints) and the Python version",
    ),
    (re.compile(r"No space left on device"), "the disk is full: free about 3 GiB, then run the same again"),
    (
        re.compile(r"Killed signal|out of memory|cannot allocate memory", re.IGNORECASE),
        "memory ran out while compiling: run `CMAKE_BUILD_PARALLEL_LEVEL=1 make setup`",
    ),
    (
        re.compile(r"CMAKE_C(XX)?_COMPILER|compiler is not able to compile|fatal error: .*: No such file"),
        "the compiler is incomplete: `apt-get install gcc g++` (Debian, Ubuntu), `xcode-select --install` (macOS)",
    ),
)


class Progress:
    """What the user sees of a set-up: numbered steps, elapsed time, the last thing that happened."""

    def __init__(self, n_steps: int, out: TextIO = sys.stderr) -> None:
        self.n_steps, self.out = n_steps, out
        self.live = out.isatty()
        self._number = 0
        self._label = ""
        self._began = self._told = 0.0

    def begin(self, label: str, expectation: str = "") -> None:
        """Start the next numbered step. An `expectation` ("about five minutes") is told at once."""
        self._number += 1
        self._label = f"[{self._number}/{self.n_steps}] {label}"
        self._began = self._told = time.monotonic()
        if expectation:
            self._write(f"{self._label}: {expectation}")

    def tick(self, doing: str) -> None:
        """Called often while a step runs; decides itself whether there is something to show."""
        now = time.monotonic()
        elapsed = now - self._began
        if self.live and elapsed > QUIET_S:
            width = shutil.get_terminal_size().columns - 1
            self.out.write("\r\033[K" + f"{self._label}  {clock(elapsed)}  {doing}"[:width])
            self.out.flush()
        elif not self.live and now - self._told >= LINE_EVERY_S:
            self._told = now
            self._write(f"{self._label}  {clock(elapsed)}  {doing[:60]}")

    def done(self, word: str = "done") -> None:
        """End the step."""
        elapsed = time.monotonic() - self._began
        took = f" in {clock(elapsed)}" if elapsed > QUIET_S else ""
        self._write(f"{self._label}: {word}{took}")

    def _write(self, line: str) -> None:
        self.out.write(("\r\033[K" if self.live else "") + line + "\n")
        self.out.flush()


def clock(seconds: float) -> str:
    """Elapsed time as m:ss."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def run(command: list[str], progress: Progress, log: Path, env: dict[str, str] | None = None) -> None:
    """Run `command`, appending all it says to `log`. Raises SetupError with the end of the log and a remedy.

    The child gets a process group of its own, so that Ctrl-C ends it whole, compilers included, and ends it once.
    """
    start = log.stat().st_size if log.exists() else 0
    with log.open("ab") as file:
        file.write(f"\n$ {' '.join(command)}\n".encode())
        file.flush()
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )
        assert child.stdout is not None
        try:
            _follow(child, child.stdout, progress, file)
        except BaseException:
            _end(child)
            raise
        finally:
            child.stdout.close()
    if child.returncode != 0:
        raise SetupError(_failure(command, child.returncode, log, start))


def _follow(child: subprocess.Popen[bytes], pipe: IO[bytes], progress: Progress, log: IO[bytes]) -> None:
    """Copy the child's output to the log until it ends, and tell `progress` what it is doing."""
    doing, rest = "", b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while True:
            if selector.select(timeout=0.5):
                data = os.read(pipe.fileno(), 1 << 16)
                if not data:
                    break
                log.write(data)
                log.flush()
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    doing = _describe(line.decode("utf-8", "replace")) or doing
            progress.tick(doing)
    child.wait()


def _describe(line: str) -> str:
    """What a line of output says about progress, in a few words; empty when it says nothing."""
    count = NINJA_COUNT.match(line)
    if count:
        return f"compiled {count[1]} of {count[2]} files"
    return line.strip() if PIP_DOING.match(line) else ""


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the child's whole group: ask, wait a little, insist."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, sign)
            child.wait(timeout=5)
        except (ProcessLookupError, PermissionError):
            return
        except subprocess.TimeoutExpired:
            continue


def _failure(command: list[str], code: int, log: Path, start: int) -> str:
    with log.open("rb") as file:
        file.seek(start)
        output = file.read().decode("utf-8", "replace")
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines[:-TAIL_LINES] if ERROR_LINE.search(line)]
    tail = [f"    {line[:TAIL_CHARACTERS]}" for line in [*errors[-TAIL_LINES:], *lines[-TAIL_LINES:]]]
    how = f"was ended by signal {-code}" if code < 0 else f"failed with exit code {code}"
    remedy = next(
        (text for pattern, text in REMEDIES if pattern.search(output)), "see the log, then run it again"
    )
    head = f"{Path(command[0]).name} {how}; the end of its output:"
    return "\n".join([head, *tail, f"remedy: {remedy}", f"log: {log}"])
