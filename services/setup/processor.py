"""Which processor this is, as far as compiled code cares, and whether its AMX unit can be trusted.

llama.cpp is compiled for the very processor it runs on, so the kept wheel is keyed by `identity()`. There are virtual
machines that advertise Intel's AMX and kill the process that uses it; llama.cpp would use it on the first prompt. So
where AMX is advertised, a child process tries it before anything is built: if the child does not come back with the
right product, AMX is left out of the build, for the product and for the stock llama.cpp it is compared with alike.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import subprocess
from pathlib import Path
from typing import NamedTuple

PROBE_SOURCE = Path(__file__).with_name("amx_probe.c")
AMX_ON = ("-mamx-tile", "-mamx-int8")
AMX_OFF = ("-mno-amx-tile", "-mno-amx-int8", "-mno-amx-bf16")
COMPILE_TIMEOUT_S = 120
PROBE_RUN_TIMEOUT_S = 30.0

# Only what the compiler can make use of: kernels add names to the rest of the list at every update.
INSTRUCTION_SETS = re.compile(
    r"(mmx|s?sse|avx|amx|fma|f16c|bmi|abm|popcnt|movbe|adx|aes|vaes|v?pclmul|sha|gfni|asimd|sve|sme|i8mm|bf16|fp)"
)


class AmxVerdict(NamedTuple):
    """What was found out about AMX, and the compiler flags that follow from it."""

    word: str
    """absent, works, faults, or unknown to the compiler."""
    flags: tuple[str, ...]


def identity() -> str:
    """One line that differs wherever code compiled for this processor may not run, or not run well."""
    if platform.system() == "Darwin":
        return f"{platform.machine()} {_sysctl('machdep.cpu.brand_string')}"
    facts = _cpuinfo()
    names = ("vendor_id", "cpu family", "model", "model name", "CPU implementer", "CPU part", "CPU variant")
    described = " ".join(facts[name] for name in names if name in facts)
    return f"{platform.machine()} {described} {' '.join(sorted(instruction_sets()))}"


def instruction_sets() -> set[str]:
    """Names of the instruction set extensions that Linux reports for the first processor; empty elsewhere."""
    facts = _cpuinfo()
    words = (facts.get("flags") or facts.get("Features") or "").split()
    return {word for word in words if INSTRUCTION_SETS.match(word)}


def amx_verdict(advertised: bool, cc: str, folder: Path, probe: Path = PROBE_SOURCE) -> AmxVerdict:
    """Whether AMX may be compiled in. `folder` takes the compiled probe; `cc` is the C compiler's command."""
    if not advertised:
        return AmxVerdict("absent", ())
    folder.mkdir(parents=True, exist_ok=True)
    empty = folder / "empty.c"
    empty.write_text("int main(void) { return 0; }\n", encoding="utf-8")
    if not _compiles(cc, empty, folder / "empty", AMX_OFF):
        return AmxVerdict("unknown to the compiler", ())
    if _compiles(cc, probe, folder / "amx_probe", AMX_ON) and _survives(folder / "amx_probe"):
        return AmxVerdict("works", ())
    return AmxVerdict("faults", AMX_OFF)


def _compiles(cc: str, source: Path, program: Path, flags: tuple[str, ...]) -> bool:
    command = [*cc.split(), "-O1", *flags, str(source), "-o", str(program)]
    return (
        subprocess.run(command, capture_output=True, timeout=COMPILE_TIMEOUT_S, check=False).returncode == 0
    )


def _survives(program: Path) -> bool:
    """True when the child exits with 0. A signal (negative return code) is the answer we came for, so no core file."""
    try:
        child = subprocess.run(
            [str(program)],
            capture_output=True,
            timeout=PROBE_RUN_TIMEOUT_S,
            check=False,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)),
        )
    except subprocess.TimeoutExpired:
        return False
    return child.returncode == 0


def _cpuinfo() -> dict[str, str]:
    """The first processor's block of /proc/cpuinfo; empty where there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in text.split("\n\n", 1)[0].splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, value in pairs}


def _sysctl(name: str) -> str:
    try:
        answer = subprocess.run(
            ["sysctl", "-n", name], capture_output=True, text=True, timeout=10, check=False
        )
    except OSError:
        return "unknown"
    return answer.stdout.strip()


def libc() -> str:
    """Version of the C library, as "glibc 2.36"; empty where it is not told (macOS, musl)."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):
        return ""
