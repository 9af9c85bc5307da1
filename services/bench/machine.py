"""What a figure was measured on: the processor, its cores, and the commit of the checkout.

Knows nothing of benches. Never reads the host's name: reports are meant to be shared.
"""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]


def machine_text() -> str:
    """Processor model and core count, for example "AMD EPYC, 2 cores"."""
    n_cores = os.cpu_count() or 1
    return f"{_processor_model()}, {n_cores} core{'s' if n_cores != 1 else ''}"


def commit_text() -> str:
    """Short commit of the checkout, with "+" when tracked files differ from it; "unknown" outside a checkout."""
    commit = _output("git", "-C", str(CHECKOUT), "rev-parse", "--short=12", "HEAD")
    if commit is None:
        return "unknown"
    changed = _output("git", "-C", str(CHECKOUT), "status", "--porcelain", "--untracked-files=no")
    return commit + ("+" if changed else "")


def _processor_model() -> str:
    if platform.system() == "Darwin":
        return _output("sysctl", "-n", "machdep.cpu.brand_string") or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model") and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()


def _output(*command: str) -> str | None:
    """Standard output of a short command, stripped; None when it is absent or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
