"""A real worker process for tests: started on free ports, found by its ready line, ended whatever happens."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

CHECKOUT = Path(__file__).resolve().parents[2]


@dataclass
class WorkerProcess:
    """`link`, `control` and `pages` are the addresses of its channels; without a tail `link` is that for pages, too."""

    process: subprocess.Popen[str]
    link: tuple[str, int]
    control: tuple[str, int]
    ready_line: str
    said: list[str]
    """What it said before it was ready."""
    pages: tuple[str, int] = ("", 0)

    def signal(self, number: int) -> None:
        """Send a signal; SIGSTOP has taken effect on all threads when this returns."""
        self.process.send_signal(number)
        while number == signal.SIGSTOP and psutil.Process(self.process.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.001)

    def wait(self, timeout_s: float) -> int:
        return self.process.wait(timeout_s)


@contextmanager
def worker_process(
    model: Path | None, *flags: str, n_ctx: int = 1024, folder: Path | None = None
) -> Iterator[WorkerProcess]:
    """`python -m device.worker` with `model`; ended at the end, by force if it must be.

    model None: the flags say where it comes from. folder: of its log and data; default the model's.
    """
    folder = folder or model.parent
    command = [
        sys.executable,
        "-m",
        "device.worker",
        "--n-ctx",
        str(n_ctx),
        "--threads",
        "1",
    ]
    command += [] if model is None else ["--model", str(model)]
    command += ["--port", "0", "--control-port", "0", *flags]
    log = (folder / "worker.log").open("ab")
    environ = {
        **os.environ,
        "OUTRIGGER_PARENT_PID": str(os.getpid()),
        "OUTRIGGER_CONFIG": "",
        "OUTRIGGER_DATA_DIR": str(folder),
    }
    process = subprocess.Popen(
        command, cwd=CHECKOUT, env=environ, stdout=subprocess.PIPE, stderr=log, text=True
    )
    try:
        said: list[str] = []
        while line := process.stdout.readline().strip():
            if found := re.search(r" ([\d.]+):(\d+), control (\d+)$", line):
                break
            said.append(line)
        assert line, f"no ready line after {said}; {Path(log.name).read_text()[-2000:]}"
        host, port, control_port = found.groups()
        pages = re.search(r", pages (\d+),", line)
        yield WorkerProcess(
            process,
            (host, int(port)),
            (host, int(control_port)),
            line,
            said,
            (host, int(pages[1]) if pages else 0),
        )
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        process.stdout.close()
        log.close()
